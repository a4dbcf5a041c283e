"""`python -m eval submit` with fake Slurm commands: which jobs are submitted, and how often."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.checkpoint.manifest import FileEntry, Manifest
from canon_pretrain.checkpoint.retention import Retention, held_steps
from canon_pretrain.cluster.leases import LOCAL, Leases, NoQueue, Slurm, SlurmTimeout, new_lease
from canon_pretrain.core.files import sha256_file
from canon_pretrain.core.lock import LinkLock
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.results import Results, Score, write_results
from eval import schedule
from eval.__main__ import main
from eval.schedule import Request, Schedule, leases_of, start_job, update_request
from eval.submit import Watcher
from eval.suite_names import SUITES as ALL
from eval.suite_names import TASKS
from tests.fake_slurm import FakeSlurm
from tests.slurm_jobs import processes_of
from tests.support import HANGS_AFTER_S, ROOT, command_error, error_codes, refused, write_data

SUITES = ["jrt", "validation"]


def save(run, *steps, kind="full", into=None):
    """Write checkpoints that are valid but hold no model."""
    for step in steps:
        folder = into or run / "checkpoint" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "data").write_text(f"{kind} {step}")
        entry = FileEntry((folder / "data").stat().st_size, sha256_file(folder / "data"))
        Manifest(step, kind, 1, "2", {"data": entry}, "2026-01-01T00:00:00+00:00").write(folder)


def write_run(run, *steps, last=40, keep=0):
    """Write a run of `last` steps with checkpoints of `steps`."""
    config = {
        "training": {"steps": last, "seq_len": 64},
        "checkpoint": {
            "interval": 5,
            "keep_latest_k": keep,
            "max_held": 4,
            "folder": "checkpoint",
        },
    }
    RunFolder(run).write_config(config, {})
    save(run, *steps)
    return run


def store(run, step, suite, **changes):
    """Write results as `eval run` does, with some changed settings."""
    settings = {
        "checkpoint": "",
        "step": step,
        "suite": suite,
        "limit": None,
        "train_fingerprint": "",
        "add_bos": False,
        "max_length": 64,
        "dtype": "float32",
    } | changes
    name = "".join(map(str, changes.values())) or "whole"
    results = Results(settings, {suite: {"acc": Score(0.5)}}, {suite: 2})
    write_results(run / "evals" / f"step-{step}" / suite / name, results, {})


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    fake = FakeSlurm(tmp_path / "fake")
    monkeypatch.setenv("PATH", fake.environ["PATH"])
    return fake


@pytest.fixture
def run(tmp_path):
    """Steps 10 and 20 of 40 are saved, and 15, which is not evaluated."""
    return write_run(tmp_path / "run", 10, 15, 20)


def submit(*words):
    """Return the exit code of `eval submit`."""
    try:
        main(["submit", *map(str, words)])
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def watcher(run, *suites, expiry_s=600, cap=8, **fields):
    """A watcher of `suites` at steps 20 and 40, or of SUITES at every tenth step."""
    fields.setdefault("suites", [*suites] or SUITES)
    fields.setdefault("every", 20 if suites else 10)
    schedule = Schedule(run, Request(**fields), expiry_s=expiry_s)
    return Watcher(
        [schedule],
        Slurm(),
        run / "report",
        max_in_flight=cap,
        local=False,
        console=Console(file=io.StringIO()),
    )


def states(watcher):
    """Return the states of a watcher's evaluations by step and suite, but for those to come."""
    watcher.queue.refresh()
    entries = [entry for _, entries in watcher.overview() for entry in entries]
    return {(e.step, e.suite): e.state for e in entries if e.state != "to come"}


