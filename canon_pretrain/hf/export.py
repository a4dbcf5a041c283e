"""A checkpoint as a folder that transformers and lm_eval open, without this package.

    OUT/model*.safetensors      the weights under the names of LlamaCanonForCausalLM, + index
       /config.json             the model (config.py), generation_config.json
       /tokenizer.json          the training tokenizer (tokenizer_files.py), tokenizer_config.json
       /modeling_canon.py, ...  the code that travels (code.py)
       /canon_pretrain.json     what it was made from
       /README.md               how to load it

Written beside OUT and renamed: OUT is a whole export or not there. One tensor is in memory at a
time, or what a rank saved of it; no GPU and no process group is needed.
"""

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from canon_pretrain.checkpoint.architecture import find_checkpoint, model_args_of
from canon_pretrain.checkpoint.manifest import Manifest
from canon_pretrain.checkpoint.weights import (
    check_checkpoint,
    check_weights,
    read_plain_values,
    stream_weights,
)
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.data.tokenizer import Tokenizer, load_tokenizer
from canon_pretrain.errors import UserError
from canon_pretrain.files import fsync_folder
from canon_pretrain.hf.code import travelling_files
from canon_pretrain.hf.config import ARCHITECTURE, MODEL_TYPE, to_fields
from canon_pretrain.hf.names import to_hf
from canon_pretrain.hf.safetensors_file import MAX_FILE_BYTES, plan_files, write_files
from canon_pretrain.hf.tokenizer_files import tokenizer_files
from canon_pretrain.model.args import ModelArgs, num_parameters
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.launches import read_run
from canon_pretrain.run.provenance import own_version

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RECORD = "canon_pretrain.json"
POSITION = ("train_state.", "dataloader.", "lr_scheduler.")
"""What of a checkpoint's state says how far training had come."""


@dataclass(frozen=True)
class Exported:
    """What an export came to."""

    step: int
    num_parameters: int
    num_files: int
    """Those that hold weights."""
    num_bytes: int
    """Of them."""


@dataclass(frozen=True)
class _Source:
    """What an export is made from."""

    checkpoint: Path
    run: RunFolder
    args: ModelArgs
    manifest: Manifest
    tokenizer: Tokenizer | None
    eos_id: int | None


