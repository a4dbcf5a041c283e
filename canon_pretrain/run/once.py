"""Options that act once: what a scheduler's restart of the same command must not do again.

`--checkpoint.fresh` and `--checkpoint.load_step` stand in a job's command line, and a requeued job
repeats that line. Obeyed again, they would throw away what the job has trained since. No torch.

    RUN/obeyed.json    option -> the job that obeyed it, and its count of restarts then
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from canon_pretrain.core.files import UnreadableFile, read_json, write_json
from canon_pretrain.core.holder import boot_of, read_count

FRESH = "checkpoint.fresh"


def was_obeyed(path: Path, option: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this launch is a restart of one that obeyed `option` (written with its value).

    Slurm's job and torchrun's run count; a person who types the command again is obeyed again.
    """
    before = _read(path).get(option)
    if before is None:
        return False
    now = _launch(environ)
    if now["job"] and now["job"] == before["job"] and now["restart"] > before["restart"]:
        return True
    same_run = now["run"] and (now["job"], now["run"]) == (before["job"], before["run"])
    return bool(same_run and now["attempt"] > before["attempt"])


def mark_obeyed(path: Path, option: str, environ: Mapping[str, str] = os.environ) -> None:
    """Record that this launch has obeyed `option`."""
    write_json(path, _read(path) | {option: _launch(environ)})


def _read(path: Path) -> dict[str, Any]:
    """The records there; none where the file is missing or damaged."""
    try:
        records = read_json(path)
    except UnreadableFile:
        return {}
    kinds = {name: type(value) for name, value in _launch({}).items()}
    return {
        option: launch
        for option, launch in records.items()
        if isinstance(launch, dict)
        and all(isinstance(launch.get(name), kind) for name, kind in kinds.items())
    }


def _launch(environ: Mapping[str, str]) -> dict[str, str | int]:
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    if run == "none":  # torchrun without --rdzv_id: its process names the command, then
        # two processes may start within one tick of the clock: by number and start
        run = f"agent {os.getppid()} {boot_of(os.getppid())}"
    return {
        "job": environ.get("SLURM_JOB_ID", ""),
        "restart": read_count(environ, "SLURM_RESTART_COUNT"),
        "run": run,
        "attempt": read_count(environ, "TORCHELASTIC_RESTART_COUNT"),
    }
