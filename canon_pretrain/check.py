"""Prove a mixer right before anybody trains it.

A mixer is a class of your own, FILE.py:Name, or one of the built-in ones. The checks are those of
model/mixer_check.py, on models of two layers; they take about half a minute on two cores. Exit code
0: all pass; 1: one fails; 2: the class cannot be built.
"""

import argparse
import shutil
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from canon_pretrain.core.cli import usage_error
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import write_json
from canon_pretrain.core.terminal import Console
from canon_pretrain.model.args import MIXERS, ModelArgs, to_json
from canon_pretrain.run.config import check_type, unknown_key

if TYPE_CHECKING:  # imports torch
    from canon_pretrain.model.mixer_check import Check, Subject

SECONDS = 60.0
"""After which the speed at longer texts is left out."""
# Options of this form set keys of [model]; argparse does not know them.
PREFIX = "--model."
# Color of a row by its state.
STYLES = {"ok": "green", "skipped": "yellow", "failed": "bold red"}
STEP = 1  # of the checkpoint that `check_export` writes; any number does


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "mixer",
        metavar="FILE.py:Name",
        help=f"a class of your own (train_configs/mixers/README.md), or {', '.join(MIXERS)}. "
        "--model.KEY VALUE sets keys of [model], such as --model.dim 512",
    )
    add("--json", type=Path, metavar="FILE", help="also write the rows here")


def run(arguments: argparse.Namespace) -> int:
    """Print a row for each check; return 1 if one fails. Raises UserError."""
    # Find mistakes on the command line before the checks, which take half a minute.
    overrides = parse_overrides(arguments.overrides)
    if "mixer" in overrides:
        raise usage_error("canon check", "--model.mixer: the mixer is the first argument")
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise UserError(
            "check.no_folder",
            f"--json {arguments.json}: its folder does not exist",
            path=arguments.json,
        )

    # not above: imports torch, which `canon --help` must not wait for
    from canon_pretrain.model.mixer_check import run_checks, tiny_args

    # The model that is checked: the first size that the class accepts.
    args = tiny_args(arguments.mixer, overrides)
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{args.mixer}: {args.num_layers} layers, dim {args.dim}, {args.num_heads} heads",
        markup=False,
    )

    # Rows are shown as they come. Measurements may have brackets, such as shapes: no markup.
    rows = []
    for row in run_checks(args, all_checks(), seconds=SECONDS):
        console.print(f"{row.state:8}", style=STYLES[row.state], end="")
        console.print(f"{row.name:16}{row.seconds:5.1f} s  {row.measured}", markup=False)
        rows.append(row)

    # A skipped check is no failure.
    failed = [row.name for row in rows if row.state == "failed"]
    verdict = f"failed: {', '.join(failed)}" if failed else "no check fails"
    console.print(f"{verdict}, in {sum(row.seconds for row in rows):.0f} s", markup=False)
    if arguments.json is not None:
        write_json(arguments.json, [asdict(row) for row in rows])
    return 1 if failed else 0


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Return the keys of `--model.KEY VALUE ...` with values of their types. Raises UserError."""
    # --model.KEY=VALUE becomes two words, as in --model.KEY VALUE.
    split_words = []
    for word in words:
        key, equals, value = word.partition("=")
        split_words += [key, value] if word.startswith(PREFIX) and equals else [word]

    # Words are options and values in turn. An odd number of words leaves the last option without a
    # value: it gets None. In an even number, zip drops that None.
    hints = get_type_hints(ModelArgs, include_extras=True)
    overrides = {}
    for option, text in zip(split_words[::2], [*split_words[1::2], None], strict=False):
        if not option.startswith(PREFIX) or text is None:
            raise usage_error("canon check", f"unrecognized arguments: {' '.join(words)}")

        key = option.removeprefix(PREFIX)
        if key not in hints:
            raise unknown_key(key, hints, "canon check", "model.")

        # A value is written as in TOML, also True and False; other words keep their case.
        written = text.lower() if text in ("True", "False") else text
        try:
            value = tomllib.loads(f"value = {written}")["value"]
        except tomllib.TOMLDecodeError:  # a string without quotes
            value = text
        check_type(value, hints[key], "canon check", f"model.{key}")
        overrides[key] = value
    return overrides


def all_checks() -> list["Check"]:
    """Return the checks of model/mixer_check.py, and that of the export before the speed."""
    # The export's is added here, since canon_pretrain.model may not import checkpoints and exports.
    # The speed comes last: it takes what time is left.
    from canon_pretrain.model.mixer_check import CHECKS, Check

    *others, speed = CHECKS
    return [*others, Check("export", check_export), speed]


def check_export(subject: "Subject") -> str:
    """An export of the model, loaded again, computes the same."""
    import torch

    from canon_pretrain.checkpoint.writer import save_no_dist
    from canon_pretrain.hf.export import export
    from canon_pretrain.hf.loading import load_model
    from canon_pretrain.hf.reading import import_folder
    from canon_pretrain.model import mixer_check as checks
    from canon_pretrain.model.mixer_files import mixer_files
    from canon_pretrain.run.folder import RunFolder

    model = checks.make_model(subject.args)
    with tempfile.TemporaryDirectory(prefix="canon-check-") as folder:
        # Write a run of this model, as far as `export` reads it: its config, its copy of the user's
        # files, and a checkpoint. The config names no data, and the identity is the model's part.
        run_folder = RunFolder(Path(folder) / "run")
        identity = {f"model.{name}": value for name, value in to_json(model.args).items()}
        run_folder.write_config({"data": {"path": "", "paths": []}}, identity)
        for file in mixer_files(model.args):
            run_folder.mixers.mkdir(exist_ok=True)
            (run_folder.mixers / file.path.name).write_bytes(file.path.read_bytes())

        checkpoint = run_folder.path / "checkpoint" / f"step-{STEP}"
        save_no_dist(dict(model.state_dict()), checkpoint, step=STEP, kind="full")

        # Export it, delete the run, and read the export: it must have all that the model needs,
        # the class too. An import without other state is step 0.
        out = Path(folder) / "export"
        imported = Path(folder) / "imported"
        export(checkpoint, out, with_tokenizer=False)
        shutil.rmtree(run_folder.path)
        import_folder(out, imported, trust_code=True)
        loaded = load_model(imported / "step-0", torch.device("cpu"))

        # The same logits [B, T, V] in float64, from the same tokens.
        num_files = len([*out.iterdir()])
        with torch.no_grad(), checks.exact():
            tokens_BT = checks.random_tokens(2, checks.TOKENS)
            wrong = checks.difference(loaded.double()(tokens_BT), model.double()(tokens_BT))
    if wrong is not None:
        raise checks.Violation(
            f"the result of the export differs by {wrong.amount:.2g}", **wrong._asdict()
        )
    return f"{num_files} files, loaded again: the same"
