"""Show a run's checkpoints, prove them whole, and make room.

    python -m canon_pretrain.checkpoint list RUN [--json]
    python -m canon_pretrain.checkpoint verify RUN
    python -m canon_pretrain.checkpoint prune RUN --keep K [--quarantine] [--archive] [--dry_run]

Exit code 1: a checkpoint is damaged or of another run, or not all could be pruned; 2: bad input.
"""

import argparse
import json
import os
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from canon_pretrain.checkpoint.folder import CheckpointFolder, tree_bytes
from canon_pretrain.checkpoint.manifest import DamagedCheckpoint, Manifest, verify
from canon_pretrain.checkpoint.retention import Retention, held_steps
from canon_pretrain.core.cli import command
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.lock import live_holder
from canon_pretrain.core.terminal import size
from canon_pretrain.run.folder import CHECKPOINTS, RunFolder
from canon_pretrain.run.launches import known_run

EXIT_DAMAGED = 1
_WORKERS = min(8, os.cpu_count() or 1)


def main(argv: list[str] | None = None) -> None:
    """`python -m canon_pretrain.checkpoint`; exits with code 1 for damage, 2 for bad input."""
    words = sys.argv[1:] if argv is None else argv
    with command(prints=words[:1] == ["list"]):
        arguments = _parser().parse_args(words)
        run, folder = find_folder(arguments.run)
        facts = known_run(RunFolder(run))
        # without a run folder: the only one that they name
        named = {facts.run_id} if facts else {*folder.steps_of_other_runs(None).values()}
        arguments.act(run, folder, named.pop() if len(named) == 1 else None, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m canon_pretrain.checkpoint", description="Checkpoints of a run."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("list", help="what there is, by manifests and sizes")
    check = commands.add_parser("verify", help="read every byte; moves nothing")
    prune = commands.add_parser("prune", help="keep the newest K that are verified")
    for each, act in ((show, _list), (check, _verify), (prune, _prune)):
        each.add_argument("run", type=Path, metavar="RUN", help="a run folder")
        each.set_defaults(act=act)
    show.add_argument("--json", action="store_true")
    prune.add_argument("--keep", type=int, required=True, metavar="K", help="1 or more")
    prune.add_argument("--quarantine", action="store_true", help="delete quarantined ones, too")
    prune.add_argument("--archive", action="store_true", help="delete archived branches, too")
    prune.add_argument("--dry_run", "--dry-run", action="store_true", help="say what would go")
    return parser


def find_folder(path: Path) -> tuple[Path, CheckpointFolder]:
    """Return the run folder and the checkpoint folder for `path`, one of the two."""
    run, folder = RunFolder(path), CheckpointFolder(path)
    if run.config_file.exists():
        return path, CheckpointFolder.of_run(run)
    if (path / CHECKPOINTS).is_dir():
        return path, CheckpointFolder(path / CHECKPOINTS)
    if folder.steps() or folder.unfinished() or folder.leftovers() or folder.quarantined():
        return path.absolute().parent, folder
    raise UserError(
        "todo.__main__",
        f"{path} holds no config.json, no {CHECKPOINTS}/ and no step-N: expected a run folder "
        "(job.dump_folder) or the folder of its checkpoints",
    )


def _list(run: Path, folder: CheckpointFolder, run_id: str | None, arguments: Namespace) -> None:
    def sized(paths: list[Path]) -> list[dict[str, Any]]:
        return [{"path": str(path), "bytes": tree_bytes(path)} for path in paths]

    held = held_steps(run)
    looks = [_read(folder.step_path(step), run_id, hashes=False) for step in folder.steps()]
    # a launch may delete steps meanwhile
    there = [facts for facts in looks if Path(facts["path"]).exists()]
    found: dict[str, Any] = {
        "folder": str(folder.path),
        "checkpoints": [facts | {"held": facts["step"] in held} for facts in there],
        "unfinished": sized(folder.unfinished() + folder.leftovers()),
        "quarantined": [{**q._asdict(), "path": str(q.path)} for q in folder.quarantined()],
        "archives": sized(folder.archives(run)),
    }
    if arguments.json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    print(f"{len(found['checkpoints'])} checkpoint(s) in {folder.path}")
    for facts in found["checkpoints"]:
        print(_line(facts))
    for name in ("unfinished", "quarantined", "archives"):
        for x in found[name]:
            print(f"{name}  {x['path']}  {size(x['bytes'])}  {x.get('reason', '')}".rstrip())


def _read(path: Path, run_id: str | None, *, hashes: bool) -> dict[str, Any]:
    """Return the facts of one checkpoint, and its state by sizes or, with `hashes`, every byte."""
    facts: dict[str, Any] = {"step": int(path.name.removeprefix("step-")), "path": str(path)}
    try:
        manifest = Manifest.read(path)
        facts = asdict(manifest) | facts | {"bytes": manifest.total_bytes, "state": "whole"}
        facts["num_files"] = len(facts.pop("files"))
        verify(path, hashes=hashes, workers=_WORKERS)
        if hashes:
            from canon_pretrain.checkpoint.safe_load import check_safe  # torch, behind the parser

            check_safe(path)
        if manifest.run_id not in (None, run_id):
            facts["state"] = f"of another run, {manifest.run_id}"
    except DamagedCheckpoint as error:
        text = str(error).removeprefix(f"{path} is damaged: ").removeprefix(f"{path} ")
        facts = {"bytes": tree_bytes(path)} | facts | {"state": f"damaged: {text}"}
    return facts


def _line(facts: dict[str, Any]) -> str:
    words = [size(facts["bytes"])]
    if "kind" in facts:  # its manifest can be read
        parts = f"{facts['num_files']} file(s)", f"{facts['world_size']} rank(s)"
        words = [facts["kind"], *words, *parts, f"saved {facts['saved']}"]
    words += ["held"] * facts.get("held", False)
    return f"step-{facts['step']}  {facts['state']}  {', '.join(words)}"


def _verify(run: Path, folder: CheckpointFolder, run_id: str | None, arguments: Namespace) -> None:
    """Read every byte; exit with code 1 if a checkpoint is damaged, or of another run."""
    steps, states = folder.steps(), set[str]()
    for step in steps:
        print(_line(facts := _read(folder.step_path(step), run_id, hashes=True)))
        states.add(facts["state"])
    if not steps:
        print(f"no checkpoint in {folder.path}")
    if states - {"whole"}:
        raise SystemExit(EXIT_DAMAGED)


def _prune(run: Path, folder: CheckpointFolder, run_id: str | None, arguments: Namespace) -> None:
    """Delete, or say what would go; exit with code 1 if something could not be done."""
    from canon_pretrain.checkpoint.weights import strip_to_weights  # torch, behind the parser

    if (keep := arguments.keep) < 1:
        raise UserError("todo.__main__", f"--keep {keep}: expected 1 or more")
    if others := folder.steps_of_other_runs(run_id):
        names = ", ".join(f"step-{step} of run {other}" for step, other in others.items())
        if run_id is None:
            raise UserError(
                "todo.__main__", f"{folder.path} holds {names}: expected those of one run"
            )
        print(f"skipped, not of run {run_id}: {names}")
    given: dict[str, Any] = {"holds": lambda: held_steps(run), "run_id": lambda: run_id}
    retention = Retention(folder, keep, strip=strip_to_weights, workers=_WORKERS, **given)
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
                "todo.__main__",
                f"a launch is using {folder.path} ({holder}): it prunes by itself "
                "(checkpoint.keep_latest_k); stop it first, or look with --dry_run",
            )
        # before retention: what that sets aside now stays there to be looked at
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
        print(f"step-{step} {would}replaced by its weights: an evaluation waits for it")
    for step, fault in sorted(outcome.bad.items()):
        print(f"step-{step} {would}moved to quarantine: {fault}")
    few = f", fewer than --keep {keep}: no checkpoint is deleted" * (len(outcome.kept) < keep)
    print(f"verified and kept: {_names(outcome.kept)}{few}")
    print(f"{size(freed)} {would}freed{'; nothing was changed' * arguments.dry_run}")
    for text in errors:
        print(f"error: {text}", file=sys.stderr)
    if errors:
        raise SystemExit(EXIT_DAMAGED)


def _names(steps: list[int]) -> str:
    return ", ".join(f"step-{step}" for step in steps) or "none"


if __name__ == "__main__":
    main()