def test_jobs_are_submitted_oldest_first_up_to_the_limit(slurm, run):
    """Without those that have results."""
    store(run, 10, "validation")
    watch = watcher(run, cap=2)

    watch.poll()
    assert slurm.names == ["eval-run-step-10-jrt", "eval-run-step-20-jrt"]
    assert watch.poll()
    assert len(slurm.jobs()) == 2

    slurm.set("1", "RUNNING")
    assert [*states(watch).values()] == ["running", "done", "queued", "waiting"]

    store(run, 10, "jrt")
    slurm.set("1", "COMPLETED")
    watch.poll()
    assert slurm.names[2:] == ["eval-run-step-20-validation"]


def test_the_words_of_a_job(slurm, run):
    watcher(run, how=["--max_length", "64"], sbatch=["--partition=short"]).poll()

    words = slurm.words("1")
    assert f"--output={run}/evals/step-10/jrt/slurm-%j.log" in words
    assert "--partition=short" in words
    assert "--parsable" in words

    lease = leases_of(run, 10, "jrt").current()
    assert (lease.job, lease.cluster) == ("1", "fake")
    arguments = words[words.index("--lease") + 1 :]
    assert arguments == [lease.id, f"{run}/checkpoint/step-10", "jrt", "--max_length", "64"]


def test_from_the_first_checkpoint_to_the_report(slurm, run):
    """One report, after the last evaluation."""
    watch = watcher(run, cap=2)
    save(run, 30, 40)
    RunFolder(run).write_done(40)

    for step in (10, 20, 30, 40):
        for suite in SUITES:
            assert not watch.is_finished(watch.poll())
            assert "eval-report-run" not in slurm.names
            store(run, step, suite)
            slurm.end(f"step-{step}-{suite}-", "COMPLETED")
    for _ in range(2):
        assert not watch.is_finished(watch.poll())
        assert slurm.names.count("eval-report-run") == 1

    number = [*slurm.jobs()][-1]
    *_, option, mark, name, out, report = slurm.words(number)
    assert (option, name, out, report) == ("--mark", str(run), "--out", f"{run}/report")

    # the report is written, and its job forgotten
    Path(mark).touch()
    slurm.set(number, "FORGOTTEN")
    assert watch.is_finished(watch.poll())
    assert slurm.names.count("eval-report-run") == 1


@pytest.mark.system
def test_concurrent_watchers_submit_each_job_once(slurm, tmp_path):
    """Six processes, three times each; two runs have 12 evaluations."""
    runs = [write_run(tmp_path / f"run-{k}", 20, 40) for k in range(2)]
    command = [sys.executable, "-m", "eval", "submit", *map(str, runs)]
    command += ["--suites", "jrt,babilong,validation", "--every", "20", "--once"]
    environ = slurm.environ | {"PYTHONPATH": str(ROOT)}

    for cap, max_jobs in ((3, 3), (1000, 12), (1000, 12)):
        watchers = [
            subprocess.Popen(
                [*command, "--max_in_flight", str(cap)], env=environ, stdout=subprocess.DEVNULL
            )
            for _ in range(6)
        ]
        assert [process.wait(HANGS_AFTER_S) for process in watchers] == [0] * 6
        assert 1 <= len(slurm.jobs()) <= max_jobs
    assert len(slurm.names) == len(set(slurm.names)) == 12

    jobs = slurm.jobs()
    for run in runs:
        for path in run.glob("evals/*/*/leases"):
            lease = Leases(path).current()
            assert jobs[lease.job] == ("PENDING", lease.name)


@pytest.mark.parametrize("state", ["FAILED", "COMPLETED", "FORGOTTEN"])
def test_a_job_that_is_gone_is_submitted_again(slurm, run, state):
    """Also after COMPLETED without results; FORGOTTEN: unknown to Slurm. A refused sbatch is no
    attempt."""
    watch = watcher(run, "jrt", retries=1)
    slurm.break_down("sbatch", "error: QOSMaxSubmitJobPerUserLimit")
    for _ in range(3):
        with refused("slurm.refused"):
            watch.poll()
    slurm.break_down("sbatch", "")

    for number in ("1", "2"):
        watch.poll()
        slurm.set(number, state)
    watch.poll()

    assert len(slurm.jobs()) == 2
    assert states(watch) == {(20, "jrt"): "failed"}
    assert 20 not in held_steps(run)


