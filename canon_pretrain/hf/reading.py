"""Import a Hugging Face folder as a checkpoint to train from.

    HF_FOLDER/config.json, *.safetensors  ->  OUT/step-N/      the weights, float32, with a manifest
                                              OUT/config.json  the model, as a run folder records it
                                              OUT/model.toml   the [model] section, for `extends`
                                              OUT/tokenizer.*  the tokenizer, if there is one
                                              OUT/mixers/      the files of own mixers

No code of the folder is run, but the user's own mixers of an export, and these only if the caller
says so. Nothing is unpickled without an allow-list, no link out of the folder
is followed. OUT is written under a temporary name and renamed.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from canon_pretrain.checkpoint import weights as checkpoints
from canon_pretrain.checkpoint.architecture import find_checkpoint
from canon_pretrain.checkpoint.manifest import Kind
from canon_pretrain.checkpoint.safe_load import read_metadata
from canon_pretrain.checkpoint.writer import save_no_dist
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import fsync_folder, publish, read_json, write_atomic
from canon_pretrain.data.tokenizer import FILE_NAMES
from canon_pretrain.hf import classes, lingua
from canon_pretrain.hf.classes import CLASSES, MODEL_TYPES, REFUSED_TYPES, to_hf, to_ours
from canon_pretrain.hf.config import HUGGINGFACE, layout, raise_unsupported
from canon_pretrain.hf.rotary_rows import interleave_orders
from canon_pretrain.hf.standard import Packed, TheirWeights
from canon_pretrain.hf.writing import INDEX, folder_beside, unflatten
from canon_pretrain.model.args import (
    FILLED_SIZES,
    FLAVORS,
    ModelArgs,
    own_mixers,
    to_json,
    with_mixers_in,
)
from canon_pretrain.model.counts import num_parameters
from canon_pretrain.model.mixer_files import mixer_file, mixer_files
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.folder import IMPORTED_FROM, MIXERS, RunFolder

CONFIG = "config.json"
ONE_FILE = "model.safetensors"
MODEL_TOML = "model.toml"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# tables in old Llama checkpoints that follow from the config
_TABLES = ".rotary_emb.inv_freq"
_MAX_PARAMETERS_PER_VALUE = 4
"""More parameters than this per stored value are no model: only tied weights are stored once."""


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
    trust_code: bool = False,
) -> Imported:
    """Write the weights of the folder `source` as OUT/step-N; N is `step`, or that of `state_from`.

    `state_from` is a full checkpoint of the same model, whose optimizer and other state is copied.
    `ignore` names unknown fields of config.json. `trust_code` runs the files of the user's own
    mixers in `source`, and copies them. Raises UserError, with nothing written, for other models,
    and if `out` exists or is being written.
    """
    if os.path.lexists(out):
        raise UserError("hf.out_exists", f"{out} exists: name a new folder", path=out)
    if step < 0:
        raise UserError("hf.negative_step", f"step = {step}: expected 0 or more", given=step)

    # Read and check everything before a file is written.
    with tempfile.TemporaryDirectory(prefix="canon-import-") as scratch:
        mixers = Path(scratch) if trust_code else None
        return _import_folder(source, out, step, state_from, ignore, mixers)


def _import_folder(
    source: Path,
    out: Path,
    step: int,
    state_from: Path | None,
    ignore: Iterable[str],
    mixers: Path | None,
) -> Imported:
    """See `import_folder`; `mixers`: a temporary folder that `folder_args` fills with the files of
    own mixers, or None if the user does not trust them."""
    args = folder_args(source, ignore=ignore, mixers=mixers)
    state: dict[str, Any] = {}
    if state_from is not None:
        state_from, _ = find_checkpoint(state_from)
        step = checkpoints.checkpoint_step(state_from)
        state = _training_state(state_from, args)
    weights = folder_weights(source, args)

    with folder_beside(out, "importing") as temporary:
        checkpoint = temporary / f"step-{step}"
        kind: Kind = "full" if state else "weights"
        save_no_dist(state | weights, checkpoint, step=step, kind=kind, in_place=True)

        # The files of own mixers, by their names in OUT.
        if own_mixers(args):
            (temporary / MIXERS).mkdir()
            for file in mixer_files(args):
                write_atomic(temporary / MIXERS / file.path.name, file.path.read_bytes())
            args = with_mixers_in(args, str(out.absolute() / MIXERS))

        # The model, to train from and, as in a run folder, to export and evaluate.
        origin = str(source.absolute())
        write_atomic(temporary / MODEL_TOML, model_toml(args, origin).encode())
        identity = {f"model.{name}": value for name, value in to_json(args).items()}
        RunFolder(temporary).write_config({IMPORTED_FROM: origin}, identity)

        # a folder may have both a SentencePiece model and its conversion; data accepts one
        for name in FILE_NAMES:
            if (source / name).is_file():
                write_atomic(temporary / name, _file(source, name).read_bytes())
                break

        fsync_folder(temporary)
        publish(temporary, out)
    return Imported(out / checkpoint.name, args)


def folder_args(
    source: Path, *, ignore: Iterable[str] = (), mixers: Path | None = None
) -> ModelArgs:
    """Return the model of the folder. Raises UserError if it is unsupported.

    Files of the user's own mixers are copied to the folder `mixers`, and their code is run; None
    refuses them.
    """
    params = _params(source)
    path = _file(source, params or CONFIG)
    config = read_json(path, finite=False)
    ignored = set(ignore)

    # The class.
    model_type = config.get("model_type")
    if not isinstance(model_type, str | None):
        model_type = repr(model_type)  # a list has no hash, and is refused below
    if model_type in REFUSED_TYPES:
        name, reason = REFUSED_TYPES[model_type]
        raise_unsupported(name, config.get(name), f"{model_type}: {reason}")
    is_supported = params is not None or model_type in MODEL_TYPES
    if not is_supported and "model_type" not in ignored:
        raise UserError(
            "hf.model_type",
            f"{path} has model_type = {model_type!r}; expected "
            f"{' or '.join(MODEL_TYPES)}, or --ignore model_type",
            given=model_type,
        )

    # Fields that may change the model in an unknown way.
    reader: Any = classes if params is None else lingua
    unknown_fields = sorted(set(reader.unknown(config)) - ignored)
    if unknown_fields:
        raise UserError(
            "hf.unknown_fields",
            f"{path} has unknown fields. If they have no effect: "
            f"--ignore {' '.join(unknown_fields)}",
            names=unknown_fields,
        )

    # Fields that are read, and out of range or unsupported: the message names the file, too.
    try:
        args = reader.to_args(config)
    except UserError as error:
        error_fields: Any = error.fields
        raise UserError("hf.unsupported_field", f"{path}: {error}", **error_fields) from None

    standard = CLASSES.get(str(model_type))
    if standard is not None and standard.mixer_folder is not None:
        args = with_mixers_in(args, str(standard.mixer_folder))
    else:
        args = _with_mixers(source, args, mixers)

    # Refuse a claim such as ten million layers before a model of that size is created.
    shapes = [tensor.shape for tensor in _tensors(source)]
    num_values = sum(shape.numel() for shape in shapes)
    max_parameters = _MAX_PARAMETERS_PER_VALUE * num_values
    if args.num_layers > len(shapes) or num_parameters(args) > max_parameters:
        raise UserError(
            "hf.missing_tensors",
            f"{path} describes {args.num_layers} layers with {num_parameters(args):,} parameters"
            f"; the folder has {len(shapes):,} tensors with {num_values:,} values",
        )
    return args


def _with_mixers(source: Path, args: ModelArgs, folder: Path | None) -> ModelArgs:
    """Return `args` with the files of own mixers in `folder`, copied from the export `source`."""
    args = with_mixers_in(args, str(source))
    mixers = own_mixers(args)
    if not mixers:
        return args
    if folder is None:
        raise UserError(
            "hf.untrusted_mixer",
            f"{source} has code of its own, {', '.join(sorted(mixers))}. If you trust it: "
            "canon hf import --trust-code, and use the imported folder",
            names=mixers,
        )

    for mixer in mixers:
        path = _file(source, mixer_file(mixer).path.name)
        text = unflatten(path.read_text(encoding="utf-8"), source)
        write_atomic(folder / path.name, text.encode())
    return with_mixers_in(args, str(folder))


def folder_weights(source: Path, args: ModelArgs) -> dict[str, Tensor]:
    """Return the weights of the folder in float32, with our names and rotary layout.

    Raises UserError for tensors that are missing, unknown, or of another shape or type.
    """
    params = _params(source)
    config_name = CONFIG if params is None else lingua.PARAMS
    config = read_json(_file(source, params or CONFIG), finite=False)
    model_type = str(config.get("model_type"))
    theirs: TheirWeights | None = CLASSES.get(model_type)
    if params is not None:
        theirs = lingua.weights_of(config)

    def their_name(name: str) -> str:
        return to_hf(name, model_type, args) if theirs is None else theirs.to_hf(name, args)

    # Read the tensors that the config describes, and remember the names of others.
    our_shapes = {name: tensor.shape for name, tensor in meta_weights(args).items()}
    expected_shapes: Mapping[str, torch.Size] = our_shapes
    weights: dict[str, Tensor] = {}
    unknown_names: list[str] = []
    packed_by_name: dict[str, Packed] = {}
    stored_tensors: Iterable[_StoredTensor] = _tensors(source, theirs, model_type, args)
    if theirs is not None:
        expected_shapes = theirs.their_shapes(our_shapes, args)
        packed_by_name = {packed.name: packed for packed in theirs.packed_tensors(args)}
        stored_tensors = _with_joined_parts(stored_tensors, theirs, source)
    for stored in stored_tensors:
        if packed := packed_by_name.get(stored.name):
            shape = torch.Size((packed.num_rows, args.dim))
            weights |= packed.split(_read_checked(stored, shape, source))
            continue

        name = stored.our_name
        if args.tie_embeddings and name == "output.weight":  # stored twice by some writers
            name = "tok_embeddings.weight"
        if name is None or name not in expected_shapes:
            is_ignored = stored.name.endswith(_TABLES)
            if theirs is not None:
                is_ignored = is_ignored or re.fullmatch(theirs.ignored, stored.name) is not None
            if not is_ignored:
                unknown_names.append(stored.name)
            continue

        tensor = _read_checked(stored, expected_shapes[name], source)
        if name in weights and not torch.equal(weights[name], tensor):
            raise UserError(
                "hf.tied_weights_differ",
                f"{source}: {config_name} ties {their_name('output.weight')} and "
                f"{their_name(name)}, but they differ",
            )
        weights[name] = tensor

    # Config and tensors must describe one model.
    missing_names = [name for name in expected_shapes if name not in weights]
    if missing_names:
        names = {part.name: p.name for p in packed_by_name.values() for part in p.parts}
        missing_names = [names.get(name) or their_name(name) for name in missing_names]
        missing_names = list(dict.fromkeys(missing_names))
        raise UserError(
            "hf.missing_tensors",
            f"{source} lacks {_listed(missing_names)}, which its {config_name} describes",
            names=missing_names,
        )
    if unknown_names:
        raise UserError(
            "hf.unknown_tensors",
            f"{source} has {_listed(unknown_names)}, which its {config_name} does not describe",
            names=unknown_names,
        )

    # Our rotary layout is lingua's.
    if params is None and layout(config) == HUGGINGFACE:
        for name, order in interleave_orders(args).items():
            weights[name] = weights[name][order]
    our_weights: Mapping[str, Tensor] = weights
    if theirs is not None:
        our_weights = theirs.values_to_ours(weights, args, config)
    return {name: our_weights[name] for name in our_shapes}


def _read_checked(stored: "_StoredTensor", shape: torch.Size, source: Path) -> Tensor:
    """Return the tensor in float32. Raises UserError unless it has this shape and is floating."""
    if stored.shape != shape:
        raise UserError(
            "hf.tensor_shape",
            f"{source}: {stored.name} has shape {tuple(stored.shape)}, expected {tuple(shape)}",
            name=stored.name,
            given=tuple(stored.shape),
            expected=tuple(shape),
        )
    return _read_float32(stored, source)


def _read_float32(stored: "_StoredTensor", source: Path) -> Tensor:
    """Return the tensor in float32. Raises UserError unless it is floating."""
    tensor = stored.read()
    if tensor.dtype not in _FLOATS:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise UserError(
            "hf.tensor_dtype",
            f"{source}: {stored.name} is {dtype}, expected floating point",
            name=stored.name,
            given=dtype,
        )
    return tensor.to(torch.float32)


def _listed(names: list[str]) -> str:
    """Return up to five names, and how many more there are."""
    text = ", ".join(names[:5])
    return text if len(names) <= 5 else f"{text} and {len(names) - 5} more"


def is_folder(path: Path) -> bool:
    """Return whether `path` is a Hugging Face folder: config.json and weights."""
    return (path / CONFIG).is_file() and _has_safetensors(path)


def _has_safetensors(folder: Path) -> bool:
    return (folder / ONE_FILE).is_file() or (folder / INDEX).is_file()


def meta_weights(args: ModelArgs) -> dict[str, Tensor]:
    """Return the parameters and stored buffers of the model, in order, on the meta device."""
    with torch.device("meta"):
        model = Transformer(replace(args, max_seq_len=1))  # small rotary tables
    return dict(model.state_dict())


def _num_equal_fields(args: ModelArgs, other: ModelArgs) -> int:
    values = vars(other)
    return sum(value == values[name] for name, value in vars(args).items())


def model_toml(args: ModelArgs, source: str) -> str:
    """Return a TOML file whose [model] section sets every field of `args`."""
    # unlike a run's config.json, with the folders of own mixers
    layer_sections = {name: dict(section) for name, section in args.layers.items()}
    values = to_json(args) | {"mixer": args.mixer, "layers": layer_sections}
    # the flavor that agrees in the most fields; all fields are set anyway
    flavor = max(FLAVORS, key=lambda name: _num_equal_fields(FLAVORS[name], args))
    seq_len = values.pop("max_seq_len")
    layers = values.pop("layers")
    for name, kind in args.kinds.items():
        if args.pattern:  # else they are filled in
            layers.setdefault(name, {})
            layers[name] |= {field: getattr(kind, field) for field in FILLED_SIZES}
    lines = [
        f"# the model of {json.dumps(source)}",  # quoted: a path may contain line ends
        "",
        "[model]",
        f'flavor = "{flavor}"',
        *(f"{name} = {json.dumps(value)}" for name, value in values.items()),
        "",
        "[training]",
        f"seq_len = {seq_len}",
        "",
    ]
    for name, section in layers.items():
        lines += [
            f"[model.layers.{json.dumps(name)}]",
            *(f"{key} = {json.dumps(value)}" for key, value in section.items()),
            "",
        ]
    return "\n".join(lines)


def _training_state(checkpoint: Path, args: ModelArgs) -> dict[str, Any]:
    """Return what a full checkpoint of this model holds besides weights. Raises UserError."""
    if checkpoints.check_weights(checkpoint, meta_weights(args)).kind != "full":
        raise UserError(
            "checkpoint.weights_only",
            f"{checkpoint} holds only weights, no optimizer state",
            path=checkpoint,
        )

    # DCP loads into this dictionary: empty tensors, and None for other values.
    state: dict[str, Any] = {}
    for name, entry in read_metadata(checkpoint).state_dict_metadata.items():
        if name.startswith(checkpoints.TRAINING_STATE):
            state[name] = None
            if isinstance(entry, TensorStorageMetadata):
                state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    checkpoints.load_no_dist(state, checkpoint)
    return state


# -- the folder's files -------------------------------------------------------------------------


def _params(source: Path) -> Path | None:
    """Return lingua's params.json, relative to `source`; None for other folders."""
    if _has_safetensors(source):
        return None
    for params in (Path(lingua.PARAMS), Path(lingua.VARIANT, lingua.PARAMS)):
        if os.path.lexists(source / params):
            return params
    return None


