"""Look at a run's checkpoints, prove them whole, and make room.

    python -m canon_pretrain.checkpoint list RUN [--json]
    python -m canon_pretrain.checkpoint verify RUN [--step N] [--workers W] [--json]
    python -m canon_pretrain.checkpoint prune RUN --keep K [--quarantine] [--archive] [--dry_run]

RUN is a run folder or the folder of its checkpoints. `list` reads no file but manifests; `verify`
reads every byte and moves nothing; `prune` counts verified checkpoints only. Exit code 1: a
checkpoint is damaged or of another run, or not all could be pruned; 2: bad input.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from rich.table import Table
from rich.text import Text

from canon_pretrain.checkpoint.folder import CheckpointFolder, tree_bytes
from canon_pretrain.checkpoint.manifest import DamagedCheckpoint, Manifest, as_record, verify
from canon_pretrain.checkpoint.retention import Retention, held_steps
from canon_pretrain.core.cli import command
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console
from canon_pretrain.run.folder import CHECKPOINTS, RunFolder
from canon_pretrain.run.launches import known_run

EXIT_DAMAGED = 1
_PIPED_WIDTH = 100_000  # no line of a table is as long: nothing is cut or folded


def main(argv: list[str] | None = None) -> None:
    """`python -m canon_pretrain.checkpoint`; exits with code 1 for damage, 2 for bad input."""
    words = sys.argv[1:] if argv is None else argv
    with command(prints=words[:1] == ["list"]):
        arguments = _parser().parse_args(words)
        run, folder = find_folder(arguments.run)
        if arguments.command == "list":
            _list(run, folder, as_json=arguments.json)
        elif arguments.command == "verify":
            _verify(run, folder, arguments)
        elif arguments.dry_run:
            _plan(run, folder, arguments)
        else:
            _prune(run, folder, arguments)


def find_folder(path: Path) -> tuple[Path, CheckpointFolder]:
    """The run folder and the checkpoint folder that `path`, one of the two, stands for.

    Raises UserError for anything else.
    """
    if not path.is_dir():
        raise UserError(f"{path} is no folder: expected a run folder")
    run = RunFolder(path)
    if run.config_file.exists():
        try:
            config = run.read_config().get("config", {})
        except UserError as error:
            raise UserError(f"{error}; the folder of the checkpoints will do as well") from None
        name = config.get("checkpoint", {}).get("folder", CHECKPOINTS)
        return path, CheckpointFolder(path / name)
    if (path / CHECKPOINTS).is_dir():
        return path, CheckpointFolder(path / CHECKPOINTS)
    folder = CheckpointFolder(path)
    if folder.steps() or folder.unfinished() or folder.leftovers() or folder.quarantined():
        return path.absolute().parent, folder
    raise UserError(
        f"{path} holds no config.json, no {CHECKPOINTS}/ and no step-N: expected a run folder "
        "(job.dump_folder) or the folder of its checkpoints"
    )


# ---- list


def _list(run: Path, folder: CheckpointFolder, *, as_json: bool) -> None:
    held, run_id = held_steps(run), _run_id(run, folder)
    looks = [_look_at(folder, step, held, run_id) for step in folder.steps()]
    # a launch may delete steps while we look
    checkpoints = [facts for facts in looks if Path(facts["path"]).exists()]
    unfinished = folder.unfinished() + folder.leftovers()
    found: dict[str, Any] = {
        "folder": str(folder.path),
        "checkpoints": checkpoints,
        "unfinished": [_sized(path) for path in unfinished],
        "quarantined": [{**q._asdict(), "path": str(q.path)} for q in folder.quarantined()],
        "archives": [_sized(path) for path in folder.archives(run)],
        "strays": folder.strays(),
    }
    if as_json:
        _print_json(found)
        return
    console = _console()
    _say(console, f"{len(checkpoints)} checkpoint(s) in {folder.path}")
    if checkpoints:
        console.print(_checkpoint_table(checkpoints))
    headings = {
        "unfinished": "in progress, or interrupted (the next start settles them)",
        "quarantined": "in quarantine",
        "archives": "archives",
    }
    for name, heading in headings.items():
        if rows := found[name]:
            _say(console, f"{heading}:")
            console.print(_path_table(rows))
    if found["strays"]:
        _say(console, f"no part of it: {', '.join(found['strays'])}")


def _run_id(run: Path, folder: CheckpointFolder) -> str | None:
    """The run whose checkpoints these are: the run folder's or, without one, the only one named.

    None if that is not known.
    """
    if (facts := known_run(RunFolder(run))) is not None:
        return facts.run_id
    named = set(folder.of_other_runs(None).values())
    return named.pop() if len(named) == 1 else None


def _look_at(
    folder: CheckpointFolder, step: int, held: set[int], run_id: str | None
) -> dict[str, Any]:
    """The facts of one checkpoint by its manifest, and its state by sizes."""
    path = folder.step_path(step)
    facts: dict[str, Any] = {"step": step, "path": str(path), "held": step in held}
    try:
        facts |= as_record(Manifest.read(path)) | {"step": step}
        verify(path, hashes=False)
        other = facts["run_id"] not in (None, run_id)
        return facts | {"state": f"of another run, {facts['run_id']}" if other else "whole"}
    except DamagedCheckpoint as error:
        return {"bytes": tree_bytes(path)} | facts | {"state": f"damaged: {_faults(path, error)}"}


def _faults(path: Path, error: DamagedCheckpoint) -> str:
    """What the message says without the folder's name."""
    return str(error).removeprefix(f"{path} is damaged: ").removeprefix(f"{path} ")


