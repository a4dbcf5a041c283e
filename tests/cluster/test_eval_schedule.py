"""`python -m eval submit` against stand-ins for Slurm's commands: who does what, and how often."""

import argparse
import dataclasses
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.checkpoint.manifest import FileEntry, Manifest
from canon_pretrain.checkpoint.retention import Retention, held_steps
from canon_pretrain.cluster.leases import LOCAL, Lease, Leases, NoAnswer, NoQueue, Slurm, new_lease
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import sha256_file
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.results import Results, Score, write_results
from eval.__main__ import main
from eval.run_command import add_how
from eval.schedule import Request, Schedule, answers, begin, leases_of, settle, to_words
from eval.schedule import main as schedule_main
from eval.suite_names import SUITES as ALL
from eval.suite_names import TASKS, asked_how, split_suites
from eval.watcher import Watcher
from tests.fake_slurm import FakeSlurm
from tests.support import ROOT, write_data


def save(run: Path, step: int, kind: Any = "full") -> None:
    """A checkpoint as far as anybody looks who loads none."""
    fill(run / "checkpoint" / f"step-{step}", step, kind)


def fill(folder: Path, step: int, kind: Any) -> None:
    folder.mkdir(parents=True)
    (folder / "data").write_text(f"{kind} {step}")
    entry = FileEntry((folder / "data").stat().st_size, sha256_file(folder / "data"))
    Manifest(step, kind, 1, "2", {"data": entry}, "2026-01-01T00:00:00+00:00").write(folder)


def write_run(run: Path, *steps: int, last: int = 40, keep: int = 0) -> Path:
    config = {
        "training": {"steps": last, "seq_len": 64},
        "checkpoint": {"interval": 5, "keep_latest_k": keep, "max_held": 4, "folder": "checkpoint"},
    }
    RunFolder(run).write_config(config, {})
    for step in steps:
        save(run, step)
    return run