def export(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str = "float32",
    tokenizer: Path | None = None,
    eos: str | None = None,
    with_tokenizer: bool = True,
    force: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Exported:
    """Write a checkpoint to the new folder `out`, with weights of `dtype` (DTYPES).

    `checkpoint` is RUN/checkpoint/step-N, or RUN for the newest.

    Every file of the checkpoint is checked first. The tokenizer is that of the run's data folder,
    or the file or folder `tokenizer`; `eos` names its end of a text where neither the file nor the
    data says which it is. `force` replaces an earlier export. Raises UserError, and leaves `out` as
    it was, for a damaged checkpoint, weights that `dtype` can't hold, a tokenizer that is not there
    or can't be carried over, and an `out` that may not be replaced.
    """
    _check_out(out, force=force)
    run, checkpoint = find_checkpoint(checkpoint)
    check_checkpoint(checkpoint)
    args = model_args_of(run)
    with torch.device("meta"):
        like = dict(Transformer(args).named_parameters())
    manifest = check_weights(checkpoint, like)
    shards = _shards(run)
    found = _tokenizer(run, shards, tokenizer, eos, args) if with_tokenizer else None
    eos_id = found.eos_id if found else shards.eos_id if shards else None
    source = _Source(checkpoint, run, args, manifest, found, eos_id)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.exporting-", dir=out.parent))
    try:
        temporary.chmod(0o777 & ~_umask())
        for name, content in _small_files(source, dtype).items():
            (temporary / name).write_text(content, encoding="utf-8")
        shapes = {to_hf(name): tensor.shape for name, tensor in like.items()}
        plans = plan_files(shapes, DTYPES[dtype], max_file_bytes)
        stream = stream_weights(checkpoint, like, DTYPES[dtype])
        tensors = ((to_hf(name), _finite(name, tensor)) for name, tensor in stream)
        write_files(temporary, plans, tensors, DTYPES[dtype])
        _publish(temporary, out, force=force)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    num_bytes = sum((out / plan.name).stat().st_size for plan in plans)
    return Exported(manifest.step, num_parameters(args), len(plans), num_bytes)


def _finite(name: str, tensor: Tensor) -> Tensor:
    """`tensor`; UserError where its dtype could not hold a value, or training had lost it."""
    if not tensor.isfinite().all():
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise UserError(
            f"{name} has values that are not finite in {dtype}; choose --dtype bfloat16 or float32 "
            "where that is float16's range, else an earlier step"
        )
    return tensor


def _check_out(out: Path, *, force: bool) -> None:
    if not os.path.lexists(out):
        return
    if not force:
        raise UserError(f"{out} exists; choose another folder, or replace it with --force")
    if not (out / RECORD).is_file():
        raise UserError(
            f"{out} exists and is no export (it has no {RECORD}): --force replaces exports only. "
            "Choose another folder"
        )


def _publish(temporary: Path, out: Path, *, force: bool) -> None:
    """Sync all files and give the folder its name; with `force` in the place of an older one."""
    for path in temporary.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    fsync_folder(temporary)
    old = None
    if force and out.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{out.name}.replaced-", dir=out.parent))
        os.rename(out, old)  # onto an empty folder
    try:
        os.rename(temporary, out)
    except OSError:
        if old is not None:
            os.rename(old, out)
        raise
    fsync_folder(out.parent)
    if old is not None:
        shutil.rmtree(old)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# ---- what it is made from


def _data_folders(run: RunFolder) -> list[Path]:
    data = run.read_config().get("config", {}).get("data", {})
    paths = data.get("paths") or ([data["path"]] if data.get("path") else [])
    return [Path(path) for path in paths]


def _shards(run: RunFolder) -> TokenShards | None:
    """The training shards of the run's first data folder; None where they are gone."""
    for folder in _data_folders(run)[:1]:
        try:
            return TokenShards.open(folder / "train")
        except UserError:
            return None
    return None


def _tokenizer(
    run: RunFolder,
    shards: TokenShards | None,
    asked: Path | None,
    eos: str | None,
    args: ModelArgs,
) -> Tokenizer:
    """The training tokenizer; raises UserError where it is not there or another one."""
    way_out = "Name it with --tokenizer PATH, or leave it out with --no-tokenizer"
    eos_id = shards.eos_id if shards else args.eos_id if args.document_mask else eos
    folders = _data_folders(run)
    if asked is not None:
        found = load_tokenizer(asked, eos=eos_id)
    elif not folders:
        raise UserError(
            f"{run.config_file} names no data folder, where the tokenizer is. {way_out}"
        )
    else:
        try:
            found = Tokenizer.find(folders[0], eos=eos_id)
        except UserError as error:
            raise UserError(f"{error}. {way_out}") from None
    if shards and shards.tokenizer_sha256 not in (None, found.sha256):
        raise UserError(
            f"the tokenizer with the sha256 {found.sha256[:16]} is not the one that the run's data "
            f"was written with ({shards.tokenizer_sha256[:16]}). {way_out}"
        )
    if found.vocab_size > args.vocab_size:
        raise UserError(
            f"the tokenizer has {found.vocab_size} pieces, the model {args.vocab_size}: it is "
            f"another one. {way_out}"
        )
    return found


# ---- the files besides the weights


def _small_files(source: _Source, dtype: str) -> dict[str, str]:
    """The content of every file that holds no weights, by name."""
    version = own_version()
    files = dict(travelling_files(version))
    records = {
        "config.json": _config(source, dtype),
        "generation_config.json": _token_ids(source.eos_id, "pad"),
        RECORD: _record(source, dtype, version),
    }
    if source.tokenizer is not None:
        try:
            records |= tokenizer_files(source.tokenizer, source.args.max_seq_len)
        except UserError as error:
            raise UserError(f"{error}. Leave it out with --no-tokenizer") from None
    for name, record in records.items():
        files[name] = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    files["README.md"] = _readme(source, dtype)
    return files


def _token_ids(eos_id: int | None, *more: str) -> dict[str, Any]:
    """What begins a text and ends it: EOS does both, see tokenizer_files.py."""
    return {f"{name}_token_id": eos_id for name in ("bos", "eos", *more) if eos_id is not None}


def _config(source: _Source, dtype: str) -> dict[str, Any]:
    face = "modeling_canon"
    return {
        "architectures": [ARCHITECTURE],
        "auto_map": {
            "AutoConfig": f"{face}.LlamaCanonConfig",
            "AutoModelForCausalLM": f"{face}.{ARCHITECTURE}",
        },
        "model_type": MODEL_TYPE,
        **to_fields(source.args),
        **({"bos_token_id": None, "eos_token_id": None} | _token_ids(source.eos_id)),
        "pad_token_id": None,
        "torch_dtype": dtype,
    }


def _record(source: _Source, dtype: str, version: str | None) -> dict[str, Any]:
    """Where the weights come from, and how far their training had come."""
    known = source.run.read_config()
    facts = read_run(source.run)
    tokenizer = source.tokenizer
    return {
        "canon_pretrain": version,
        "checkpoint": str(source.checkpoint.resolve()),
        "run_id": facts.run_id if facts else None,
        "step": source.manifest.step,
        "saved": source.manifest.saved,
        "world_size": source.manifest.world_size,
        "torch": source.manifest.torch,
        "dtype": dtype,
        "num_parameters": num_parameters(source.args),
        "tokenizer": tokenizer
        and {
            "sha256": tokenizer.sha256,
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
            "vocab_size": tokenizer.vocab_size,
        },
        "position": read_plain_values(source.checkpoint, POSITION),
        "identity": known["identity"],
    }


def _readme(source: _Source, dtype: str) -> str:
    args = source.args
    canon = f"Canon-{args.canon_set}" if args.canon_set else "no Canon layers"
    classes, load = ["AutoModelForCausalLM"], ["model = AutoModelForCausalLM"]
    notes = [f"`{RECORD}` says what these weights were made from."]
    if source.tokenizer is not None:
        classes.append("AutoTokenizer")
        load.append("tokenizer = AutoTokenizer")
        notes += [
            "The tokenizer adds no BOS, as in training; a text that needs a token before its first",
            "one begins with EOS.",
        ]
    lines = [
        f"# {args.num_layers} layers of width {args.dim}, position {args.position}, {canon}",
        "",
        f"{num_parameters(args):,} parameters in {dtype}, from step {source.manifest.step:,} of "
        "their training.",
        "",
        f"    from transformers import {', '.join(classes)}",
        *(f'    {word}.from_pretrained("THIS FOLDER", trust_remote_code=True)' for word in load),
        "",
        "    lm_eval --model hf --model_args pretrained=THIS_FOLDER,trust_remote_code=True "
        "--tasks ...",
        "",
        "Needs torch and transformers (4.57 or later); the modeling code is in this folder.",
        *notes,
        "",
    ]
    return "\n".join(lines)