def test_in_doubt_nothing_is_submitted(slurm, run):
    watch = watcher(run, "jrt", expiry_s=0)
    slurm.break_down("squeue")
    with refused("slurm.queue"):
        watch.poll()
    slurm.break_down("squeue", "")

    # it may still run
    for state in ("PENDING", "COMPLETING"):
        watch.poll()
        slurm.set("1", state)
    watch.poll()
    assert len(slurm.jobs()) == 1

    # the controller does not confirm that a job ended which is hidden, as if of another user
    (slurm.folder / "1.job").rename(slurm.folder / "hidden")
    slurm.break_down("scontrol")
    watch.poll()
    assert slurm.jobs() == {}

    # this cluster does not know jobs of another one
    slurm.break_down("scontrol", "")
    leases = leases_of(run, 20, "jrt")
    leases.record(leases.all()[0], cluster="elsewhere")
    watch.poll()
    assert slurm.jobs() == {}


@pytest.mark.parametrize("died", ["before", "after"])
def test_a_watcher_that_died_around_sbatch(slurm, run, monkeypatch, died):
    """A job that was submitted but not recorded is found by its name."""
    leases = leases_of(run, 20, "jrt")
    submit = Slurm.submit

    def silent(self, *words):
        if died == "after":
            submit(self, *words)
        raise SlurmTimeout("test.timeout", "no answer")

    patient = watcher(run, "jrt")
    with monkeypatch.context() as patch, pytest.raises(SlurmTimeout):
        patch.setattr(Slurm, "submit", silent)
        patient.poll()
    if died == "before":
        patient.poll()
        assert slurm.jobs() == {}
        assert states(patient) == {(20, "jrt"): "claimed"}

    # the claim expires
    watch = watcher(run, "jrt", expiry_s=-1)
    watch.poll()
    assert len(slurm.jobs()) == 1
    assert states(watch) == {(20, "jrt"): "queued"}
    assert [lease.job for lease in leases.all()] == ([None, "1"] if died == "before" else ["1"])


def test_waiting_checkpoints_are_not_pruned(slurm, tmp_path):
    run = write_run(tmp_path / "run", 10, 15, 20, 25, keep=1)
    folder = CheckpointFolder(run / "checkpoint")
    watch = watcher(run)

    def strip(full, temporary):
        save(run, int(full.name.partition("-")[2]), kind="weights", into=temporary)

    retention = Retention(folder, 1, holds=lambda: held_steps(run), strip=strip)
    watch.poll()
    assert held_steps(run) == {10, 20, 30, 40}
    retention.apply()
    assert folder.steps() == [10, 20, 25]
    assert Manifest.read(folder.step_path(10)).kind == "weights"

    # step 10 is held until its last suite has results, and while another hold is on it
    store(run, 10, "jrt")
    watch.poll()
    assert 10 in held_steps(run)
    store(run, 10, "validation")
    other_hold = run / "evals/holds/step-10.user"
    other_hold.touch()
    watch.poll()
    assert held_steps(run) == {10, 20, 30, 40}

    other_hold.unlink()
    retention.apply()
    assert folder.steps() == [20, 25]
    assert states(watch)[10, "jrt"] == "done"


def test_missing_or_damaged_steps_do_not_block(slurm, run):
    save(run, 30, 40)
    replaced = run / "checkpoint/.replaced-step-10"
    (run / "checkpoint/step-10").rename(replaced)
    (run / "checkpoint/step-20/data").write_text("longer than it was")
    watch = watcher(run, "jrt", every=10)
    assert states(watch) == {(20, "jrt"): "damaged", (30, "jrt"): "waiting", (40, "jrt"): "waiting"}

    # step 10, which is being replaced, is waited for
    store(run, 30, "jrt")
    store(run, 40, "jrt")
    RunFolder(run).write_done(40)
    assert not watch.schedules[0].is_finished(watch.overview()[0][1])

    replaced.rename(run.parent / "gone")
    assert states(watch)[10, "jrt"] == "missing"
    watch.poll()
    assert held_steps(run) == set()
    assert slurm.names == ["eval-report-run"]


