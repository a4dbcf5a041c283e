"""`python -m canon_pretrain.hf import`: a Hugging Face folder as a checkpoint to train on from.

    HF_FOLDER/config.json, *.safetensors  ->  OUT/step-N/      the weights, float32, with a manifest
                                              OUT/config.json  the model, as a run folder records it
                                              OUT/model.toml   the [model] section, to `extends`
                                              OUT/tokenizer.*  the tokenizer, if it is there

No code of the folder is run, nothing is unpickled freely, no link out of it is followed. OUT is
written beside it and renamed.
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
from canon_pretrain.checkpoint.writer import save_alone
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import fsync_folder, publish, read_json, write_atomic
from canon_pretrain.data.tokenizer import FILE_NAMES
from canon_pretrain.hf import config as fields
from canon_pretrain.hf import lingua
from canon_pretrain.hf.config import layout, to_hf
from canon_pretrain.hf.writing import INDEX, folder_beside
from canon_pretrain.model.args import FLAVORS, ModelArgs, num_parameters
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.folder import RunFolder

CONFIG = "config.json"
ONE_FILE = "model.safetensors"
MODEL_TOML = "model.toml"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# tables that old Llama checkpoints hold, which follow from the config
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

    `state_from` is a full checkpoint of the same model, of which training continues. `ignore` names
    fields of config.json that change nothing. Raises UserError, with nothing written, for no such
    model, and if `out` exists or is being written.
    """
    if os.path.lexists(out):
        raise UserError("todo.reading", f"{out} exists: name a new folder")
    if step < 0:
        raise UserError("todo.reading", f"step = {step}: expected 0 or more")
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
        save_alone(state | weights, target, step=step, kind=kind, in_place=True)
        write_atomic(temporary / MODEL_TOML, model_toml(args, str(source.absolute())).encode())
        identity = {f"model.{name}": value for name, value in asdict(args).items()}
        # as a run's: export and evaluation find the model of OUT/step-N there
        RunFolder(temporary).write_config({"imported_from": str(source.absolute())}, identity)
        # a folder may have its SentencePiece model and a conversion of it: data takes one of them
        for name in [name for name in FILE_NAMES if (source / name).is_file()][:1]:
            write_atomic(temporary / name, _file(source, name).read_bytes())
        fsync_folder(temporary)
        publish(temporary, out)
    return Imported(out / target.name, args)


def folder_args(source: Path, *, ignore: Iterable[str] = ()) -> ModelArgs:
    """Return the model of the folder; UserError if it is not ours or larger than its weights."""
    params = _params(source)
    path = _file(source, params or CONFIG)
    config = read_json(path, finite=False)
    kind, ignored = config.get("model_type"), set(ignore)
    if params is None and kind not in fields.MODEL_TYPES and "model_type" not in ignored:
        known = f"{' or '.join(fields.MODEL_TYPES)}, or --ignore model_type"
        raise UserError("todo.reading", f"{path} has model_type = {kind!r}; expected {known}")
    reader: Any = fields if params is None else lingua
    if others := sorted(set(reader.unknown(config)) - ignored):
        raise UserError(
            "todo.reading",
            f"{path} has {', '.join(others)}, which this version does not know and which may "
            f"change the model. Where they change nothing, say so: --ignore {' '.join(others)}",
        )
    try:
        if params is None:
            layout(config)  # an unknown one is refused before anything large is read
        args = reader.to_args(config)
    except UserError as error:
        raise UserError("todo.reading", f"{path}: {error}") from None
    shapes = [shape for _, _, shape, _ in _tensors(source)]
    num_values = sum(shape.numel() for shape in shapes)
    if args.num_layers > len(shapes) or num_parameters(args) > 4 * num_values:
        raise UserError(
            "todo.reading",
            f"{path} describes {args.num_layers} layers with {num_parameters(args):,} parameters; "
            f"the folder holds {len(shapes):,} tensors of {num_values:,} values",
        )
    return args


