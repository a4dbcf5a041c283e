"""Export a checkpoint as a folder that transformers and lm_eval load without this package.

    OUT/model*.safetensors      the weights under the names of LlamaCanonForCausalLM, + index
       /config.json             the model (config.py), generation_config.json
       /tokenizer.json          the training tokenizer (tokenizer_files.py), tokenizer_config.json,
                                tokenizer.model of SentencePiece BPE
       /modeling_canon.py, ...  the model's code (writing.py), unless transformers has a class
       /canon_pretrain.json     the origin of the weights, and the names of these files
       /README.md               how to load it, or the card that `card` makes of the run

It is written beside OUT and renamed. If OUT is replaced, its files are replaced one by one while
config.json is absent: either the export is complete, or it does not load.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from canon_pretrain.checkpoint import weights
from canon_pretrain.checkpoint.architecture import find_checkpoint, model_args_of
from canon_pretrain.core import files as disk
from canon_pretrain.core.errors import UserError
from canon_pretrain.data.tokenizer import SENTENCEPIECE_FILE, Tokenizer
from canon_pretrain.hf import writing
from canon_pretrain.hf.config import (
    ARCHITECTURE,
    MAMBA2,
    MODEL_TYPE,
    plain_fields,
    to_fields,
    to_hf,
)
from canon_pretrain.hf.loading import find_tokenizer, run_data
from canon_pretrain.hf.reading import CONFIG, interleave_orders, meta_weights
from canon_pretrain.hf.tokenizer_files import llama_cpp_reads, sentencepiece_file, tokenizer_files
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.counts import num_parameters, state_bytes, state_size
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.launches import own_version, read_run
from canon_pretrain.synthetic.evaluation import task_of_run

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RECORD = "canon_pretrain.json"
POSITION = ("train_state.", "dataloader.", "lr_scheduler.")
"""Prefixes of the state that records the training progress."""
_TOKENIZER_HINT = "Use --tokenizer PATH or --no-tokenizer"


Card = Callable[..., Mapping[str, bytes]]
"""Makes README.md and its pictures: report.card.model_card, which this package does not import."""


@dataclass(frozen=True)
class _Files:
    files: list[str]


def export(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str = "float32",
    tokenizer: Path | None = None,
    eos: str | None = None,
    with_tokenizer: bool = True,
    force: bool = False,
    max_file_bytes: int = writing.MAX_FILE_BYTES,
    card: Card | None = None,
    license_id: str | None = None,
) -> dict[str, Any]:
    """Write a checkpoint to the new folder `out` with weights of `dtype`; return its RECORD.

    `checkpoint` is RUN/checkpoint/step-N, or RUN for the newest. `tokenizer` is a file or folder,
    by default that of the run's data (or of the import); `eos` names its end-of-text token if
    nothing else does. `force` replaces the files of an earlier export, and nothing else in `out`.
    `card` writes README.md, with `license_id` if known; without, it says how to load the folder.
    Raises UserError without changing `out` if a check fails.
    """
    old = None
    if os.path.lexists(out):
        if not force:
            raise UserError(
                "hf.out_exists",
                f"{out} exists; choose another folder, or replace it with --force",
                path=out,
            )
        old = files_of_export(out)
    if old is not None:
        out = out.resolve()  # the temporary folder must be on the same disk
    run, checkpoint = find_checkpoint(checkpoint)
    weights.check_checkpoint(checkpoint)
    args = model_args_of(run)
    like = meta_weights(args)
    manifest = weights.check_weights(checkpoint, like)
    found, ids = _find_tokenizer(run, args, tokenizer, eos, wanted=with_tokenizer)
    facts = read_run(run)
    names = ("sha256", "bos_id", "eos_id", "vocab_size")
    record: dict[str, Any] = {
        "canon_pretrain": own_version(),
        "checkpoint": str(checkpoint.resolve()),
        "run_id": facts.run_id if facts else None,
        **{name: getattr(manifest, name) for name in ("step", "saved", "world_size", "torch")},
        "dtype": dtype,
        "num_parameters": num_parameters(args),
        "tokenizer": found and {name: getattr(found, name) for name in names},
        "position": weights.read_plain_values(checkpoint, POSITION),
        "identity": run.read_config()["identity"],
    }
    with writing.folder_beside(out, "exporting") as temporary:
        kind = (plain_fields(args) or {}).get("model_type", MODEL_TYPE)
        shapes = {to_hf(name, kind): tensor.shape for name, tensor in like.items()}
        plans = writing.plan_files(shapes, DTYPES[dtype], max_file_bytes)
        tensors = _tensors(checkpoint, args, like, DTYPES[dtype], kind)
        writing.write_files(temporary, plans, tensors, DTYPES[dtype])
        texts = _small_files(args, found, ids, dtype)
        about = _about(args, dtype, manifest.step, found)
        page = {"README.md": "# {title}\n\n{lead}\n\n{loading}".format_map(about).encode()}
        if card is not None:
            page = dict(card(run.path, manifest.step, license_id=license_id, **about))
        contents = page | {name: text.encode() for name, text in texts.items()}
        if found is not None and (model := sentencepiece_file(found)) is not None:
            contents[SENTENCEPIECE_FILE] = model
        for name, content in contents.items():
            (temporary / name).write_bytes(content)
        record["files"] = sorted({*(path.name for path in temporary.iterdir()), RECORD})
        disk.write_json(temporary / RECORD, record)
        _publish(temporary, out, old, record)
    return record


def _tensors(
    checkpoint: Path, args: ModelArgs, like: dict[str, Tensor], dtype: torch.dtype, kind: str
) -> Iterator[tuple[str, Tensor]]:
    orders = interleave_orders(args) if kind != MODEL_TYPE and args.rope_dim else {}
    for name, tensor in weights.stream_weights(checkpoint, like, dtype):
        if not tensor.isfinite().all():
            raise UserError(
                "hf.not_finite",
                f"{name} is not finite in {dtype}: choose another --dtype or an earlier step",
                name=name,
            )
        yield to_hf(name, kind), tensor[orders[name].argsort()] if name in orders else tensor


def files_of_export(out: Path) -> list[str]:
    """Return the names of the files of the export in `out`. Raises UserError."""
    files: list[str] = []
    with contextlib.suppress(disk.UnreadableFile):
        files = disk.read_record(out / RECORD, _Files).files
    if not files or any(name != Path(name).name for name in files):
        raise UserError(
            "hf.not_an_export",
            f"{out} exists, and has no valid {RECORD} that lists the files of an export",
            path=out,
        )
    return files


def _publish(temporary: Path, out: Path, old: list[str] | None, record: dict[str, Any]) -> None:
    for path in temporary.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    disk.fsync_folder(temporary)
    if old is None:
        disk.publish(temporary, out)
        return
    new = record["files"]
    for name in {*old, *new}:
        path = out / name
        if os.path.lexists(path) and (name not in old or path.is_dir()):
            raise UserError(
                "hf.not_an_export",
                f"{path} is not a file of the earlier export: move it",
                path=path,
            )
    # until the end the record lists the files of both exports, for --force after a kill
    disk.write_json(out / RECORD, record | {"files": sorted({*old, *new})})
    (out / CONFIG).unlink(missing_ok=True)
    disk.fsync_folder(out)
    for name in set(new) - {CONFIG, RECORD}:
        disk.rename(temporary / name, out / name)
    for name in set(old) - set(new):
        (out / name).unlink(missing_ok=True)
    disk.fsync_folder(out)
    for name in (CONFIG, RECORD):
        disk.rename(temporary / name, out / name)
    disk.fsync_folder(out)


@dataclass(frozen=True)
class _Ids:
    """What is known of the model's ids: EOS, and how many are in texts; others are padding."""

    eos_id: int | None
    vocab_size: int


