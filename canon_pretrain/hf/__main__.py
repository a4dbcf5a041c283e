"""Export checkpoints to Hugging Face folders, push them to the hub, and import them.

    canon hf export RUN OUT [--dtype bfloat16] [--force]
    canon hf push RUN USER/NAME [--private] [--dry_run]
    canon hf import HF_FOLDER OUT [--state-from RUN/checkpoint/step-N]

Runs on the CPU. Exit code 2: bad input; nothing was written.

Imports the view of runs (report/) for the card; nothing else in hf/ does.
"""

import argparse
import functools
import tempfile
from pathlib import Path
from typing import Any

from canon_pretrain.core.cli import Parser, command, run_process
from canon_pretrain.core.errors import EPILOG, UserError
from canon_pretrain.core.terminal import size

DTYPES = ("float32", "bfloat16", "float16")


def main(argv: list[str] | None = None) -> None:
    """`canon hf`; exits with code 2 for bad input."""
    with command():
        arguments = vars(_parser().parse_args(argv))
        run = arguments.pop("run")
        run(**arguments)


def _export_with_card(
    checkpoint: Path, out: Path, no_tokenizer: bool, **options: Any
) -> dict[str, Any]:
    from canon_pretrain.hf.export import export  # imports torch
    from canon_pretrain.report.card import model_card

    return export(checkpoint, out, with_tokenizer=not no_tokenizer, card=model_card, **options)


def _export(checkpoint: Path, out: Path, dtype: str, **options: Any) -> None:
    record = _export_with_card(checkpoint, out, dtype=dtype, **options)
    files = [name for name in record["files"] if name.endswith(".safetensors")]
    total = size(sum((out / name).stat().st_size for name in files))
    about = f"{record['num_parameters']:,} parameters, {dtype}, {total}"
    print(f"exported step {record['step']} to {out}: {about}")


def _push(
    checkpoint: Path,
    repo: str,
    private: bool,
    revision: str | None,
    dry_run: bool,
    dtype: str | None,
    license_id: str | None,
    **options: Any,
) -> None:
    from canon_pretrain.hf import push
    from canon_pretrain.hf.export import RECORD

    push.check_name(repo)
    is_export = (checkpoint / RECORD).is_file()
    if is_export and any([dtype, license_id, *options.values()]):
        raise UserError(
            "option.conflict",
            f"{checkpoint} is an export, pushed as it is: give such options to `export`",
            path=checkpoint,
        )
    if not dry_run:
        repo = push.full_name(repo)
    with tempfile.TemporaryDirectory(prefix="canon-push-") as scratch:
        folder = checkpoint if is_export else Path(scratch) / "export"
        if not is_export:
            options |= {"dtype": dtype or "float32", "license_id": license_id}
            _export_with_card(checkpoint, folder, **options)
        upload = push.Upload.of(folder, repo, revision)
        total = f"{size(sum(upload.sizes.values()))} in {len(upload.files)} files"
        if not dry_run:
            address = push.push(upload, private=private, revision=revision)
            print(f"pushed {total} to {repo}: {address}")
            return
        where = f"{'' if '/' in repo else 'YOUR_NAME/'}{repo}, branch {revision or 'main'}, "
        where += "private" if private else "public if new"
        print(f'would push {total} to {where}, as "{upload.message}":')
        for name, num_bytes in upload.sizes.items():
            print(f"{size(num_bytes):>12}  {name}")
        print(f"\n---- {push.README} ----\n{bytes(upload.files[push.README]).decode()}")


def _import(folder: Path, out: Path, **options: Any) -> None:
    from canon_pretrain.hf.reading import MODEL_TOML, import_folder  # imports torch

    found = import_folder(folder, out, **options)
    print(f"imported to {found.checkpoint}; the [model] section is {out / MODEL_TOML}")
    switch = "no_initial_load_model_only" if options["state_from"] else "initial_load_model_only"
    load = f"--checkpoint.initial_load_path {found.checkpoint} --checkpoint.{switch}"
    print(f"to train from it in a new run folder: {load}")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="canon hf",
        description="Export checkpoints to Hugging Face folders, push them, and import them.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True)
    new = functools.partial(commands.add_parser, allow_abbrev=False)
    out = new("export", help="write a checkpoint as a folder for transformers")
    out.set_defaults(run=_export)
    add = out.add_argument
    add(
        "checkpoint",
        type=Path,
        metavar="RUN",
        help="a run (its newest step), or RUN/checkpoint/step-N",
    )
    add("out", type=Path, metavar="OUT", help="a new folder")
    add("--dtype", default="float32", choices=DTYPES)
    _add_export_options(out)
    add("--force", action="store_true", help="replace an earlier export")
    up = new("push", help="upload an export with a model card to the hub")
    up.set_defaults(run=_push)
    add = up.add_argument
    what = "a run (its newest step), RUN/checkpoint/step-N, or the folder of an export"
    add("checkpoint", type=Path, metavar="CHECKPOINT", help=what)
    add("repo", metavar="REPO", help="USER/NAME, ORGANIZATION/NAME, or NAME for your own")
    add("--private", action="store_true", help="create it private; refuse one that is public")
    add("--revision", metavar="BRANCH", help="such as step-1000, created if missing (main)")
    add("--dry_run", action="store_true", help="show files and card; use no network")
    add("--dtype", choices=DTYPES, help="float32")
    _add_export_options(up)
    into = new("import", help="write a Hugging Face folder as a checkpoint")
    into.set_defaults(run=_import)
    add = into.add_argument
    add("folder", type=Path, metavar="HF_FOLDER")
    add("out", type=Path, metavar="OUT", help="a new folder")
    add("--state-from", type=Path, metavar="RUN/checkpoint/step-N", help="optimizer state etc.")
    add("--step", type=int, default=0, metavar="N", help="step of the checkpoint (0)")
    add("--ignore", nargs="+", default=[], metavar="FIELD", help="unknown fields to ignore")
    return parser


def _add_export_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tokenizer", type=Path, metavar="PATH", help="the tokenizer, if it was moved")
    add("--eos", metavar="TOKEN", help="end-of-text token, if its file does not name it")
    add("--no-tokenizer", action="store_true", help="write only weights and code")
    add("--license", dest="license_id", metavar="ID", help="for the card, such as apache-2.0")


if __name__ == "__main__":
    run_process(main)
