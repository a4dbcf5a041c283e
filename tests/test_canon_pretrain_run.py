"""The run folder and its log: torn lines, resumes, non-finite numbers, one run a folder."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from canon_pretrain.errors import UserError
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.log import RunLog, read_log


def steps(path: Path) -> list[int]:
    return [event["step"] for event in read_log(path) if event["event"] == "step"]


def test_a_resume_drops_the_steps_that_it_went_back_over(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run" / "log.jsonl")
    for step in (1, 2, 3, 4):
        log.write("step", step=step, loss=0.1 * step)
    log.write("resume", from_step=2)
    log.write("step", step=3, loss=9.0)
    log.close()
    events = read_log(tmp_path / "run" / "log.jsonl")
    assert [(e["step"], e["loss"]) for e in events if e["event"] == "step"] == [
        (1, 0.1),
        (2, 0.2),
        (3, 9.0),
    ]


def test_a_second_start_drops_all_steps_of_the_first(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log.jsonl")
    for event in ("start", "step", "step", "start", "step"):
        log.write(event, step=len(read_log(tmp_path / "log.jsonl")))
    log.close()
    assert [e["event"] for e in read_log(tmp_path / "log.jsonl")] == ["start", "start", "step"]


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_last_line_costs_itself_only(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "log.jsonl"
    log = RunLog(path)
    log.write("step", step=1)
    log.write("step", step=2)
    log.close()
    os.truncate(path, path.stat().st_size - cut)
    # one byte less is a whole line without its end: nothing is lost then
    survivors = [1, 2] if cut == 1 else [1]
    assert steps(path) == survivors
    log = RunLog(path)
    log.write("step", step=3)
    log.close()
    assert steps(path) == [*survivors, 3]


def test_non_finite_numbers_survive_as_strings(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log.jsonl")
    log.write("step", step=1, loss=float("nan"), grad_norm=float("inf"), low=float("-inf"))
    log.close()
    (event,) = read_log(tmp_path / "log.jsonl")
    assert (event["loss"], event["grad_norm"], event["low"]) == ("NaN", "Infinity", "-Infinity")
    assert float(event["grad_norm"]) == float("inf")


def _write_many(path: Path, writer: int) -> None:
    log = RunLog(path)
    for step in range(300):
        log.write("step", step=step, writer=writer, filler="x" * 200)
    log.close()


def test_lines_of_two_writers_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(path, n)) for n in range(2)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted((e["writer"], e["step"]) for e in lines) == [
        (writer, step) for writer in range(2) for step in range(300)
    ]


def test_what_is_no_run_folder_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not a run folder: it has no config\.json"):
        RunFolder(tmp_path).read_config()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        RunFolder(tmp_path).read_config()