def _find_tokenizer(
    run: RunFolder, args: ModelArgs, asked: Path | None, eos: str | None, *, wanted: bool
) -> tuple[Tokenizer | None, _Ids]:
    """Return the training tokenizer (None unless `wanted`) and its ids."""
    if not wanted:
        if (task := task_of_run(run.read_config()["identity"])) is not None:
            return None, _Ids(None, task.vocab_size)
        _, shards = run_data(run)
        known = (shards.eos_id, shards.vocab_size) if shards else (None, args.vocab_size)
        return None, _Ids(*known)
    found = find_tokenizer(run.path, run, asked, eos, hint=_TOKENIZER_HINT)
    if found.vocab_size > args.vocab_size:
        sizes = f"{found.vocab_size} tokens, the model {args.vocab_size}"
        raise UserError(
            "hf.vocab_size",
            f"the tokenizer has {sizes}. {_TOKENIZER_HINT}",
            given=found.vocab_size,
            expected=args.vocab_size,
        )
    return found, _Ids(found.eos_id, found.vocab_size)


def _small_files(
    args: ModelArgs, tokenizer: Tokenizer | None, ids: _Ids, dtype: str
) -> dict[str, str]:
    plain = plain_fields(args)
    files = {} if plain else dict(writing.bundled_code(own_version()))
    fields = plain or {
        "architectures": [ARCHITECTURE],
        "auto_map": {
            "AutoConfig": "modeling_canon.LlamaCanonConfig",
            "AutoModelForCausalLM": f"modeling_canon.{ARCHITECTURE}",
        },
        "model_type": MODEL_TYPE,
        **to_fields(args),
    }
    # EOS also starts a text, see tokenizer_files.py
    names = () if ids.eos_id is None else ("bos_token_id", "eos_token_id", "pad_token_id")
    ends = dict.fromkeys(names[:2], ids.eos_id)
    records = {CONFIG: {**fields, **ends, "torch_dtype": dtype}}
    records["generation_config.json"] = dict.fromkeys(names, ids.eos_id)
    if ids.vocab_size < args.vocab_size:
        unused = list(range(ids.vocab_size, args.vocab_size))
        records["generation_config.json"]["suppress_tokens"] = unused
    if tokenizer is not None:
        try:
            records |= tokenizer_files(tokenizer, args.max_seq_len)
        except UserError as error:
            raise UserError(
                "hf.inexact_tokenizer", f"{error}. Leave it out with --no-tokenizer"
            ) from None
    for name, record in records.items():
        files[name] = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    return files


