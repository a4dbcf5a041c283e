"""List, verify and prune a run's checkpoints.

    canon checkpoint list RUN [--json]
    canon checkpoint verify RUN|RUN/checkpoint/step-N
    canon checkpoint prune RUN --keep K [--quarantine] [--archive] [--dry-run]

Exit code 1: a checkpoint is damaged, of another run, or could not be pruned; 2: bad input.
"""

import argparse
import json
import os
import sys
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from canon_pretrain.checkpoint.folder import CheckpointFolder, step_number, tree_bytes
from canon_pretrain.checkpoint.manifest import DamagedCheckpoint, Manifest, verify
from canon_pretrain.checkpoint.retention import Retention, held_steps
from canon_pretrain.core.cli import positive
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.lock import live_holder
from canon_pretrain.core.terminal import size
from canon_pretrain.run.folder import CHECKPOINTS, RunFolder
from canon_pretrain.run.launches import known_run

EXIT_DAMAGED = 1
WHOLE, DAMAGED = "whole", "damaged: "
_WORKERS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint and its state: WHOLE, or what is wrong; `manifest` is None if unreadable."""

    path: Path
    num_bytes: int
    state: str
    manifest: Manifest | None

    def to_json(self) -> dict[str, Any]:
        """Return the checkpoint's object in `list --json`, without `held`."""
        facts: dict[str, Any] = {"step": step_number(self.path.name), "path": str(self.path)}
        if self.manifest is not None:
            facts = asdict(self.manifest) | facts
            files = facts.pop("files")
            facts |= {"bytes": self.num_bytes, "state": self.state, "num_files": len(files)}
        if self.state.startswith(DAMAGED):
            facts = {"bytes": self.num_bytes} | facts | {"state": self.state}
        return facts

    def line(self, end: str = "") -> str:
        """Return the checkpoint's line of text."""
        shown = size(self.num_bytes)
        if (saved := self.manifest) is not None:
            shown = (
                f"{saved.kind}, {shown}, {len(saved.files)} file(s), {saved.world_size} rank(s), "
                f"saved {saved.saved}"
            )
        return f"{self.path.name}  {self.state}  {shown}{end}"


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    about = "a run folder, or one of its checkpoints: RUN/checkpoint/step-N"
    parser.add_argument("run", type=Path, metavar="RUN", help=about)


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
    run, folder = find_folder(path)
    facts = known_run(RunFolder(run))
    if facts is not None:
        return run, folder, facts.run_id

    # without a run folder: the only run that the checkpoints name
    run_ids = {*folder.steps_of_other_runs(None).values()}
    return run, folder, run_ids.pop() if len(run_ids) == 1 else None


def find_folder(path: Path) -> tuple[Path, CheckpointFolder]:
    """Return the run folder and the checkpoint folder; `path` is one of them."""
    run, folder = RunFolder(path), CheckpointFolder(path)
    if run.has_config():
        return path, CheckpointFolder.of_run(run)
    if (path / CHECKPOINTS).is_dir():
        return path, CheckpointFolder(path / CHECKPOINTS)
    if folder.steps() or folder.unfinished() or folder.leftovers() or folder.quarantined():
        return path.absolute().parent, folder
    raise UserError(
        "checkpoint.none",
        f"{path} has no config.json, {CHECKPOINTS}/ or step-N: expected a run folder",
        path=path,
    )


def run_list(arguments: Namespace) -> None:
    """Print the checkpoints, and what else the folder holds."""
    run, folder, run_id = _find(arguments.run)

    def sized(paths: list[Path]) -> list[dict[str, Any]]:
        return [{"path": str(path), "bytes": tree_bytes(path)} for path in paths]

    held = {folder.step_path(step) for step in held_steps(run)}
    read = [_read(folder.step_path(step), run_id, hashes=False) for step in folder.steps()]
    # a launch may delete steps meanwhile
    present = [checkpoint for checkpoint in read if checkpoint.path.exists()]
    found: dict[str, Any] = {
        "folder": str(folder.path),
        "checkpoints": [one.to_json() | {"held": one.path in held} for one in present],
        "unfinished": sized(folder.unfinished() + folder.leftovers()),
        "quarantined": [{**q._asdict(), "path": str(q.path)} for q in folder.quarantined()],
        "archives": sized(folder.archives(run)),
    }
    if arguments.json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    print(f"{len(present)} checkpoint(s) in {folder.path}")
    for checkpoint in present:
        print(checkpoint.line(", held" * (checkpoint.path in held)))
    for name in ("unfinished", "quarantined", "archives"):
        for x in found[name]:
            print(f"{name}  {x['path']}  {size(x['bytes'])}  {x.get('reason', '')}".rstrip())