def test_an_abandoned_branch_takes_its_leases_along(slurm, run):
    watch = watcher(run, "jrt", every=10)
    watch.poll()
    lease = leases_of(run, 20, "jrt").current()

    CheckpointFolder(run / "checkpoint").archive_after(15, run, "a test")

    assert start_job(leases_of(run, 20, "jrt"), "2", lease.id, 3)[0] == 3
    save(run, 20)
    watch.poll()
    assert slurm.names.count("eval-run-step-20-jrt") == 2
    assert held_steps(run) == {10, 20, 30, 40}


def test_results_count_for_the_same_settings(run):
    def has_results(*how):
        return Schedule(run, Request(SUITES, 10, how=[*how])).has_results(10, "jrt")

    # of a part, and torn
    store(run, 10, "jrt", limit=5)
    (run / "evals/step-10/jrt/torn").mkdir()
    (run / "evals/step-10/jrt/torn/results.json").write_text('{"version"')
    assert not has_results()

    store(run, 10, "jrt")
    assert has_results()
    assert has_results("--max_length", "64")
    assert has_results("--batch_tokens", "512")
    assert has_results("--dtype", "float32")
    assert not has_results("--max_length", "65")
    assert not has_results("--add_bos")
    assert not has_results("--dtype", "bfloat16")


def test_results_count_for_the_same_held_out_text(run, tmp_path):
    """The run's held-out text is not that of --held_out (issue 17, item 17)."""
    write_data(tmp_path / "text")
    store(run, 10, "validation", held_out_fingerprint="0" * 64)

    same = Request(SUITES, 10)
    other = Request(SUITES, 10, how=["--held_out", str(tmp_path / "text")])

    assert Schedule(run, same).has_results(10, "validation")
    assert not Schedule(run, other).has_results(10, "validation")


def test_one_run_has_one_schedule(run):
    fields = {"suites": ["jrt"], "every": 10, "how": ["--add_bos"]}
    first = Request(suites=["jrt"], every=10, how=["--add_bos"])
    assert update_request(run, fields, keep=False) == first
    assert not (run / "evals").exists()

    assert update_request(run, fields) == first
    assert update_request(run, {}) == first
    assert update_request(run, {"every": 10}) == first
    with refused("schedule.changed", field="every"):
        update_request(run, {"every": 20, "suites": ["jrt"]})
    assert update_request(run, {"every": 20}, change=True) == dataclasses.replace(first, every=20)


def test_a_damaged_schedule_is_only_replaced_on_purpose(run):
    (run / "evals").mkdir()
    (run / "evals/schedule.json").write_text("{")

    with refused("schedule.damaged"):
        update_request(run, {})

    changed = update_request(run, {"every": 20}, change=True)
    assert changed == update_request(run, {}) == Request([*ALL], every=20)


def test_the_steps_of_a_schedule_are_saved_ones(run):
    with refused("schedule.every", given=7, expected=5):
        Schedule(run, Request(SUITES, 7))

    write_run(run, last=37)
    assert Schedule(run, Request(SUITES, 15)).steps == [15, 30, 37]
    assert Schedule(run, Request(SUITES, None)).steps == [*range(5, 36, 5), 37]
    assert Schedule(run, Request(SUITES, 50)).steps == [37]