def answer(run: Path, step: int, suite: str, **asked: Any) -> None:
    question = {
        "checkpoint": "", "step": step, "suite": suite, "limit": None, "train_fingerprint": "",
        "add_bos": False, "max_length": 64, "dtype": "float32", **asked,
    }  # fmt: skip
    name = "".join(map(str, asked.values())) or "whole"
    results = Results(question, {suite: {"acc": Score(0.5)}}, {suite: 2})
    write_results(run / "evals" / f"step-{step}" / suite / name, results, {})


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "fake")
    monkeypatch.setenv("PATH", fake.environ["PATH"])
    return fake


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 10 and 20 of 40 are there, and 15, which nobody asks for."""
    return write_run(tmp_path / "run", 10, 15, 20)


SUITES = ["jrt", "validation"]


def submit(*words: object) -> int:
    try:
        main(["submit", *map(str, words)])
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def watcher(*runs: Path, expiry_s: float = 600, cap: int = 8, **request: Any) -> Watcher:
    asked = Request(**{"suites": SUITES, "every": 10} | request)
    schedules = [Schedule(run, asked, expiry_s=expiry_s) for run in runs]
    quiet = Console(file=io.StringIO())
    return Watcher(
        schedules, Slurm(), runs[0] / "report", max_in_flight=cap, local=False, console=quiet
    )


def current(run: Path, step: int, suite: str = "jrt") -> Lease:
    lease = leases_of(run, step, suite).current()
    assert lease is not None
    return lease


def finish(run: Path, *steps: int, suites: tuple[str, ...] = ("jrt",)) -> None:
    for step in steps:
        for suite in suites:
            answer(run, step, suite)
    RunFolder(run).write_done(40)


def states(watcher: Watcher) -> dict[tuple[int, str], str]:
    watcher.queue.look()
    found = [entry for _, entries in watcher.look() for entry in entries]
    return {(e.step, e.suite): e.state for e in found if e.state != "to come"}


def test_from_the_first_checkpoint_to_the_report(slurm: FakeSlurm, run: Path) -> None:
    """Oldest first, three at a time; what has results is skipped; one report after the last."""
    answer(run, 10, "validation")
    watch = watcher(run, cap=2, how=["--max_length", "64"], sbatch=["--partition=short"])
    watch.one_pass()
    assert slurm.names == ["eval-run-step-10-jrt", "eval-run-step-20-jrt"]
    assert watch.one_pass() and len(slurm.jobs()) == 2, "a second look adds nothing"
    words = slurm.words("1")
    log = f"--output={run}/evals/step-10/jrt/slurm-%j.log"
    assert log in words and "--partition=short" in words and "--parsable" in words
    lease = current(run, 10)
    assert (lease.job, lease.cluster) == ("1", "fake")
    assert words[words.index("--lease") :] == [
        "--lease", lease.id, f"{run}/checkpoint/step-10", "jrt", "--max_length", "64",
    ]  # fmt: skip
    found = states(watch)
    assert found.pop((10, "validation")) == "done" and found.pop((20, "validation")) == "waiting"
    assert set(found.values()) == {"queued"}

    slurm.set("1", "RUNNING")
    assert states(watch)[10, "jrt"] == "running"
    answer(run, 10, "jrt")
    slurm.set("1", "COMPLETED")
    watch.one_pass()
    assert slurm.names[2:] == ["eval-run-step-20-validation"]

    for step in (30, 40):
        save(run, step)
    finish(run)
    for step in (20, 30, 40):
        for suite in SUITES:
            assert not watch.is_finished(watch.one_pass())
            assert "eval-report-run" not in slurm.names
            answer(run, step, suite)
            slurm.end(f"step-{step}-{suite}-", "COMPLETED")
    watch.one_pass()
    watch.one_pass()
    assert slurm.names.count("eval-report-run") == 1 and slurm.names[-1] == "eval-report-run"
    assert not watch.is_finished(watch.look()), "the report does not stand yet"
    number = [*slurm.jobs()][-1]
    words = slurm.words(number)
    mark = Path(words[words.index("--mark") + 1])
    assert words[words.index("--mark") + 2 :] == [str(run), "--out", f"{run}/report"]
    mark.write_text("now")
    slurm.set(number, "FORGOTTEN")
    assert watch.is_finished(watch.one_pass())
    assert slurm.names.count("eval-report-run") == 1


def test_watchers_that_race_give_out_each_piece_once(slurm: FakeSlurm, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run-{k}", 20, 40) for k in range(2)]
    command = [sys.executable, "-m", "eval", "submit", *map(str, runs), "--suites"]
    command += ["jrt,babilong,validation", "--every", "20", "--once", "--max_in_flight"]
    environ = slurm.environ | {"PYTHONPATH": str(ROOT)}

    def race(cap: int) -> None:
        started = [
            subprocess.Popen([*command, str(cap)], env=environ, stdout=subprocess.PIPE, text=True)
            for _ in range(6)
        ]
        assert [(p.wait(120), p.stdout and p.stdout.close())[0] for p in started] == [0] * 6

    race(3)
    assert 1 <= len(slurm.jobs()) <= 3, "the cap holds for all of them together"
    for _ in range(2):
        race(1000)
    assert len(slurm.names) == len(set(slurm.names)) == 12
    jobs = slurm.jobs()
    for lease in (Leases(path).current() for run in runs for path in run.glob("evals/*/*/leases")):
        assert lease is not None and lease.job is not None
        assert jobs[lease.job] == ("PENDING", lease.name)


@pytest.mark.parametrize(
    ("state", "is_gone"),
    [
        ("FAILED", True),
        ("COMPLETED", True),  # without results: a failure too
        ("FORGOTTEN", True),  # nobody knows the job any more
        ("PENDING", False),
        ("COMPLETING", False),
    ],
)
def test_a_job_that_is_gone_is_submitted_again_some_times(
    slurm: FakeSlurm, run: Path, state: str, is_gone: bool
) -> None:
    watch = watcher(run, suites=["jrt"], every=20, retries=1, expiry_s=600 if is_gone else 0)
    watch.one_pass()
    slurm.set("1", state)
    watch.one_pass()
    assert len(slurm.jobs()) == 1 + is_gone
    if is_gone:
        slurm.set("2", state)
        watch.one_pass()
        assert len(slurm.jobs()) == 2 and states(watch) == {(20, "jrt"): "failed"}
        assert 20 not in held_steps(run), "nothing waits for it any more"


def test_in_doubt_nothing_is_submitted(slurm: FakeSlurm, run: Path) -> None:
    watch = watcher(run, suites=["jrt"], every=20)
    slurm.break_down("squeue")
    with pytest.raises(UserError, match="squeue failed, nothing was submitted"):
        watch.one_pass()
    slurm.break_down("squeue", "")
    watch.one_pass()
    (slurm.folder / "1.job").rename(slurm.folder / "hidden")  # another user's job, say
    slurm.break_down("scontrol")
    watch.one_pass()
    assert slurm.jobs() == {}, "the controller did not say that it is gone"
    slurm.break_down("scontrol", "")
    leases_of(run, 20, "jrt").record(current(run, 20), cluster="elsewhere")
    watch.one_pass()
    assert slurm.jobs() == {}, "this cluster can't know a job of another one"


def test_a_watcher_that_died_before_sbatch_is_replaced(slurm: FakeSlurm, run: Path) -> None:
    leases = leases_of(run, 20, "jrt")
    assert leases.claim(new_lease(1, name="eval-x-1234"))
    patient = watcher(run, suites=["jrt"], every=20)
    patient.one_pass()
    assert slurm.jobs() == {} and states(patient) == {(20, "jrt"): "claimed"}
    watch = watcher(run, suites=["jrt"], every=20, expiry_s=0)
    time.sleep(0.02)
    watch.one_pass()
    assert len(slurm.jobs()) == 1
    assert [lease.job for lease in leases.all()] == [None, "1"]


def test_a_watcher_that_slept_through_a_takeover_cancels_its_job(
    slurm: FakeSlurm, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, leases = watcher(run, suites=["jrt"], every=20), leases_of(run, 20, "jrt")
    submit = Slurm.submit

    def slow(self: Slurm, *words: Any) -> str:
        assert leases.claim(new_lease(2, job="77"))
        return submit(self, *words)

    monkeypatch.setattr(Slurm, "submit", slow)
    watch.one_pass()
    assert slurm.jobs()["1"][0] == "CANCELLED" and current(run, 20).job == "77"
    late = leases.all()[0].id
    assert begin(leases, "1", late, 3)[0] == 3, "and if it runs after all, it does nothing"


@pytest.mark.parametrize("why", ["1 are in flight", "it is done"])
def test_what_happens_between_a_look_and_a_claim(
    slurm: FakeSlurm, run: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    watch, claim = watcher(run, suites=["jrt"], cap=1), Leases.claim

    def late(*words: Any) -> Any:
        monkeypatch.undo()
        monkeypatch.setenv("PATH", slurm.environ["PATH"])
        if why == "it is done":
            answer(run, 10, "jrt")
        else:
            assert leases_of(run, 20, "jrt").claim(new_lease(1))
        return claim(*words)

    monkeypatch.setattr(Leases, "claim", late)
    watch.one_pass()
    lease = current(run, 10)
    assert (lease.job, lease.ended) == (None, f"given back: {why}")
    assert slurm.names == ["eval-run-step-20-jrt"] * (why == "it is done")


def test_what_sbatch_refuses_is_no_attempt(slurm: FakeSlurm, run: Path) -> None:
    watch = watcher(run, suites=["jrt"], every=20, retries=0)
    slurm.break_down("sbatch", "error: QOSMaxSubmitJobPerUserLimit")
    for _ in range(3):
        with pytest.raises(UserError, match="refused eval.sh: error: QOSMaxSubmitJobPerUserLimit"):
            watch.one_pass()
    slurm.break_down("sbatch", "")
    watch.one_pass()
    assert states(watch) == {(20, "jrt"): "queued"}


def test_an_sbatch_that_does_not_answer_may_have_the_job(
    slurm: FakeSlurm, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by its name, as is that of a watcher that died before it wrote the job down."""
    watch = watcher(run, suites=["jrt"], every=20, expiry_s=0)
    submit = Slurm.submit

    def silent(self: Slurm, *words: Any) -> str:
        submit(self, *words)
        raise NoAnswer("sbatch has not answered")

    monkeypatch.setattr(Slurm, "submit", silent)
    with pytest.raises(NoAnswer):
        watch.one_pass()
    time.sleep(0.02)
    watch.one_pass()
    assert len(slurm.jobs()) == 1 and states(watch) == {(20, "jrt"): "queued"}


