"""Import a Hugging Face folder as a checkpoint to train from.

    HF_FOLDER/config.json, *.safetensors  ->  OUT/step-N/      the weights, float32, with a manifest
                                              OUT/config.json  the model, as a run folder records it
                                              OUT/model.toml   the [model] section, for `extends`
                                              OUT/tokenizer.*  the tokenizer, if there is one

No code of the folder is run, nothing is unpickled without an allow-list, no link out of the folder
is followed. OUT is written under a temporary name and renamed.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from canon_pretrain.checkpoint import weights as checkpoints
from canon_pretrain.checkpoint.architecture import find_checkpoint
from canon_pretrain.checkpoint.safe_load import read_metadata
from canon_pretrain.checkpoint.writer import save_no_dist
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import fsync_folder, publish, read_json, write_atomic
from canon_pretrain.data.tokenizer import FILE_NAMES
from canon_pretrain.hf import config as fields
from canon_pretrain.hf import lingua
from canon_pretrain.hf.config import layout, to_hf
from canon_pretrain.hf.writing import INDEX, folder_beside
from canon_pretrain.model.args import FLAVORS, ModelArgs
from canon_pretrain.model.counts import num_parameters
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.folder import IMPORTED_FROM, RunFolder

CONFIG = "config.json"
ONE_FILE = "model.safetensors"
MODEL_TOML = "model.toml"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# tables in old Llama checkpoints that follow from the config
_TABLES = ".rotary_emb.inv_freq"


class Imported(NamedTuple):
    checkpoint: Path
    args: ModelArgs


def import_folder(
    source: Path,
    out: Path,
    *,
    step: int = 0,
    state_from: Path | None = None,
    ignore: Iterable[str] = (),
) -> Imported:
    """Write the weights of the folder `source` as OUT/step-N; N is `step`, or that of `state_from`.

    `state_from` is a full checkpoint of the same model, whose optimizer and other state is copied.
    `ignore` names unknown fields of config.json. Raises UserError, with nothing written, for other
    models, and if `out` exists or is being written.
    """
    if os.path.lexists(out):
        raise UserError("hf.out_exists", f"{out} exists: name a new folder", path=out)
    if step < 0:
        raise UserError("hf.negative_step", f"step = {step}: expected 0 or more", given=step)
    args = folder_args(source, ignore=ignore)
    state: dict[str, Any] = {}
    if state_from is not None:
        _, state_from = find_checkpoint(state_from)
        step = checkpoints.checkpoint_step(state_from)
        state = _training_state(state_from, args)
    weights = folder_weights(source, args)
    kind: Any = "full" if state else "weights"
    with folder_beside(out, "importing") as temporary:
        target = temporary / f"step-{step}"
        save_no_dist(state | weights, target, step=step, kind=kind, in_place=True)
        write_atomic(temporary / MODEL_TOML, model_toml(args, str(source.absolute())).encode())
        identity = {f"model.{name}": value for name, value in asdict(args).items()}
        # as a run folder's, for export and evaluation of OUT/step-N
        RunFolder(temporary).write_config({IMPORTED_FROM: str(source.absolute())}, identity)
        # a folder may have both a SentencePiece model and its conversion; data accepts one
        for name in [name for name in FILE_NAMES if (source / name).is_file()][:1]:
            write_atomic(temporary / name, _file(source, name).read_bytes())
        fsync_folder(temporary)
        publish(temporary, out)
    return Imported(out / target.name, args)


def folder_args(source: Path, *, ignore: Iterable[str] = ()) -> ModelArgs:
    """Return the model of the folder. Raises UserError if it is unsupported."""
    params = _params(source)
    path = _file(source, params or CONFIG)
    config = read_json(path, finite=False)
    kind, ignored = config.get("model_type"), set(ignore)
    if params is None and kind not in fields.MODEL_TYPES and "model_type" not in ignored:
        known = f"{' or '.join(fields.MODEL_TYPES)}, or --ignore model_type"
        raise UserError(
            "hf.model_type", f"{path} has model_type = {kind!r}; expected {known}", given=kind
        )
    reader: Any = fields if params is None else lingua
    if others := sorted(set(reader.unknown(config)) - ignored):
        raise UserError(
            "hf.unknown_fields",
            f"{path} has unknown fields. If they have no effect: --ignore {' '.join(others)}",
            names=others,
        )
    try:
        if params is None:
            layout(config)  # raises for an unknown one, before the weights are read
        args = reader.to_args(config)
    except UserError as error:
        found: Any = error.fields
        raise UserError("hf.unsupported_field", f"{path}: {error}", **found) from None
    shapes = [shape for _, _, shape, _ in _tensors(source)]
    num_values = sum(shape.numel() for shape in shapes)
    if args.num_layers > len(shapes) or num_parameters(args) > 4 * num_values:
        raise UserError(
            "hf.missing_tensors",
            f"{path} describes {args.num_layers} layers with {num_parameters(args):,} parameters"
            f"; the folder has {len(shapes):,} tensors with {num_values:,} values",
        )
    return args


def folder_weights(source: Path, args: ModelArgs) -> dict[str, Tensor]:
    """Return the weights of the folder in float32, with our names and rotary layout."""
    is_lingua = _params(source) is not None
    described = lingua.PARAMS if is_lingua else CONFIG
    config = {} if is_lingua else read_json(_file(source, CONFIG), finite=False)
    kind = str(config.get("model_type"))
    wanted = meta_weights(args)
    weights: dict[str, Tensor] = {}
    extra: list[str] = []
    for theirs, ours, shape, read in _tensors(source):
        if args.tie_embeddings and ours == "output.weight":  # stored twice by some writers
            ours = "tok_embeddings.weight"
        if ours is None or ours not in wanted:
            extra += [] if theirs.endswith(_TABLES) else [theirs]
            continue
        if shape != wanted[ours].shape:
            given, expected = tuple(shape), tuple(wanted[ours].shape)
            raise UserError(
                "hf.tensor_shape",
                f"{source}: {theirs} has shape {given}, expected {expected}",
                name=theirs,
                given=given,
                expected=expected,
            )
        tensor = read()
        if tensor.dtype not in _FLOATS:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise UserError(
                "hf.tensor_dtype",
                f"{source}: {theirs} is {dtype}, expected floating point",
                name=theirs,
                given=dtype,
            )
        tensor = tensor.to(torch.float32)
        if ours in weights and not torch.equal(weights[ours], tensor):
            head, embedding = (to_hf(name, kind) for name in ("output.weight", ours))
            raise UserError(
                "hf.tied_weights_differ",
                f"{source}: {described} ties {head} and {embedding}, but they differ",
            )
        weights[ours] = tensor
    absent = [name for name in wanted if name not in weights]
    if missing := [name if is_lingua else to_hf(name, kind) for name in absent]:
        raise UserError(
            "hf.missing_tensors",
            f"{source} lacks {_listed(missing)}, which its {described} describes",
            names=missing,
        )
    if extra:
        raise UserError(
            "hf.unknown_tensors",
            f"{source} has {_listed(extra)}, which its {described} does not describe",
            names=extra,
        )
    if not is_lingua and args.rope_dim and layout(config) == fields.HUGGINGFACE:
        for name, order in interleave_orders(args).items():
            weights[name] = weights[name][order]
    return {name: weights[name] for name in wanted}


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def is_folder(path: Path) -> bool:
    """Return whether `path` is a Hugging Face folder: config.json and weights."""
    return (path / CONFIG).is_file() and any((path / name).is_file() for name in (ONE_FILE, INDEX))


def meta_weights(args: ModelArgs) -> dict[str, Tensor]:
    """Return the parameters and stored buffers of the model, in order, on the meta device."""
    with torch.device("meta"):
        model = Transformer(replace(args, max_seq_len=1))  # small rotary tables
    return dict(model.state_dict())


def interleave_orders(args: ModelArgs) -> dict[str, Tensor]:
    """Return by parameter name the order of rows that turns HUGGINGFACE's layout into LINGUA's.

    Llama's code rotates dim i of a head with dim i + R/2, ours dim 2i with 2i + 1.
    """
    half = args.rope_dim // 2
    pairs = torch.stack((torch.arange(half), torch.arange(half) + half), dim=1).flatten()
    head = torch.cat((pairs, torch.arange(args.rope_dim, args.head_dim)))
    of_q, of_k = (
        (torch.arange(count)[:, None] * args.head_dim + head).flatten()
        for count in (args.num_heads, args.kv_heads)
    )
    q_dim, k_dim, v_dim = args.qkv_dims
    orders = {"attention.wq": of_q, "attention.wk": of_k}
    if args.qk_norm == "full":
        orders |= {"attention.q_norm": of_q, "attention.k_norm": of_k}
    if args.qk_norm == "per_head":
        orders |= {"attention.q_norm": head, "attention.k_norm": head}
    if "B" in args.canon_set:
        of_v = q_dim + k_dim + torch.arange(v_dim)
        orders["attention.canon_b"] = torch.cat((of_q, q_dim + of_k, of_v))
    return {
        f"layers.{i}.{name}.weight": order
        for i in range(args.num_layers)
        for name, order in orders.items()
    }


def model_toml(args: ModelArgs, source: str) -> str:
    """Return a TOML file whose [model] section sets every field of `args`."""
    values = asdict(args)
    flavor = max(FLAVORS, key=lambda name: len(asdict(FLAVORS[name]).items() & values.items()))
    seq_len = values.pop("max_seq_len")
    # quoted: a path may contain line ends
    lines = [f"# the model of {json.dumps(source)}", "", "[model]", f'flavor = "{flavor}"']
    lines += [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    return "\n".join([*lines, "", "[training]", f"seq_len = {seq_len}", ""])


def _training_state(checkpoint: Path, args: ModelArgs) -> dict[str, Any]:
    if checkpoints.check_weights(checkpoint, meta_weights(args)).kind != "full":
        raise UserError(
            "checkpoint.weights_only",
            f"{checkpoint} holds only weights, no optimizer state",
            path=checkpoint,
        )
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in read_metadata(checkpoint).state_dict_metadata.items()
        if name.startswith(checkpoints.TRAINING_STATE)
    }
    checkpoints.load_no_dist(state, checkpoint)
    return state


# -- the folder's files -------------------------------------------------------------------------


def _params(source: Path) -> Path | None:
    if any((source / name).is_file() for name in (ONE_FILE, INDEX)):
        return None
    names = (Path(lingua.PARAMS), Path(lingua.VARIANT, lingua.PARAMS))
    return next((name for name in names if os.path.lexists(source / name)), None)


def _file(source: Path, name: str | Path) -> Path:
    """Return the path of a file. Raises UserError for links out of the folder."""
    path = source / name
    try:
        real, root = path.resolve(), source.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise UserError("hf.outside_link", f"{path}: {error}", path=path) from None
    # in the hub's cache each file of snapshots/REVISION is a link to its blob
    blobs = [f.parent.parent / "blobs" for f in (root, root.parent) if f.parent.name == "snapshots"]
    if not any(real.is_relative_to(folder) for folder in (root, *blobs)):
        raise UserError(
            "hf.outside_link",
            f"{path} is a link to {real}, outside of the folder: copy the file itself",
            path=path,
        )
    if real.exists() and not real.is_file():
        raise UserError("hf.unreadable_weights", f"{path} is not a regular file", path=path)
    return path


def _tensors(source: Path) -> Iterator[tuple[str, str | None, torch.Size, Callable[[], Tensor]]]:
    """Yield each tensor's name, our name or None, shape, and a function that reads it."""
    if (params := _params(source)) is not None:
        path = _file(source, params.with_name(lingua.WEIGHTS))
        for name, tensor in lingua.read_tensors(path).items():
            yield name, lingua.to_ours(name), tensor.shape, tensor.detach
        return
    for path, names in _files(source).items():
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                there = set(file.keys())
                if lost := sorted(names - there):
                    raise UserError(
                        "hf.damaged_index",
                        f"{path} lacks {_listed(lost)}, which {INDEX} lists",
                        names=lost,
                    )
                for name in sorted(names or there):
                    shape = torch.Size(file.get_slice(name).get_shape())
                    try:
                        ours = fields.to_ours(name)
                    except ValueError:
                        ours = None
                    yield name, ours, shape, partial(file.get_tensor, name)
        except (SafetensorError, OSError) as error:
            raise UserError(
                "hf.unreadable_weights", f"{path} cannot be read: {error}", path=path
            ) from None


def _files(source: Path) -> dict[Path, set[str]]:
    """Return the tensor names by safetensors file, from the index; empty: all in the file."""
    if (source / INDEX).is_file():
        places = read_json(_file(source, INDEX), finite=False).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise UserError("hf.damaged_index", f"{source / INDEX} has no weight_map")
        files: dict[Path, set[str]] = {}
        for name, file in places.items():
            if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file):
                raise UserError(
                    "hf.damaged_index",
                    f"{source / INDEX} lists {name} in {file!r}: expected a file name",
                    names=[name],
                )
            files.setdefault(_file(source, file), set()).add(name)
        return files
    if (source / ONE_FILE).is_file():
        return {_file(source, ONE_FILE): set()}
    if any(source.glob("*.bin")) or any(source.glob("*.pt*")):
        raise UserError(
            "hf.pickled_weights",
            f"{source} holds pickled weights, which can run code: use safetensors",
            path=source,
        )
    raise UserError("hf.no_weights", f"{source} has neither {ONE_FILE} nor {INDEX}", path=source)