def _file(source: Path, name: str | Path) -> Path:
    """Return the path of a file. Raises UserError for links out of the folder."""
    path = source / name
    try:
        real_path = path.resolve()
        root = source.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise UserError("hf.outside_link", f"{path}: {error}", path=path) from None

    # In the hub's cache each file of MODEL/snapshots/REVISION[/VARIANT] is a link to its blob.
    allowed_roots = [root]
    for revision in (root, root.parent):
        if revision.parent.name == "snapshots":
            allowed_roots.append(revision.parent.parent / "blobs")
    if not any(map(real_path.is_relative_to, allowed_roots)):
        raise UserError(
            "hf.outside_link",
            f"{path} is a link to {real_path}, outside of the folder: copy the file itself",
            path=path,
        )

    # A missing file is the reader's error; a folder or a device must not be read.
    if real_path.exists() and not real_path.is_file():
        raise UserError("hf.unreadable_weights", f"{path} is not a regular file", path=path)
    return path


class _StoredTensor(NamedTuple):
    """A tensor of the folder, not read yet; `our_name` is None for parameters of other models."""

    name: str
    our_name: str | None
    shape: torch.Size
    read: Callable[[], Tensor]


def _with_joined_parts(
    tensors: Iterable[_StoredTensor], theirs: TheirWeights, source: Path
) -> Iterator[_StoredTensor]:
    """Yield the tensors; those that a class stores in parts as one, after the last part.

    Parts may have any number of rows: `save_pretrained` of transformers 5.23 cuts OLMo Hybrid's
    convolutions into equal ones. Raises UserError if they don't fit together.
    """
    parts_by_name: dict[str, dict[int, Tensor]] = {}
    for stored in tensors:
        number = theirs.part_number(stored.name)
        if number is None or stored.our_name is None:
            yield stored
            continue

        parts = parts_by_name.setdefault(stored.our_name, {})
        parts[number] = _read_float32(stored, source)
        first = next(iter(parts.values()))
        shape = tuple(stored.shape)
        expected_shape = (*shape[:1], *first.shape[1:])
        if shape != expected_shape or not shape:
            raise UserError(
                "hf.tensor_shape",
                f"{source}: {stored.name} has shape {shape}, expected {expected_shape}",
                name=stored.name,
                given=shape,
                expected=expected_shape,
            )
        if len(parts) == len(theirs.conv_parts):
            whole = torch.cat([parts[number] for number in sorted(parts)])
            yield stored._replace(shape=whole.shape, read=whole.detach)