def test_a_job_that_lost_its_lease_ends(slurm, run):
    """Its script exits with 3."""
    checkpoint = f"{run}/checkpoint/step-20"
    leases = leases_of(run, 20, "jrt")
    watcher(run, "jrt").poll()
    leases.claim(new_lease(2))
    first, second = leases.all()

    schedule.main(["begin", "--job", "5", "--lease", second.id, "--", checkpoint, "jrt"])
    assert leases.current().job == "5"

    with pytest.raises(SystemExit, match="3"):
        schedule.main(["begin", "--job", "5", "--lease", first.id, "--", checkpoint, "jrt"])


def test_a_job_by_hand_needs_no_lease(slurm, run):
    leases = leases_of(run, 20, "jrt")
    leases.claim(new_lease(1))

    schedule.main(["begin", "--job", "6", f"{run}/checkpoint/step-20", "jrt"])
    schedule.main(["begin", "--job", "6", str(run), "jrt,validation"])

    assert (run / "evals/step-20/jrt,validation/leases/restarts.json").is_file()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["none/checkpoint/step-1", "validation"], "checkpoint.damaged"),
        (["none", "validation"], "checkpoint.none"),
        (["run/checkpoint/step-20", "no-such-suite"], "eval.unknown_suite"),
        (["run/checkpoint/step-20", "validation", "--limit", "0"], "eval.option_range"),
        (["run/checkpoint/step-20", "jrt", "--staged", "none"], "stage.missing"),
        (["run/checkpoint/step-20"], "slurm.usage"),
        (["--limit", "run/checkpoint/step-20"], "slurm.usage"),
    ],
)
def test_what_eval_would_refuse_is_refused_before_the_queue(words, code, run, monkeypatch, capsys):
    monkeypatch.chdir(run.parent)

    assert command_error(capsys, schedule.main, ["check", *words]) == code


def test_a_job_is_checked_with_its_checkpoint(run, monkeypatch, capsys):
    monkeypatch.chdir(run.parent)
    schedule.main(["check", "run/checkpoint/step-20", "validation", "--limit", "3"])
    schedule.main(["check", "run", "validation"])

    (run / "checkpoint" / "step-20" / "data").write_text("torn")
    words = ["check", "run/checkpoint/step-20", "validation"]
    assert command_error(capsys, schedule.main, words) == "checkpoint.damaged"


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(
    ("suites", "code"), [("jrt", "run.not_a_run"), ("no-such-suite", "eval.unknown_suite")]
)
def test_a_watch_of_runs_to_come_is_of_known_suites(suites, code, tmp_path, capsys):
    assert submit(tmp_path / "later", "--suites", suites, "--is_finished") == 2
    assert error_codes(capsys.readouterr().err) == [code]


def test_a_job_without_progress_ends(run):
    """After three restarts without a further task; a task resets the count."""
    leases = leases_of(run, 10, "jrt")
    task = leases.folder.parent / "abc/unfinished/one.task.json"
    task.parent.mkdir(parents=True)

    def exit_codes(num_starts):
        return [start_job(leases, "5", None, 3)[0] for _ in range(num_starts)]

    assert exit_codes(5) == [0, 0, 0, 0, 1]
    task.touch()
    assert exit_codes(5) == [0, 0, 0, 0, 1]

    # another job counts from the beginning
    assert start_job(leases, "6", None, 3)[0] == 0


def test_a_task_of_any_suite_of_a_job_is_progress(run):
    leases = leases_of(run, 10, "validation,jrt")
    task = leases_of(run, 10, "jrt").folder.parent / "abc/unfinished/one.task.json"
    task.parent.mkdir(parents=True)

    assert [start_job(leases, "7", None, 0)[0] for _ in range(2)] == [0, 1]
    task.touch()
    assert start_job(leases, "7", None, 0)[0] == 0


@pytest.fixture
def scripts(run, monkeypatch):
    """The folder of scripts that local evaluations run; the report's only marks its end."""
    folder = run.parent / "slurm"
    folder.mkdir()
    (folder / "eval_report.sh").write_text('touch "$3"\n')
    monkeypatch.setattr("eval.submit.SCRIPTS", folder)
    return folder