# ---- retention


def test_nothing_that_waits_is_pruned(slurm: FakeSlurm, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 10, 15, 20, 25, keep=1)
    folder = CheckpointFolder(run / "checkpoint")

    def strip(full: Path, temporary: Path) -> None:
        fill(temporary, int(full.name.partition("-")[2]), "weights")

    retention = Retention(folder, 1, holds=lambda: held_steps(run), strip=strip)
    watch = watcher(run)
    watch.one_pass()
    assert held_steps(run) == {10, 20, 30, 40}, "those to come as well"
    retention.apply()
    assert folder.steps() == [10, 20, 25]
    assert Manifest.read(folder.step_path(10)).kind == "weights"
    assert set(states(watch).values()) == {"queued"}

    answer(run, 10, "jrt")
    watch.one_pass()
    assert 10 in held_steps(run), "one suite is still to come"
    answer(run, 10, "validation")
    (run / "evals/holds/step-10.a_person").touch()
    watch.one_pass()
    assert held_steps(run) == {10, 20, 30, 40}, "a hold of another's is not ours to release"
    (run / "evals/holds/step-10.a_person").unlink()
    retention.apply()
    assert folder.steps() == [20, 25]
    assert states(watch)[10, "jrt"] == "done"


def test_steps_that_are_gone_or_damaged_hold_up_nothing(slurm: FakeSlurm, run: Path) -> None:
    for step in (30, 40):
        save(run, step)
    (run / "checkpoint/step-20/data").write_text("longer than it was")
    (run / "checkpoint/step-10").rename(run / "checkpoint/.replaced-step-10")
    watch = watcher(run, suites=["jrt"])
    assert states(watch) == {(20, "jrt"): "damaged", (30, "jrt"): "waiting", (40, "jrt"): "waiting"}
    finish(run, 30, 40)
    assert not watch.schedules[0].is_finished(watch.look()[0][1]), "step 10 is on its way"
    (run / "checkpoint/.replaced-step-10").rename(run.parent / "gone")
    assert states(watch)[10, "jrt"] == "missing"
    watch.one_pass()
    assert held_steps(run) == set() and slurm.names == ["eval-report-run"]