def _read(path: Path, run_id: str | None, *, hashes: bool) -> Checkpoint:
    """Return a checkpoint, with its state by sizes or, with `hashes`, by hashes."""
    manifest, state = None, WHOLE
    try:
        manifest = Manifest.read(path)
        verify(path, hashes=hashes, workers=_WORKERS)
        if hashes:
            from canon_pretrain.checkpoint.safe_load import check_safe  # imports torch

            check_safe(path)
        if manifest.run_id not in (None, run_id):
            state = f"of another run, {manifest.run_id}"
    except DamagedCheckpoint as error:
        text = str(error).removeprefix(f"{path} is damaged: ").removeprefix(f"{path} ")
        state = f"{DAMAGED}{text}"
    num_bytes = tree_bytes(path) if manifest is None else manifest.total_bytes
    return Checkpoint(path, num_bytes, state, manifest)


def run_verify(arguments: Namespace) -> int:
    """Verify every file; return exit code 1 if a checkpoint is damaged or of another run."""
    path = arguments.run
    step = None if RunFolder(path).has_config() else step_number(path.name)
    _, folder, run_id = _find(path if step is None else path.parent)
    steps = folder.steps() if step is None else [step]
    if not steps:
        print(f"no checkpoint in {folder.path}")

    is_damaged = False
    for number in steps:
        checkpoint = _read(folder.step_path(number), run_id, hashes=True)
        print(checkpoint.line())
        is_damaged |= checkpoint.state != WHOLE
    return EXIT_DAMAGED if is_damaged else 0


def run_prune(arguments: Namespace) -> int:
    """Delete, or print what would be deleted; return exit code 1 on errors."""
    from canon_pretrain.checkpoint.weights import strip_to_weights  # imports torch

    run, folder, run_id = _find(arguments.run)
    keep = arguments.keep
    if others := folder.steps_of_other_runs(run_id):
        names = ", ".join(f"step-{step} of run {other}" for step, other in others.items())
        if run_id is None:
            raise UserError(
                "checkpoint.other_run",
                f"{folder.path} has {names}: expected checkpoints of one run",
                steps=[*others],
            )
        print(f"skipped, not of run {run_id}: {names}")
    retention = Retention(
        folder,
        keep,
        strip=strip_to_weights,
        workers=_WORKERS,
        holds=lambda: held_steps(run),
        run_id=lambda: run_id,
    )
    doomed = [found.path for found in folder.quarantined()] if arguments.quarantine else []
    doomed += folder.archives(run) if arguments.archive else []
    freed, gone, errors = 0, list[Path](), list[str]()
    if arguments.dry_run:
        outcome = retention.plan()
        gone = doomed + [folder.step_path(step) for step in outcome.deleted]
        freed = sum(map(tree_bytes, gone))
    else:
        locks = (RunFolder(path).lock_file for path in (run, folder.path))
        if holder := next(filter(None, map(live_holder, locks)), None):
            raise UserError(
                "lock.held",
                f"a launch uses and prunes {folder.path} ({holder}): stop it, or use --dry-run",
                path=folder.path,
                holder=holder,
            )
        # before retention: what it quarantines now is kept
        for path in doomed:
            try:
                freed += folder.discard(path)
                gone.append(path)
            except OSError as error:
                errors.append(f"{path} can't be deleted: {error}")
        outcome = retention.apply()
        freed += outcome.bytes_freed
        errors += outcome.errors
        gone += [folder.step_path(step) for step in outcome.deleted]
    would = "would be " * arguments.dry_run
    for path in gone:
        print(f"{path} {would}deleted")
    for step in outcome.stripped:
        print(f"step-{step} {would}replaced by its weights, which an evaluation needs")
    for step, fault in sorted(outcome.bad.items()):
        print(f"step-{step} {would}moved to quarantine: {fault}")
    few = f", fewer than --keep {keep}: no checkpoint is deleted" * (len(outcome.kept) < keep)
    kept = ", ".join(f"step-{step}" for step in outcome.kept) or "none"
    print(f"verified and kept: {kept}{few}")
    print(f"{size(freed)} {would}freed{'; nothing changed' * arguments.dry_run}")
    for text in errors:
        print(f"error: {text}", file=sys.stderr)
    return EXIT_DAMAGED if errors else 0