def _tensors(
    source: Path,
    theirs: TheirWeights | None = None,
    model_type: str = "",
    args: ModelArgs | None = None,
) -> Iterator[_StoredTensor]:
    """Yield the folder's tensors; each can be read until the next one. Raises UserError.

    `theirs`: the class, for the names of its parameters, if it is not like Llama. `args`: the
    model, for a class whose layers have other names.
    """

    def our_name(name: str) -> str | None:
        try:
            return to_ours(name, model_type, args) if theirs is None else theirs.to_ours(name, args)
        except ValueError:
            return None

    params = _params(source)
    if params is not None:
        path = _file(source, params.with_name(lingua.WEIGHTS))
        for name, tensor in lingua.read_tensors(path).items():
            yield _StoredTensor(name, our_name(name), tensor.shape, tensor.detach)
        return

    # Opened one at a time; a tensor is read from its file only when it is asked for.
    for path, indexed_names in _files(source).items():
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                stored_names = set(file.keys())
                lost_names = sorted(indexed_names - stored_names)
                if lost_names:
                    raise UserError(
                        "hf.damaged_index",
                        f"{path} lacks {_listed(lost_names)}, which {INDEX} lists",
                        names=lost_names,
                    )

                # a file without an index has all tensors
                for name in sorted(indexed_names or stored_names):
                    shape = torch.Size(file.get_slice(name).get_shape())
                    read = partial(file.get_tensor, name)
                    yield _StoredTensor(name, our_name(name), shape, read)
        except (SafetensorError, OSError) as error:
            raise UserError(
                "hf.unreadable_weights", f"{path} cannot be read: {error}", path=path
            ) from None


def _files(source: Path) -> dict[Path, set[str]]:
    """Return the tensor names by safetensors file, from the index; empty: all in the file."""
    if (source / INDEX).is_file():
        return _indexed_files(source)
    if (source / ONE_FILE).is_file():
        return {_file(source, ONE_FILE): set()}
    if any(source.glob("*.bin")) or any(source.glob("*.pt*")):
        raise UserError(
            "hf.pickled_weights",
            f"{source} holds pickled weights, which can run code: use safetensors",
            path=source,
        )
    raise UserError("hf.no_weights", f"{source} has neither {ONE_FILE} nor {INDEX}", path=source)


def _indexed_files(source: Path) -> dict[Path, set[str]]:
    """Return the tensor names by safetensors file. Raises UserError for a damaged index."""
    index = source / INDEX
    weight_map = read_json(_file(source, INDEX), finite=False).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError("hf.damaged_index", f"{index} has no weight_map")

    # Only files of this folder, without a path.
    files: dict[Path, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file):
            raise UserError(
                "hf.damaged_index",
                f"{index} lists {name} in {file!r}: expected a file name",
                names=[name],
            )
        files.setdefault(_file(source, file), set()).add(name)
    return files
