"""List, verify and prune a run's checkpoints.

Exit code 1: a checkpoint is damaged, of another run, or could not be pruned; 2: bad input.
"""

import argparse
import json
import os
import sys
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from canon_pretrain.checkpoint.folder import CheckpointFolder, step_number, tree_bytes
from canon_pretrain.checkpoint.manifest import DamagedCheckpoint, Manifest, verify
from canon_pretrain.checkpoint.retention import Outcome, Retention, held_steps
from canon_pretrain.core.cli import positive
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.lock import live_holder
from canon_pretrain.core.terminal import size
from canon_pretrain.run.folder import CHECKPOINTS, RunFolder
from canon_pretrain.run.launches import known_run

EXIT_DAMAGED = 1
WHOLE = "whole"
DAMAGED = "damaged: "
_WORKERS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint and its state: WHOLE, or what is wrong; `manifest` is None if unreadable."""

    path: Path
    num_bytes: int
    state: str
    manifest: Manifest | None

    def to_row(self) -> dict[str, Any]:
        """Return the checkpoint's object in `list --json`, without `held`."""
        row: dict[str, Any] = {}
        if self.manifest is not None:
            row = asdict(self.manifest)
            row["num_files"] = len(row.pop("files"))
        return row | {
            "step": step_number(self.path.name),
            "path": self.path,
            "bytes": self.num_bytes,
            "state": self.state,
        }

    def line(self, end: str = "") -> str:
        manifest = self.manifest
        content = size(self.num_bytes)
        if manifest is not None:
            content = (
                f"{manifest.kind}, {content}, {len(manifest.files)} file(s), "
                f"{manifest.world_size} rank(s), saved {manifest.saved}"
            )
        return f"{self.path.name}  {self.state}  {content}{end}"


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="a run folder, or one of its checkpoints: RUN/checkpoint/step-N",
    )


def add_prune_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--keep", type=positive, required=True, metavar="K", help="1 or more")
    parser.add_argument("--quarantine", action="store_true", help="also delete quarantined ones")
    parser.add_argument("--archive", action="store_true", help="also delete archived branches")
    parser.add_argument("--dry-run", action="store_true", help="change nothing")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")


def _find(path: Path) -> tuple[Path, CheckpointFolder, str | None]:
    """Return the run folder, its checkpoint folder and the id of the run, None if unknown."""
    run, folder = _find_folder(path)
    record = known_run(RunFolder(run))
    if record is not None:
        return run, folder, record.run_id

    # without a run folder: the only run that the checkpoints name
    run_ids = {*folder.steps_of_other_runs(None).values()}
    run_id = run_ids.pop() if len(run_ids) == 1 else None
    return run, folder, run_id


def _find_folder(path: Path) -> tuple[Path, CheckpointFolder]:
    """Return the run folder and the checkpoint folder; `path` is one of them."""
    run = RunFolder(path)
    if run.has_config():
        return path, CheckpointFolder.of_run(run)
    if (path / CHECKPOINTS).is_dir():
        return path, CheckpointFolder(path / CHECKPOINTS)

    # not a run folder, but maybe that of its checkpoints
    folder = CheckpointFolder(path)
    if folder.steps() or folder.unfinished() or folder.leftovers() or folder.quarantined():
        return path.absolute().parent, folder

    raise UserError(
        "checkpoint.none",
        f"{path} has no config.json, {CHECKPOINTS}/ or step-N: expected a run folder",
        path=path,
    )


def run_list(arguments: Namespace) -> None:
    run, folder, run_id = _find(arguments.run)
    # Steps that a scheduled evaluation needs: retention keeps their weights.
    held = {folder.step_path(step) for step in held_steps(run)}

    # A launch may delete steps during this call: only those that still exist are listed.
    paths = map(folder.step_path, folder.steps())
    checkpoints = [_read(path, run_id, hashes=False) for path in paths]
    checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.path.exists()]

    # Entries of the folder that are not complete checkpoints, by kind.
    other_rows = {
        "unfinished": _size_rows(folder.unfinished() + folder.leftovers()),
        "quarantined": [entry._asdict() for entry in folder.quarantined()],
        "archives": _size_rows(folder.archives(run)),
    }

    if arguments.json:
        rows = []
        for checkpoint in checkpoints:
            is_held = checkpoint.path in held
            rows.append(checkpoint.to_row() | {"held": is_held})
        content = {
            "folder": folder.path,
            "checkpoints": rows,
            **other_rows,
        }
        print(json.dumps(content, indent=2, ensure_ascii=False, default=str))
        return

    print(f"{len(checkpoints)} checkpoint(s) in {folder.path}")
    for checkpoint in checkpoints:
        end = ", held" if checkpoint.path in held else ""
        print(checkpoint.line(end))
    for kind, entries in other_rows.items():
        for entry in entries:
            reason = entry.get("reason", "")
            line = f"{kind}  {entry['path']}  {size(entry['bytes'])}  {reason}"
            print(line.rstrip())


def _size_rows(paths: list[Path]) -> list[dict[str, Any]]:
    return [{"path": path, "bytes": tree_bytes(path)} for path in paths]


