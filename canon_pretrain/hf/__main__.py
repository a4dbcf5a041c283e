"""Export checkpoints to Hugging Face folders, and import them.

    python -m canon_pretrain.hf export RUN OUT [--dtype bfloat16] [--force]
    python -m canon_pretrain.hf import HF_FOLDER OUT [--state-from RUN/checkpoint/step-N]

Runs on the CPU. Exit code 2: bad input; nothing was written.
"""

import argparse
from pathlib import Path
from typing import Any

from canon_pretrain.core.cli import command, program
from canon_pretrain.core.errors import EPILOG


def main(argv: list[str] | None = None) -> None:
    """`python -m canon_pretrain.hf`; exits with code 2 for bad input."""
    with command():
        arguments = vars(_parser().parse_args(argv))
        run = arguments.pop("run")
        run(**arguments)


def _export(checkpoint: Path, out: Path, dtype: str, no_tokenizer: bool, **options: Any) -> None:
    from canon_pretrain.hf.export import export  # imports torch

    record = export(checkpoint, out, dtype=dtype, with_tokenizer=not no_tokenizer, **options)
    files = [name for name in record["files"] if name.endswith(".safetensors")]
    megabytes = sum((out / name).stat().st_size for name in files) / 1e6
    size = f"{record['num_parameters']:,} parameters, {dtype}, {megabytes:,.1f} MB"
    print(f"exported step {record['step']} to {out}: {size}")


def _import(folder: Path, out: Path, **options: Any) -> None:
    from canon_pretrain.hf.reading import MODEL_TOML, import_folder  # imports torch

    found = import_folder(folder, out, **options)
    print(f"imported to {found.checkpoint}; the [model] section is {out / MODEL_TOML}")
    switch = "no_initial_load_model_only" if options["state_from"] else "initial_load_model_only"
    load = f"--checkpoint.initial_load_path {found.checkpoint} --checkpoint.{switch}"
    print(f"to train from it in a new run folder: {load}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("canon_pretrain.hf"),
        description="Export checkpoints to Hugging Face folders, and import them.",
        epilog=EPILOG,
    )
    commands = parser.add_subparsers(required=True)
    out = commands.add_parser("export", help="write a checkpoint as a folder for transformers")
    out.set_defaults(run=_export)
    add = out.add_argument
    add(
        "checkpoint",
        type=Path,
        metavar="RUN",
        help="a run (its newest step), or RUN/checkpoint/step-N",
    )
    add("out", type=Path, metavar="OUT", help="a new folder")
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    add("--tokenizer", type=Path, metavar="PATH", help="the tokenizer, if it was moved")
    add("--eos", metavar="TOKEN", help="end-of-text token, if its file does not name it")
    add("--no-tokenizer", action="store_true", help="write only weights and code")
    add("--force", action="store_true", help="replace an earlier export")
    into = commands.add_parser("import", help="write a Hugging Face folder as a checkpoint")
    into.set_defaults(run=_import)
    add = into.add_argument
    add("folder", type=Path, metavar="HF_FOLDER")
    add("out", type=Path, metavar="OUT", help="a new folder")
    add("--state-from", type=Path, metavar="RUN/checkpoint/step-N", help="optimizer state etc.")
    add("--step", type=int, default=0, metavar="N", help="step of the checkpoint (0)")
    add("--ignore", nargs="+", default=[], metavar="FIELD", help="unknown fields to ignore")
    return parser


if __name__ == "__main__":
    main()