def test_a_branch_that_is_left_takes_its_leases_along(slurm: FakeSlurm, run: Path) -> None:
    watch = watcher(run, suites=["jrt"])
    watch.one_pass()
    lease = current(run, 20)
    CheckpointFolder(run / "checkpoint").archive_after(15, run, "a test")
    assert begin(leases_of(run, 20, "jrt"), "2", lease.id, 3)[0] == 3
    save(run, 20)
    watch.one_pass()
    assert slurm.names.count("eval-run-step-20-jrt") == 2 and held_steps(run) == {10, 20, 30, 40}


# ---- what counts as answered, and what was asked for


def test_what_counts_as_answered(run: Path) -> None:
    def known(*how: str) -> bool:
        return Schedule(run, Request(SUITES, 10, how=[*how])).has_results(10, "jrt")

    answer(run, 10, "jrt", limit=5)
    (run / "evals/step-10/jrt/torn").mkdir()
    (run / "evals/step-10/jrt/torn/results.json").write_text('{"version"')
    assert not known()
    answer(run, 10, "jrt", options={"jrt_tokens": "100"})
    assert not known() and known("--option", "jrt_tokens=100")
    answer(run, 10, "jrt")
    assert known() and known("--max_length", "64") and known("--batch_tokens", "512")
    assert not known("--max_length", "65") and not known("--add_bos")
    assert not known("--dtype", "bfloat16") and known("--dtype", "float32")
    assert not Schedule(run, Request(SUITES, 10)).has_results(20, "jrt")