def _checkpoint_table(checkpoints: list[dict[str, Any]]) -> Table:
    table = _table("step", "kind", "size", "files", "saved", "ranks", "held", "state")
    for facts in checkpoints:
        row = (facts.get(key, "?") for key in ("kind", "bytes", "num_files", "saved", "world_size"))
        kind, size, files, saved, ranks = row
        held = "held" if facts["held"] else ""
        cells = (facts["step"], kind, _size(size), files, saved, ranks, held, facts["state"])
        table.add_row(*(Text(str(cell)) for cell in cells))
    return table


def _path_table(rows: list[dict[str, Any]]) -> Table:
    with_reason = "reason" in rows[0]
    table = _table("path", "size", *(["reason"] if with_reason else []))
    for row in rows:
        cells = [row["path"], _size(row["bytes"])] + ([row["reason"]] if with_reason else [])
        table.add_row(*map(Text, cells))
    return table


def _sized(path: Path) -> dict[str, Any]:
    return {"path": str(path), "bytes": tree_bytes(path)}


# ---- verify


def _verify(run: Path, folder: CheckpointFolder, arguments: argparse.Namespace) -> None:
    """Read every byte; exit with code 1 where a checkpoint is damaged, or of another run."""
    from canon_pretrain.checkpoint.safe_load import check_safe  # torch, behind the parser

    step, workers, as_json = arguments.step, arguments.workers, arguments.json
    steps, run_id = folder.steps(), _run_id(run, folder)
    if step is not None and step not in steps:
        raise UserError(f"no step {step} in {folder.path}; there: {_names(steps)}")
    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers}: expected 1 or more")
    results = []
    console = _console()
    for number in steps if step is None else [step]:
        path = folder.step_path(number)
        start = time.perf_counter()
        result: dict[str, Any] = {"step": number, "path": str(path), "state": "whole"}
        try:
            manifest = verify(path, workers=workers or min(8, os.cpu_count() or 1))
            result["seconds"] = time.perf_counter() - start
            result |= {"kind": manifest.kind, "bytes": manifest.total_bytes}
            result |= {"run_id": manifest.run_id, "launch": manifest.launch}
            check_safe(path)
            if manifest.run_id not in (None, run_id):
                result["state"] = "of another run"
        except DamagedCheckpoint as error:
            result |= {"state": "damaged", "faults": _faults(path, error)}
        results.append(result)
        if not as_json:
            _say(console, _verdict(result))
    if as_json:
        _print_json(results)
    elif not results:
        _say(console, f"no checkpoint in {folder.path}")
    if any(result["state"] != "whole" for result in results):
        raise SystemExit(EXIT_DAMAGED)


def _verdict(result: dict[str, Any]) -> str:
    if result["state"] == "damaged":
        return f"step-{result['step']}  damaged: {result['faults']}"
    speed = result["bytes"] / max(result["seconds"], 1e-9) / 1e9
    return (
        f"step-{result['step']}  {result['state']}  {result['kind']}, {_size(result['bytes'])}, "
        f"{speed:.2f} GB/s"
    )


# ---- prune


def _retention(run: Path, folder: CheckpointFolder, keep: int) -> Retention:
    if keep < 1:
        raise UserError(f"--keep {keep}: expected 1 or more")

    def strip(checkpoint: Path, temporary: Path) -> None:
        from canon_pretrain.checkpoint.weights import strip_to_weights  # torch, where needed

        strip_to_weights(checkpoint, temporary)

    workers, run_id = min(8, os.cpu_count() or 1), _run_id(run, folder)
    if others := folder.of_other_runs(run_id):
        names = ", ".join(f"step-{step} of run {other}" for step, other in others.items())
        if run_id is None:
            raise UserError(f"{folder.path} holds {names}: expected those of one run")
        _say(_console(), f"skipped, not of run {run_id}: {names}")
    return Retention(
        folder,
        keep,
        holds=lambda: held_steps(run),
        strip=strip,
        run_id=lambda: run_id,
        workers=workers,
    )