def test_local_evaluations_without_slurm(slurm, run, scripts, capsys, monkeypatch):
    """A script without results has failed, whatever its exit code; then the report runs."""
    notes = run.parent / "notes"
    note = 'printf "%s\\n" "$*" >>"$NOTES"'
    (scripts / "eval.sh").write_text(f"{note}; [[ $5 != jrt ]]\n")
    (scripts / "eval_report.sh").write_text(f'{note}; touch "$3"\n')
    monkeypatch.setenv("NOTES", str(notes))
    slurm.break_down("squeue")
    save(run, 30, 40)
    RunFolder(run).write_done(40)
    store(run, 20, "validation")

    words = ["--suites", "jrt,validation", "--every", 20, "--local", "--interval_s", 1]
    assert submit(run, *words) == 1

    lines = notes.read_text().splitlines()
    assert len(lines) == 3 * 3 + 1
    assert all(line.startswith("--local --") for line in lines)
    assert f"{run} --out {run}/report" in lines[-1]

    capsys.readouterr()
    submit(run, "--json")
    overview = json.loads(capsys.readouterr().out)
    entries = overview["runs"][str(run)]
    assert [entry["state"] for entry in entries] == ["failed", "done", "failed", "failed"]
    assert entries[0]["why"] == "exit code 1"
    assert overview["report"] == "done"
    assert overview["finished"]

    submit(run, "--status")
    assert entries[0]["why"] in capsys.readouterr().out
    assert submit(run, "--is_finished") == 0


def write_sweep(folder, *names):
    """Write the plan of a sweep of runs with these names."""
    plan = {"runs": [{"name": name} for name in names]}
    (folder / "sweep.json").write_text(json.dumps(plan))


@pytest.mark.usefixtures("slurm", "scripts")
def test_local_evaluations_do_not_wait_for_a_stopped_run(tmp_path, capsys):
    """A folder of a run that is done, one that was stopped, and one that never started."""
    folder = tmp_path / "sweep"
    for name, steps in (("done", (20, 40)), ("stopped", (20,))):
        write_run(folder / name, *steps)
        for step in steps:
            store(folder / name, step, "jrt")
    RunFolder(folder / "done").write_done(40)
    write_sweep(folder, "done", "stopped", "later")
    words = (folder, "--suites", "jrt", "--every", 20, "--local", "--interval_s", 0.01)

    assert submit(*words) == 0

    printed = capsys.readouterr().out.replace("\n", "")
    assert str(folder / "stopped") in printed
    assert str(folder / "later") in printed

    # resumed: the same command waits for it, and evaluates the rest
    stopped = RunFolder(folder / "stopped")
    lock = LinkLock.acquire(stopped.lock_file, log=lambda line: None)
    schedule = Schedule(stopped.path, Request(["jrt"], 20))
    assert schedule.is_training()
    assert not schedule.is_finished(schedule.entries(NoQueue()))
    lock.release()
    save(stopped.path, 40)
    stopped.write_done(40)
    store(stopped.path, 40, "jrt")
    assert submit(*words) == 0