def test_one_run_has_one_schedule(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"suites": ["jrt"], "every": 10, "how": ["--add_bos"]}
    assert settle(run, given, keep=False) == Request(**given)
    assert not (run / "evals").exists()
    first = settle(run, given)
    assert settle(run, {}) == settle(run, {"every": 10}) == first
    with pytest.raises(UserError, match=r"every 10, given 20.*--change") as error:
        settle(run, {"every": 20, "suites": ["jrt"]})
    assert "suites" not in str(error.value)
    assert settle(run, {"every": 20}, change=True) == dataclasses.replace(first, every=20)
    assert settle(run, {}).every == 20
    (run / "evals/schedule.json").write_text("{")
    with pytest.raises(UserError, match="schedule.json is damaged"):
        settle(run, {})
    assert settle(run, {"every": 20}, change=True) == settle(run, {}) == Request([*ALL], every=20)
    with pytest.raises(UserError, match="is not a run folder"):
        settle(run.parent, {})
    with pytest.raises(UserError, match=r"--every 7: .* each 5 steps .*a multiple"):
        Schedule(run, Request(SUITES, 7))


@pytest.mark.parametrize(
    ("every", "steps"),
    [(15, [15, 30, 37]), (None, [5, 10, 15, 20, 25, 30, 35, 37]), (50, [37])],
)
def test_steps(every: int | None, steps: list[int], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", last=37)
    assert Schedule(run, Request(SUITES, every)).steps == steps


def test_suites_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert split_suites("validation,all,validation")[:2] == ["validation", "discriminative"]
    with pytest.raises(UserError, match="unknown suite 'jrtt'.* Did you mean \"jrt\""):
        split_suites("validation,jrtt")
    assert split_suites("validation,jrtt", ["jrtt"]) == ["validation", "jrtt"]
    with pytest.raises(UserError, match="no suite in"):
        split_suites(",")
    monkeypatch.chdir(tmp_path)
    words = ["--staged", "a b", "--junk", "j.txt", "--option", "x=1", "--option", "y=2"]
    parser = argparse.ArgumentParser()
    add_how(parser)
    how = to_words(vars(parser.parse_args(words)))
    assert how[:2] == ["--staged", f"{tmp_path}/a b"] and how[-1] == "y=2"
    assert to_words(vars(parser.parse_args(how))) == how


# ---- the job's own question


def test_a_job_asks_whether_the_work_is_its_own(run: Path, capsys: Any) -> None:
    leases = leases_of(run, 10, "jrt")
    lease = new_lease(1)
    assert leases.claim(lease)
    words = ["begin", "--job", "5", "--lease", lease.id, "--", f"{run}/checkpoint/step-10", "jrt"]
    schedule_main(words)
    assert current(run, 10).job == "5", "its watcher had not written that down"
    assert leases.claim(new_lease(2))
    with pytest.raises(SystemExit) as left:
        schedule_main(words)
    assert left.value.code == 3 and "another job has this work" in capsys.readouterr().err
    schedule_main(["begin", "--job", "6", f"{run}/checkpoint/step-10", "jrt"])  # by hand: no lease
    schedule_main(["begin", "--job", "6", str(run), "jrt,validation"])
    assert (run / "evals/step-20/jrt,validation/leases/restarts.json").is_file()


def test_a_job_that_gets_nowhere_ends(run: Path) -> None:
    leases = leases_of(run, 10, "jrt")

    def codes(count: int, job: str = "5") -> list[int]:
        return [begin(leases, job, None, 3)[0] for _ in range(count)]

    assert codes(4) == [0] * 4 and codes(1) == [1]
    done = leases.folder.parent / "abc/unfinished/one.task.json"
    done.parent.mkdir(parents=True)
    done.touch()
    assert codes(4) == [0] * 4 and codes(1) == [1]
    both = leases_of(run, 10, "validation,jrt")
    assert [begin(both, "7", None, 0)[0] for _ in range(2)] == [0, 1]
    done.with_name("two.task.json").touch()
    assert begin(both, "7", None, 0)[0] == 0, "a task of any of the suites counts"
    assert codes(1, job="6") == [0], "another job begins to count anew"


# ---- without Slurm


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """slurm/*.sh that answer at once; the folder where they note how they were called."""
    scripts = tmp_path / "slurm"
    scripts.mkdir()
    (scripts / "eval.sh").write_text('printf "%s\\n" "$*" >>"$NOTES"; [[ $5 != jrt ]]\n')
    (scripts / "eval_report.sh").write_text('printf "%s\\n" "$*" >>"$NOTES"; touch "$3"\n')
    monkeypatch.setattr("eval.watcher.SCRIPTS", scripts)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    fake = FakeSlurm(tmp_path / "fake")
    fake.break_down("squeue")
    monkeypatch.setenv("PATH", fake.environ["PATH"])
    return tmp_path / "notes"


def test_without_slurm_the_work_is_done_here(here: Path, run: Path, capsys: Any) -> None:
    """A script that leaves no results has failed, whatever its exit code; then it is reported."""
    for step in (30, 40):
        save(run, step)
    finish(run)
    answer(run, 20, "validation")
    words = ["--suites", "jrt,validation", "--every", 20, "--local", "--interval_s", 1]
    assert submit(run, *words) == 1
    lines = here.read_text().splitlines()
    assert len(lines) == 3 * 3 + 1 and all(line.startswith("--local --") for line in lines)
    assert f"{run} --out {run}/report" in lines[-1]
    capsys.readouterr()
    submit(run, "--status")
    shown = capsys.readouterr().out
    assert "step 20 jrt: failed: exit code 1" in shown
    assert "step 40 validation: failed: exit code 0" in shown
    assert "finished: 1 done, 3 failed; report: done" in shown
    assert submit(run, "--is_finished") == 0


def test_a_process_that_died_here_leaves_its_work_to_others(run: Path) -> None:
    leases = leases_of(run, 20, "jrt")
    code = "from canon_pretrain.cluster.leases import *; import sys; from pathlib import Path\n"
    code += "assert Leases(Path(sys.argv[1])).claim(new_lease(1, job=LOCAL))"
    subprocess.run([sys.executable, "-c", code, leases.folder], cwd=ROOT, check=True)
    schedule = Schedule(run, Request(["jrt"], 20))

    def state() -> str:
        return next(e.state for e in schedule.look(NoQueue()) if e.step == 20)

    assert state() == "waiting"
    assert leases.claim(new_lease(2, job=LOCAL))
    assert state() == "running", "we live"
    lease = current(run, 20)
    leases.record(lease, holder=dataclasses.replace(lease.holder, host="elsewhere"))
    assert state() == "running", "it showed life just now"
    os.utime(leases.folder / "2.json", (0, 0))
    assert state() == "waiting"


def test_what_a_person_sees(slurm: FakeSlurm, run: Path, capsys: Any) -> None:
    submit(run, "--suites", "jrt,validation", "--every", 10, "--once")
    slurm.set("1", "RUNNING")
    slurm.set("2", "FAILED")
    capsys.readouterr()
    submit(run, "--status")
    shown = capsys.readouterr().out
    assert "running 1" in shown and "waiting (1 try)" in shown and "queued 3" in shown
    assert "2 steps to come, the next is 30" in shown
    assert "going on: 2 queued, 1 running, 4 to come, 1 waiting; report: waiting" in shown
    submit(run, "--json")
    found = json.loads(capsys.readouterr().out)
    assert not found["finished"] and len(found["runs"][str(run)]) == 8
    assert submit(run, "--is_finished") == 1
    for words, message in (
        (["--max_in_flight", "0"], "--max_in_flight 0"),
        ([run], "a run is named twice"),
        (["--every", "15"], "every 10, given 15"),
    ):
        assert submit(run, *words, "--once") == 2 and message in capsys.readouterr().err


def test_runs_that_begin_later_keep_no_other_waiting(
    slurm: FakeSlurm, run: Path, tmp_path: Path, capsys: Any
) -> None:
    """A sweep with a throttle: the first runs would be pruned before the last ones begin."""
    later, report = tmp_path / "later", ("--report", tmp_path / "report")
    words = ("--suites", "jrt", "--every", 20, "--once", *report)
    assert submit(run, later, *words) == 0
    assert slurm.names == ["eval-run-step-20-jrt"] and held_steps(run) == {20, 40}
    assert f"{later}: it has not begun" in capsys.readouterr().out.replace("\n", "")
    save(run, 40)
    finish(run, 20, 40)
    assert submit(run, later, "--is_finished") == 1, "the other run is still to come"
    assert submit(run, later, *words) == 0
    assert not any("report" in name for name in slurm.names)
    write_run(later, 20)
    assert submit(run, later, *words) == 0
    assert slurm.names[-1] == "eval-later-step-20-jrt"
    assert submit(tmp_path / "a", tmp_path / "b", "--once") == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_a_sweep_means_all_of_its_runs(slurm: FakeSlurm, run: Path, capsys: Any) -> None:
    """Those that have not begun are waited for; the report is in the sweep's folder."""
    sweep = run.parent / "sweep"
    plan = {"runs": [{"name": name} for name in ("lr2", "lr10", "later")]}
    started = [write_run(sweep / name, 20) for name in ("lr2", "lr10")]
    (sweep / "sweep.json").write_text(json.dumps(plan))
    submit(sweep, "--suites", "jrt", "--every", 20, "--once")
    assert slurm.names == ["eval-lr2-step-20-jrt", "eval-lr10-step-20-jrt"]
    assert f"{sweep / 'later'}: it has not begun" in capsys.readouterr().out.replace("\n", "")
    for each in started:
        finish(each, 20, 40)
    (sweep / "sweep.json").unlink()
    submit(sweep, "--once")
    assert (sweep / "report" / "leases").is_dir()


def test_a_task_file_of_ones_own_is_used_only_if_trusted(
    slurm: FakeSlurm, run: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its templates can run commands; the schedule that names it is no leave."""
    mine = run.parent / "mine.yaml"
    mine.write_text("task: mine\n")
    asked: list[str] = []

    def code(*words: str, answer: str | None = None) -> int:
        monkeypatch.setattr("builtins.input", lambda prompt: (asked.append(prompt), answer)[1])
        monkeypatch.setattr("sys.stdin.isatty", lambda: answer is not None)
        return submit(run, "--every", 20, "--once", *words)

    suites = ("--suites", f"jrt,{mine}")
    assert code(*suites) == 2 and code(*suites, answer="") == 2
    assert "--trust_task_files" in capsys.readouterr().err
    assert not slurm.names and not (run / "evals").exists() and str(mine) in asked[0]
    assert code("--suites", f"jrt,{TASKS}/jrt/jrt_fda.yaml", "--status") == 0
    assert code(*suites, answer="y") == 0 and len(slurm.names) == 2
    assert code() == 2 and code("--trust_task_files") == 0 and code("--status") == 0
    assert len(asked) == 2


def test_a_text_given_on_purpose_is_answered_by_results_of_it_alone(tmp_path: Path) -> None:
    """Else the results of the run's own held-out text would do."""
    write_data(tmp_path)
    parser = argparse.ArgumentParser()
    add_how(parser)
    asked = {**asked_how("validation", parser.parse_args([]), 64), "dtype": "float32"}
    how = ["--held_out", str(tmp_path)]
    with TokenShards.open(tmp_path / "validation") as text:
        given = asked | {"held_out_fingerprint": text.fingerprint}
    own = asked | {"held_out_fingerprint": "0" * 64}
    assert [answers(each, "validation", how, 64) for each in (given, own)] == [True, False]
    assert answers(own, "validation", [], 64)