def _doomed(run: Path, folder: CheckpointFolder, arguments: argparse.Namespace) -> list[Path]:
    """What --quarantine and --archive delete."""
    quarantined = [found.path for found in folder.quarantined()] if arguments.quarantine else []
    return quarantined + (folder.archives(run) if arguments.archive else [])


def _plan(run: Path, folder: CheckpointFolder, arguments: argparse.Namespace) -> None:
    """--dry_run: what would go and how many bytes."""
    plan = _retention(run, folder, arguments.keep).plan()
    console = _console()
    total = 0
    gone = _doomed(run, folder, arguments) + [folder.step_path(step) for step in plan.delete]
    for path in gone:
        size = tree_bytes(path)
        total += size
        _say(console, f"would delete {path} ({_size(size)})")
    for step in plan.strip:
        path = folder.step_path(step)
        _say(console, f"would leave the weights alone of {path} ({_size(tree_bytes(path))})")
    for step, fault in sorted(plan.bad.items()):
        _say(console, f"would move step-{step} to quarantine: {fault}")
    _say_kept(console, plan.kept, arguments.keep)
    besides = f", and the training state of {_names(plan.strip)}" if plan.strip else ""
    _say(console, f"dry run: {_size(total)} would be freed{besides}; nothing was changed")


def _prune(run: Path, folder: CheckpointFolder, arguments: argparse.Namespace) -> None:
    """Delete for real; exit with code 1 where something could not be done."""
    from canon_pretrain.core.link_lock import live_holder

    retention = _retention(run, folder, arguments.keep)
    holder = live_holder(RunFolder(run).lock_file) or live_holder(RunFolder(folder.path).lock_file)
    if holder is not None:
        raise UserError(
            f"a launch is using {folder.path} ({holder}): it prunes by itself "
            "(checkpoint.keep_latest_k); stop it first, or look with --dry_run"
        )
    console = _console()
    freed = 0
    errors = []
    # before retention: what that sets aside now stays there to be looked at
    for path in _doomed(run, folder, arguments):
        try:
            freed += folder.discard(path)
            _say(console, f"deleted {path}")
        except OSError as error:
            errors.append(f"{path} can't be deleted: {error}")
    outcome = retention.apply()
    freed += outcome.bytes_freed
    for step in outcome.deleted:
        waited = ", though an evaluation waits for it" if step in outcome.over_bound else ""
        _say(console, f"deleted step-{step}{waited}")
    for step in outcome.stripped:
        _say(console, f"left the weights alone of step-{step}: an evaluation waits for it")
    for step, fault in sorted(outcome.bad.items()):
        _say(console, f"moved step-{step} to quarantine: {fault}")
    _say_kept(console, outcome.kept, arguments.keep)
    _say(console, f"{_size(freed)} freed")
    if errors := errors + outcome.errors:
        _fail(errors)


def _say_kept(console: Console, kept: list[int], keep: int) -> None:
    if len(kept) < keep:
        _say(
            console,
            f"verified whole: {_names(kept)}, fewer than --keep {keep}: no checkpoint is deleted",
        )
    else:
        _say(console, f"verified whole and kept: {_names(kept)}")


def _fail(errors: list[str]) -> NoReturn:
    for error in errors:
        _say(Console(stderr=True), f"error: {error}")
    raise SystemExit(EXIT_DAMAGED)


# ---- printing


def _console() -> Console:
    """stdout: a terminal as wide as it is, anything else wide enough for every line."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPED_WIDTH)


def _say(console: Console, line: str) -> None:
    """One line, as it is: paths are not markup, and are not cut."""
    console.print(Text(line), soft_wrap=True)


def _table(*columns: str) -> Table:
    table = Table()
    for column in columns:
        right = column in ("step", "size", "files", "ranks")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    return table


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _names(steps: list[int]) -> str:
    return ", ".join(f"step-{step}" for step in steps) or "none"


def _size(num_bytes: int) -> str:
    """Decimal units, as disks are sold and `df -H` shows them."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.2f} {unit}"
    return f"{num_bytes} B"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m canon_pretrain.checkpoint", description="Checkpoints of a run."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("list", help="what there is, by manifests and sizes")
    check = commands.add_parser("verify", help="read every byte; moves nothing")
    prune = commands.add_parser("prune", help="keep the newest K that are proved whole")
    for each in (show, check, prune):
        each.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    for each in (show, check):
        each.add_argument("--json", action="store_true")
    check.add_argument("--step", type=int, metavar="N", help="this one only")
    check.add_argument("--workers", type=int, metavar="W", help="threads that read (CPUs, up to 8)")
    prune.add_argument("--keep", type=int, required=True, metavar="K", help="1 or more")
    prune.add_argument(
        "--quarantine", action="store_true", help="delete what is in quarantine, too"
    )
    prune.add_argument("--archive", action="store_true", help="delete archived branches, too")
    prune.add_argument("--dry_run", "--dry-run", action="store_true", help="say what would go")
    return parser


if __name__ == "__main__":
    main()