def test_local_evaluations_of_a_run_without_checkpoints_end(slurm, tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert submit(run, "--suites", "jrt", "--local", "--interval_s", 0.01) == 2
    assert error_codes(capsys.readouterr().err) == ["submit.no_checkpoint"]


@pytest.fixture
def sigint():
    """Let Ctrl-C raise KeyboardInterrupt, which a background job of a shell would ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("slurm", "sigint")
@pytest.mark.parametrize(("trap", "presses"), [("exit 143", 1), (":", 2)], ids=["once", "twice"])
def test_ctrl_c_ends_a_local_evaluation(trap, presses, run, scripts):
    """The first waits for the script, which ends its ranks; the second kills it."""
    ready = run.parent / "ready"
    script = f"trap '{trap}' TERM; touch '{ready}'; for ((;;)); do sleep 0.1; done\n"
    (scripts / "eval.sh").write_text(script)

    def press():
        while not ready.exists():
            time.sleep(0.05)
        for _ in range(presses):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    threading.Thread(target=press).start()
    began = time.monotonic()
    assert submit(run, "--suites", "jrt", "--every", 20, "--local") == 130

    assert time.monotonic() - began < 20
    assert leases_of(run, 20, "jrt").current().ended == "given back: interrupted"
    assert not processes_of(str(scripts))


CLAIM = """
import sys
from pathlib import Path
from canon_pretrain.cluster.leases import LOCAL, Leases, new_lease
Leases(Path(sys.argv[1])).claim(new_lease(1, job=LOCAL))
"""


def test_a_dead_local_process_is_replaced(run):
    def state():
        return Schedule(run, Request(["jrt"], 20)).entries(NoQueue())[0].state

    # of a process that has ended, then of this one
    leases = leases_of(run, 20, "jrt")
    subprocess.run([sys.executable, "-c", CLAIM, leases.folder], cwd=ROOT, check=True)
    assert state() == "waiting"
    leases.claim(new_lease(2, job=LOCAL))
    assert state() == "running"

    # of a process elsewhere: its heartbeat counts
    current = leases.all()[-1]
    leases.record(current, holder=dataclasses.replace(current.holder, host="elsewhere"))
    assert state() == "running"
    os.utime(leases.folder / "2.json", (0, 0))
    assert state() == "waiting"


def test_runs_of_a_sweep_may_start_later(slurm, tmp_path, capsys):
    """Else the first runs of a throttled sweep would be pruned before the last ones start."""
    sweep = tmp_path / "sweep"
    write_run(sweep / "first", 20, 40)
    write_sweep(sweep, "first", "later")
    words = (sweep, "--suites", "jrt", "--every", 20, "--once")
    assert submit(*words) == 0
    assert slurm.names[0] == "eval-first-step-20-jrt"
    assert str(sweep / "later") in capsys.readouterr().out.replace("\n", "")

    # the report waits for the run that has not started
    for name in ("first", "later"):
        for step in (20, 40):
            store(sweep / name, step, "jrt")
    RunFolder(sweep / "first").done_file.touch()
    assert submit(*words) == 0
    assert submit(sweep, "--is_finished") == 1
    assert not any("report" in name for name in slurm.names)

    write_run(sweep / "later", 20, 40)
    RunFolder(sweep / "later").done_file.touch()
    assert submit(*words) == 0
    assert (sweep / "report" / "leases").is_dir()


@pytest.mark.usefixtures("slurm")
def test_runs_to_come_that_no_sweep_has_are_refused(tmp_path):
    assert submit(tmp_path / "a", tmp_path / "b", "--once") == 2


def test_a_users_task_file_must_be_trusted(slurm, run, capsys, monkeypatch):
    """It can run commands; being in schedule.json is not enough (issue 17, item 26)."""
    mine = run.parent / "mine.yaml"
    mine.write_text("task: mine\n")
    suites = ("--suites", f"jrt,{mine}")

    def exit_code(*words, answer=None):
        monkeypatch.setattr("builtins.input", lambda prompt: answer)
        monkeypatch.setattr("sys.stdin.isatty", lambda: answer is not None)
        return submit(run, "--every", 20, "--once", *words)

    # without a terminal, and without consent
    assert exit_code(*suites) == 2
    assert exit_code(*suites, answer="") == 2
    assert error_codes(capsys.readouterr().err) == ["submit.untrusted_task"] * 2
    assert not slurm.names
    assert not (run / "evals").exists()

    # a task file of ours
    assert exit_code("--suites", f"jrt,{TASKS}/jrt/jrt_fda.yaml", "--status") == 0

    assert exit_code(*suites, answer="y") == 0
    assert len(slurm.names) == 2
    assert exit_code() == 2
    assert exit_code("--trust_task_files") == 0
    assert exit_code("--status") == 0