def folder_weights(source: Path, args: ModelArgs) -> dict[str, Tensor]:
    """Return the weights of the folder, whose model is `args`: float32, by our names and layout."""
    is_lingua = _params(source) is not None
    described = lingua.PARAMS if is_lingua else CONFIG
    wanted = meta_parameters(args)
    weights: dict[str, Tensor] = {}
    extra: list[str] = []
    for theirs, ours, shape, read in _tensors(source):
        if args.tie_embeddings and ours == "output.weight":  # some writers store it twice
            ours = "tok_embeddings.weight"
        if ours is None or ours not in wanted:
            extra += [] if theirs.endswith(_TABLES) else [theirs]
            continue
        if shape != wanted[ours].shape:
            asked = tuple(wanted[ours].shape)
            raise UserError(
                "todo.reading", f"{source}: {theirs} has the shape {tuple(shape)}, expected {asked}"
            )
        tensor = read()
        if tensor.dtype not in _FLOATS:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise UserError(
                "todo.reading", f"{source}: {theirs} is {dtype}; expected floating-point weights"
            )
        tensor = tensor.to(torch.float32)
        if ours in weights and not torch.equal(weights[ours], tensor):
            head = to_hf("output.weight")
            raise UserError(
                "todo.reading",
                f"{source}: {described} ties them, but {head} and {to_hf(ours)} differ",
            )
        weights[ours] = tensor
    missing = [name if is_lingua else to_hf(name) for name in wanted if name not in weights]
    for what, names in (("lacks", missing), ("holds beside the model", extra)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            listed = ", ".join(names[:5]) + more
            raise UserError(
                "todo.reading", f"{source} {what} {listed}: it is not the model of its {described}"
            )
    if not is_lingua and args.rope_dim:
        if layout(read_json(_file(source, CONFIG), finite=False)) == fields.HUGGINGFACE:
            for name, order in interleave_orders(args).items():
                weights[name] = weights[name][order]
    return {name: weights[name] for name in wanted}


def is_folder(path: Path) -> bool:
    """Return whether this is a Hugging Face folder: a config.json with weights beside it."""
    return (path / CONFIG).is_file() and any((path / name).is_file() for name in (ONE_FILE, INDEX))


def meta_parameters(args: ModelArgs) -> dict[str, Tensor]:
    """Return the parameters of the model of `args`, in its order, without values."""
    with torch.device("meta"):
        model = Transformer(replace(args, max_seq_len=1))  # no rotary tables, which would be real
    return dict(model.named_parameters())


def interleave_orders(args: ModelArgs) -> dict[str, Tensor]:
    """Return by our parameter name the order of its rows that turns rotary halves into pairs.

    Llama's code rotates dim i of a head with dim i + R/2, ours 2i with 2i + 1.
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
    """Return the [model] section that selects `args`, with every key, whatever is beside it."""
    values = asdict(args)
    flavor = max(FLAVORS, key=lambda name: len(asdict(FLAVORS[name]).items() & values.items()))
    seq_len = values.pop("max_seq_len")
    # quoted: a name may hold what no comment may
    lines = [f"# the model of {json.dumps(source)}", "", "[model]", f'flavor = "{flavor}"']
    lines += [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    return "\n".join([*lines, "", "[training]", f"seq_len = {seq_len}", ""])


def _training_state(checkpoint: Path, args: ModelArgs) -> dict[str, Any]:
    if checkpoints.check_weights(checkpoint, meta_parameters(args)).kind != "full":
        raise UserError(
            "todo.reading", f"{checkpoint} holds weights alone: it has no optimizer state"
        )
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in read_metadata(checkpoint).state_dict_metadata.items()
        if name.startswith(checkpoints.TRAINING_STATE)
    }
    checkpoints.load_alone(state, checkpoint)
    return state


# -- the folder's files -------------------------------------------------------------------------


def _params(source: Path) -> Path | None:
    if any((source / name).is_file() for name in (ONE_FILE, INDEX)):
        return None
    names = (Path(lingua.PARAMS), Path(lingua.VARIANT, lingua.PARAMS))
    return next((name for name in names if os.path.lexists(source / name)), None)


def _file(source: Path, name: str | Path) -> Path:
    """Return the path of a file; UserError for a link out of the folder, or no regular file."""
    path = source / name
    try:
        real, root = path.resolve(), source.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise UserError("todo.reading", f"{path} cannot be read: {error}") from None
    # the hub's cache holds each file of snapshots/REVISION as a link to its blob
    blobs = [f.parent.parent / "blobs" for f in (root, root.parent) if f.parent.name == "snapshots"]
    if not any(real.is_relative_to(folder) for folder in (root, *blobs)):
        raise UserError(
            "todo.reading",
            f"{path} is a link out of {source}, to {real}: put the file itself there",
        )
    if real.exists() and not real.is_file():
        raise UserError("todo.reading", f"{path} is not a regular file")
    return path


def _tensors(source: Path) -> Iterator[tuple[str, str | None, torch.Size, Callable[[], Tensor]]]:
    """Yield every tensor's name there, ours (or None), shape, and how to read it until the next."""
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
                        "todo.reading",
                        f"{path} lacks {', '.join(lost[:5])}, which {INDEX} puts there",
                    )
                for name in sorted(names or there):
                    shape = torch.Size(file.get_slice(name).get_shape())
                    try:
                        ours = fields.to_ours(name)
                    except ValueError:
                        ours = None
                    yield name, ours, shape, partial(file.get_tensor, name)
        except (SafetensorError, OSError) as error:
            raise UserError("todo.reading", f"{path} cannot be read: {error}") from None


def _files(source: Path) -> dict[Path, set[str]]:
    """Return the names that an index takes from each safetensors file; without one none: all."""
    if (source / INDEX).is_file():
        places = read_json(_file(source, INDEX), finite=False).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise UserError("todo.reading", f"{source / INDEX} has no weight_map")
        files: dict[Path, set[str]] = {}
        for name, file in places.items():
            if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file):
                raise UserError(
                    "todo.reading",
                    f"{source / INDEX} puts {name} into {file!r}: expected a file name",
                )
            files.setdefault(_file(source, file), set()).add(name)
        return files
    if (source / ONE_FILE).is_file():
        return {_file(source, ONE_FILE): set()}
    if any(source.glob("*.bin")) or any(source.glob("*.pt*")):
        raise UserError(
            "todo.reading",
            f"{source} holds pickled weights (.bin, .pt), which can run code when they are read: "
            "save it as safetensors where you trust it (model.save_pretrained)",
        )
    raise UserError("todo.reading", f"{source} has neither {ONE_FILE} nor {INDEX}")