PLACE = "THIS_FOLDER"
"""The folder in README.md, whose path is not known; a push puts the repository's name there."""
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
_CUSTOM = """\
Needs torch and transformers (4.57 or later); the modeling code is in this folder.
vLLM, SGLang and llama.cpp have no such class.
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
# found by trying 4.57.1; 5.23 is right
_OLD_MAMBA2 = """\
In transformers 4.57 this class is wrong for padding on the left and for a prompt that is read in
parts; its beam search needs `use_cache=False`. Transformers 5 is right.
"""
_NO_BOS = "\nThe tokenizer adds no BOS, as in training; EOS starts an empty context.\n"
_SERVERS = {"smollm3": "vLLM and SGLang serve", "mamba2": "vLLM serves"}


def _state_text(args: ModelArgs) -> str:
    """Return what decoding holds, if that is more than keys and values."""
    per_token, per_row = state_bytes(args, 2)
    sums = f"{args.canon_kernel - 1} sums per channel"
    own = sums
    if args.canon_filter == "dynamic":
        own = f"{args.canon_kernel - 1} inputs per channel, in bfloat16"
    sizes = [f"- Canon-{args.canon_set}: {own}"] if args.canon_set else []
    sizes += [f"- conv1d: {sums}"] if args.mixer_conv else []
    if state_size(args):
        head = f"{args.num_heads} states of {args.key_dim} x {args.value_dim}"
        sizes.append(f"- recurrence: {head}")
    tokens = _TOKENS.format(per_token) if per_token else ""
    text = _STATE.format(row=per_row, sizes="\n".join(sizes), tokens=tokens)
    return text if sizes else ""


def _about(args: ModelArgs, dtype: str, step: int, tokenizer: Tokenizer | None) -> dict[str, str]:
    """Return the parts of a README: title, lead (what the weights are) and loading."""
    plain, serving = plain_fields(args), _CUSTOM
    if plain is not None:
        servers = _SERVERS.get(plain["model_type"], "vLLM, SGLang and llama.cpp serve")
        serving = (
            f"A standard {plain['architectures'][0]}, without custom code.\n"
            f"{servers} it like any model of that class.\n"
        )
        if "llama.cpp" in servers and tokenizer is not None and not llama_cpp_reads(tokenizer):
            serving += _NO_GGUF
        if plain["model_type"] == MAMBA2:
            serving += _OLD_MAMBA2
    else:
        serving += _state_text(args)
    if tokenizer is not None:
        serving += _NO_BOS
    loads = [("model", "AutoModelForCausalLM")]
    loads += [("tokenizer", "AutoTokenizer")] if tokenizer is not None else []
    trust = "" if plain else "trust_remote_code=True"
    call = f'from_pretrained("{PLACE}"{trust and f", {trust}"})'
    lines = [f"from transformers import {', '.join(loader for _, loader in loads)}"]
    lines += [f"{name} = {loader}.{call}" for name, loader in loads]
    origin = f"step {step:,} of training" if step else "a checkpoint without a step of training"
    canon = f"Canon-{args.canon_set}" if args.canon_set else "no Canon layers"
    mixer = f"position {args.position}" if args.mixer == "attention" else f"mixer {args.mixer}"
    options = f"pretrained={PLACE}{trust and f',{trust}'}"
    return {
        "title": f"{args.num_layers} layers of width {args.dim}, {mixer}, {canon}",
        "lead": f"{num_parameters(args):,} parameters in {dtype}, from {origin}.",
        "loading": _LOADING.format(code="\n".join(lines), options=options, serving=serving),
    }