def _read(path: Path, run_id: str | None, *, hashes: bool) -> Checkpoint:
    """Return a checkpoint, with its state by sizes or, with `hashes`, by hashes."""
    manifest = None
    state = WHOLE
    try:
        # read before it is verified: also a damaged checkpoint is listed with its manifest
        manifest = Manifest.read(path)
        verify(path, hashes=hashes, workers=_WORKERS)
        if hashes:
            from canon_pretrain.checkpoint.safe_load import check_safe  # imports torch

            check_safe(path)
        if manifest.run_id not in (None, run_id):
            state = f"of another run, {manifest.run_id}"
    except DamagedCheckpoint as error:
        # the path is on the same line already
        fault = str(error).removeprefix(f"{path} is damaged: ")
        fault = fault.removeprefix(f"{path} ")
        state = f"{DAMAGED}{fault}"

    num_bytes = tree_bytes(path) if manifest is None else manifest.total_bytes
    return Checkpoint(path, num_bytes, state, manifest)


def run_verify(arguments: Namespace) -> int:
    """Verify every file; return exit code 1 if a checkpoint is damaged or of another run."""
    path = arguments.run
    step = step_number(path.name)
    # a run folder may be named step-N too
    if step is None or RunFolder(path).has_config():
        _, folder, run_id = _find(path)
        steps = folder.steps()
        if not steps:
            print(f"no checkpoint in {folder.path}")
    else:
        _, folder, run_id = _find(path.parent)
        steps = [step]

    has_fault = False
    for step in steps:
        checkpoint = _read(folder.step_path(step), run_id, hashes=True)
        print(checkpoint.line())
        has_fault |= checkpoint.state != WHOLE
    return EXIT_DAMAGED if has_fault else 0


def run_prune(arguments: Namespace) -> int:
    """Delete, or print what would be deleted; return exit code 1 on errors."""
    from canon_pretrain.checkpoint.weights import strip_to_weights  # imports torch

    run, folder, run_id = _find(arguments.run)

    # Checkpoints of other runs stay. If the id of the run is unknown, it is not clear which.
    other_runs = folder.steps_of_other_runs(run_id)
    if other_runs:
        names = ", ".join(f"step-{step} of run {other}" for step, other in other_runs.items())
        if run_id is None:
            raise UserError(
                "checkpoint.other_run",
                f"{folder.path} has {names}: expected checkpoints of one run",
                steps=[*other_runs],
            )
        print(f"skipped, not of run {run_id}: {names}")

    # What to delete: the steps that retention does not keep, and what the options add.
    retention = Retention(
        folder,
        arguments.keep,
        strip=strip_to_weights,
        workers=_WORKERS,
        holds=lambda: held_steps(run),
        run_id=lambda: run_id,
    )
    extra: list[Path] = []
    if arguments.quarantine:
        extra += [entry.path for entry in folder.quarantined()]
    if arguments.archive:
        extra += folder.archives(run)

    if arguments.dry_run:
        outcome = retention.plan()
        deleted = [*extra, *map(folder.step_path, outcome.deleted)]
        pruned = Pruned(outcome, deleted, sum(map(tree_bytes, deleted)), errors=[])
    else:
        _check_no_launch(run, folder)
        pruned = _prune(retention, extra)

    _print_pruned(pruned, arguments)
    return EXIT_DAMAGED if pruned.errors else 0


class Pruned(NamedTuple):
    """The outcome of retention, and all paths that were or would be deleted."""

    outcome: Outcome
    deleted: list[Path]
    bytes_freed: int
    errors: list[str]


def _check_no_launch(run: Path, folder: CheckpointFolder) -> None:
    """Raise UserError if a launch holds the lock of the run, or of a folder outside of it."""
    for path in (run, folder.path):
        if holder := live_holder(RunFolder(path).lock_file):
            raise UserError(
                "lock.held",
                f"a launch uses and prunes {folder.path} ({holder}): stop it, or use --dry-run",
                path=folder.path,
                holder=holder,
            )


def _prune(retention: Retention, extra: list[Path]) -> Pruned:
    """Delete the `extra` paths, then what retention does not keep."""
    folder = retention.folder
    deleted: list[Path] = []
    errors: list[str] = []
    bytes_freed = 0

    # before retention: what it quarantines now is kept
    for path in extra:
        try:
            bytes_freed += folder.discard(path)
            deleted.append(path)
        except OSError as error:
            errors.append(f"{path} can't be deleted: {error}")

    outcome = retention.apply()
    return Pruned(
        outcome,
        [*deleted, *map(folder.step_path, outcome.deleted)],
        bytes_freed + outcome.bytes_freed,
        errors + outcome.errors,
    )


def _print_pruned(pruned: Pruned, arguments: Namespace) -> None:
    """Print what was deleted, or would be with --dry-run; errors on standard error."""
    outcome = pruned.outcome
    would = ""
    unchanged = ""
    if arguments.dry_run:
        would = "would be "
        unchanged = "; nothing changed"

    for path in pruned.deleted:
        print(f"{path} {would}deleted")
    for step in outcome.stripped:
        print(f"step-{step} {would}replaced by its weights, which an evaluation needs")
    for step, fault in sorted(outcome.bad.items()):
        print(f"step-{step} {would}moved to quarantine: {fault}")

    kept_names = [f"step-{step}" for step in outcome.kept]
    kept = ", ".join(kept_names) or "none"
    too_few = ""
    if len(outcome.kept) < arguments.keep:
        too_few = f", fewer than --keep {arguments.keep}: no checkpoint is deleted"
    print(f"verified and kept: {kept}{too_few}")
    print(f"{size(pruned.bytes_freed)} {would}freed{unchanged}")
    for error in pruned.errors:
        print(f"error: {error}", file=sys.stderr)
