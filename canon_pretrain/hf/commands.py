"""Export checkpoints to Hugging Face folders, push them to the hub, and import them.

Runs on the CPU. Exit code 2: bad input; nothing was written.

Imports the view of runs (report/) for the card; nothing else in hf/ does.
"""

import argparse
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import size

if TYPE_CHECKING:  # imports the hub's client
    from canon_pretrain.hf.push import Upload

DTYPES = ("float32", "bfloat16", "float16")


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="RUN",
        help="a run (its newest step), or RUN/checkpoint/step-N",
    )
    _add_out(parser)
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument(
        "--layout",
        default="transformers",
        choices=("transformers", "released"),
        help="released: params.json and consolidated.pth, as the paper's models on the hub",
    )
    _add_export_options(parser)
    parser.add_argument("--force", action="store_true", help="replace an earlier export")


def add_push_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="a run (its newest step), RUN/checkpoint/step-N, or the folder of an export",
    )
    add("repo", metavar="REPO", help="USER/NAME, ORGANIZATION/NAME, or NAME for your own")
    add("--private", action="store_true", help="create it private; refuse one that is public")
    add("--revision", metavar="BRANCH", help="such as step-1000, created if missing (main)")
    add("--dry-run", action="store_true", help="show files and card; use no network")
    add("--dtype", choices=DTYPES, help="float32")
    _add_export_options(parser)


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="HF_FOLDER")
    _add_out(parser)
    add("--state-from", type=Path, metavar="RUN/checkpoint/step-N", help="optimizer state etc.")
    add("--step", type=int, default=0, metavar="N", help="step of the checkpoint (0)")
    add("--ignore", nargs="+", default=[], metavar="FIELD", help="unknown fields to ignore")
    add("--trust-code", action="store_true", help="run and copy the export's own mixers")


def _add_out(parser: argparse.ArgumentParser) -> None:
    """Add OUT, and --out as another way to write it."""
    out = parser.add_mutually_exclusive_group(required=True)
    out.add_argument(
        "out", nargs="?", type=Path, metavar="OUT", default=argparse.SUPPRESS, help="a new folder"
    )
    out.add_argument("--out", dest="out", type=Path, metavar="OUT", help=argparse.SUPPRESS)


def run_export(arguments: Namespace) -> None:
    """Write a checkpoint as a folder for transformers."""
    out: Path = arguments.out
    released = arguments.layout == "released"
    record = _export(arguments, out, arguments.dtype, released=released, force=arguments.force)

    weight_files = [name for name in record["files"] if name.endswith((".safetensors", ".pth"))]
    num_bytes = sum((out / name).stat().st_size for name in weight_files)
    print(
        f"exported step {record['step']} to {out}: "
        f"{record['num_parameters']:,} parameters, {arguments.dtype}, {size(num_bytes)}"
    )


def _export(
    arguments: Namespace,
    out: Path,
    dtype: str,
    *,
    released: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Export `arguments.checkpoint`, with a model card; return what the export records."""
    from canon_pretrain.hf.export import export  # imports torch
    from canon_pretrain.report.card import model_card

    return export(
        arguments.checkpoint,
        out,
        dtype=dtype,
        released=released,
        tokenizer=arguments.tokenizer,
        eos=arguments.eos,
        with_tokenizer=not arguments.no_tokenizer,
        license_id=arguments.license_id,
        force=force,
        card=model_card,
    )


def run_push(arguments: Namespace) -> None:
    """Upload an export, or a checkpoint that is exported first; --dry-run prints it."""
    from canon_pretrain.hf import push
    from canon_pretrain.hf.export import RECORD

    # An export has its options already.
    push.check_name(arguments.repo)
    is_export = (arguments.checkpoint / RECORD).is_file()
    export_options = ("dtype", "license_id", "tokenizer", "eos", "no_tokenizer")
    if is_export and any(getattr(arguments, name) for name in export_options):
        raise UserError(
            "option.conflict",
            f"{arguments.checkpoint} is an export, pushed as it is: pass such options to `export`",
            path=arguments.checkpoint,
        )

    # Log in before the export, which may take minutes; --dry-run needs no login.
    repo: str = arguments.repo
    if not arguments.dry_run:
        repo = push.full_name(repo)

    with tempfile.TemporaryDirectory(prefix="canon-push-") as scratch:
        folder = arguments.checkpoint
        if not is_export:
            folder = Path(scratch) / "export"
            _export(arguments, folder, arguments.dtype or "float32")

        upload = push.Upload.of(folder, repo, arguments.revision)
        total = f"{size(sum(upload.sizes.values()))} in {len(upload.files)} files"
        if arguments.dry_run:
            _print_upload(upload, f"would push {total} to {_destination(arguments)}")
        else:
            address = push.push(upload, private=arguments.private, revision=arguments.revision)
            print(f"pushed {total} to {repo}: {address}")


def _destination(arguments: Namespace) -> str:
    """Describe where --dry-run would push to, without the network."""
    owner = "" if "/" in arguments.repo else "YOUR_NAME/"
    branch = arguments.revision or "main"
    visibility = "private" if arguments.private else "public if new"
    return f"{owner}{arguments.repo}, branch {branch}, {visibility}"


def _print_upload(upload: "Upload", title: str) -> None:
    """Print the files of an upload, and the model card."""
    from canon_pretrain.hf.push import README

    print(f'{title}, as "{upload.message}":')
    for name, num_bytes in upload.sizes.items():
        print(f"{size(num_bytes):>12}  {name}")
    print(f"\n---- {README} ----\n{bytes(upload.files[README]).decode()}")


def run_import(arguments: Namespace) -> None:
    """Write a Hugging Face folder as a checkpoint."""
    from canon_pretrain.hf.reading import MODEL_TOML, import_folder  # imports torch

    out: Path = arguments.out
    imported = import_folder(
        arguments.folder,
        out,
        state_from=arguments.state_from,
        step=arguments.step,
        ignore=arguments.ignore,
        trust_code=arguments.trust_code,
    )
    print(f"imported to {imported.checkpoint}; the [model] section is {out / MODEL_TOML}")

    # without optimizer state there is only the model to load
    switch = "initial_load_model_only"
    if arguments.state_from:
        switch = f"no_{switch}"
    print(
        "to train from it in a new run folder: "
        f"--checkpoint.initial_load_path {imported.checkpoint} --checkpoint.{switch}"
    )


def _add_export_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tokenizer", type=Path, metavar="PATH", help="the tokenizer, if it was moved")
    add("--eos", metavar="TOKEN", help="end-of-text token, if its file does not name it")
    add("--no-tokenizer", action="store_true", help="write only weights and code")
    add("--license", dest="license_id", metavar="ID", help="for the card, such as apache-2.0")
