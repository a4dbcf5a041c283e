"""Options that act once: a scheduler's restart is told from a person who types them again."""

import os
from pathlib import Path

import pytest

from canon_pretrain.run.launches import mark_obeyed, was_obeyed

OPTION = "checkpoint.load_step=4"


def slurm(job: str, restart: str | None = None) -> dict[str, str]:
    return {"SLURM_JOB_ID": job} | ({} if restart is None else {"SLURM_RESTART_COUNT": restart})


def torchrun(run: str, attempt: int) -> dict[str, str]:
    return {"TORCHELASTIC_RUN_ID": run, "TORCHELASTIC_RESTART_COUNT": str(attempt)}


@pytest.mark.parametrize(
    ("first", "now", "obeyed"),
    [
        ({}, {}, False),  # a person, twice
        (slurm("7"), {}, False),
        ({}, slurm("7", "1"), False),
        (slurm("7"), slurm("7", "1"), True),  # requeued
        (slurm("7", "1"), slurm("7", "2"), True),
        (slurm("7", "1"), slurm("7", "1"), False),  # a second srun in one job
        (slurm("7", "2"), slurm("7", "1"), False),
        (slurm("7"), slurm("8"), False),  # submitted anew
        (slurm("7"), slurm("8", "1"), False),
        (torchrun("a", 0), torchrun("a", 1), True),  # torchrun restarted its workers
        (torchrun("a", 0), torchrun("a", 0), False),
        (torchrun("a", 0), torchrun("b", 1), False),
        (torchrun("none", 0), torchrun("none", 1), True),  # no name: its agent, our parent, is one
        (slurm("7") | torchrun("a", 0), slurm("7") | torchrun("a", 1), True),
        (slurm("7") | torchrun("a", 0), slurm("8") | torchrun("a", 1), False),
        (slurm("7") | torchrun("7-0", 2), slurm("7", "1") | torchrun("7-1", 0), True),
    ],
)
def test_who_is_a_restart(
    first: dict[str, str], now: dict[str, str], obeyed: bool, tmp_path: Path
) -> None:
    path = tmp_path / "obeyed.json"
    assert not was_obeyed(path, OPTION, now)
    mark_obeyed(path, OPTION, first)
    assert was_obeyed(path, OPTION, now) is obeyed
    # one option says nothing of another
    assert not was_obeyed(path, "checkpoint.load_step=5", now)
    mark_obeyed(path, "checkpoint.fresh", first)
    assert was_obeyed(path, OPTION, now) is obeyed
    assert was_obeyed(path, "checkpoint.fresh", now) is obeyed


@pytest.mark.parametrize("content", [b"", b"{", b"\xff"])
def test_a_damaged_record_is_none_and_is_replaced(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "obeyed.json"
    path.write_bytes(content)
    assert not was_obeyed(path, OPTION, slurm("7", "1"))
    mark_obeyed(path, OPTION, slurm("7"))
    assert was_obeyed(path, OPTION, slurm("7", "1"))


def test_an_empty_count_is_none(tmp_path: Path) -> None:
    mark_obeyed(tmp_path / "obeyed.json", OPTION, slurm("7", ""))
    assert was_obeyed(tmp_path / "obeyed.json", OPTION, slurm("7", "1"))


def test_another_torchrun_without_a_name_is_another_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark_obeyed(tmp_path / "obeyed.json", OPTION, torchrun("none", 0))
    other = os.getppid() + 1
    monkeypatch.setattr("os.getppid", lambda: other)
    assert not was_obeyed(tmp_path / "obeyed.json", OPTION, torchrun("none", 1))
