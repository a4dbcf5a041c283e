"""`canon try`: from a text to a verdict, in one command that continues after any interruption."""

import json
import os
import re
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from canon_pretrain import trial
from canon_pretrain.boards.driver import write_failures
from canon_pretrain.core.errors import UserError
from canon_pretrain.new import Machine, check_name
from canon_pretrain.report.comparison import compare_sides
from canon_pretrain.report.content import BETTER
from canon_pretrain.report.record import read_runs
from canon_pretrain.report.verdicts import Options
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.status import StatusWriter
from tests.commands import Command
from tests.corpora import prose
from tests.ranks import events, logged_step
from tests.report_runs import evaluated, planted_run
from tests.support import HANGS_AFTER_S, canon_stage, command_error, error_codes

ROW = {
    "metric": "nats_per_token",
    "difference": -0.2, "bits_per_nat": 0.5, "num_clusters": 18, "num_runs": [2, 2],
    "ci": [-0.3, -0.1], "items_ci": None, "p": 0.01, "p_holm": 0.01, "verdict": BETTER, "why": None,
}  # fmt: skip


def numbers(text):
    """Return the decimal numbers in a text."""
    return [float(number) for number in re.findall(r"-?\d+\.\d+", text)]


@pytest.mark.parametrize(
    ("changes", "expected", "judged"),
    [
        ({}, [0.1, 0.05, 0.15], "lower"),
        ({"difference": 0.2, "ci": [0.1, 0.3]}, [0.1, 0.05, 0.15], "higher"),
        ({"ci": [-0.5, 0.1], "verdict": "within noise"}, [0.1, 0.25, 0.05], "within the noise"),
        ({"ci": None, "p": None, "why": "few documents"}, [0.1], "not judged, few documents"),
    ],
)  # fmt: skip
def test_the_verdict_is_in_bits_per_byte(changes, expected, judged):
    sentence = trial.verdict(SimpleNamespace(**ROW | changes))

    p_value = [] if "p" in changes else [0.01]
    assert numbers(sentence.replace("95 % ", "")) == [*expected, *p_value, 0.2]
    assert judged in sentence
    assert "18 documents" in sentence
    assert "2 seeds each" in sentence


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A folder of text, in the current folder; a model takes seconds, at 20 steps."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "mytext"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(prose(number, 200, lexicon_words=500))
    return folder


def start_trial(folder, *words):
    """Start `canon try` on mytext in `folder`, with its server forked."""
    return Command(
        "tests.forked_driver",
        "try",
        "mytext",
        *words,
        stdout=folder / "printed",
        cwd=folder,
        interrupts=True,
    )


def printed(folder):
    """Return what `start_trial` has printed."""
    return (folder / "printed").read_text()


@pytest.fixture
def quick_machine(monkeypatch):
    """A machine that needs no timing; no process imports torch for the stages."""
    monkeypatch.setattr(trial, "visible_gpus", lambda: ["0"])
    monkeypatch.setattr(trial, "_in_fork", lambda function: function())
    machine = Machine("a CPU", False, 1, 8e9, parallel=2)
    monkeypatch.setattr(Machine, "find", classmethod(lambda cls, models=1: machine))
    monkeypatch.setattr(Machine, "tokens_per_second", lambda self, args: 1e4)


@pytest.fixture
def stopped_at_first_stage(monkeypatch):
    """A trial that a user interrupts as its first stage begins."""

    def stage(self, *words):
        raise KeyboardInterrupt

    monkeypatch.setattr(trial.Stages, "run", stage)


def run(capsys, *words):
    """Return the exit code and the error output of a `canon try` that ends early."""
    with pytest.raises(SystemExit) as stop:
        canon_stage("try")(words)
    return stop.value.code, capsys.readouterr().err


def run_folders(folder):
    """Return the run folders of a trial."""
    names = [name for model in trial.MODELS for name in trial.run_names(model)]
    return [folder / "runs" / name for name in names]


def end_trial_at(folder, is_reached, number):
    """Start the trial, send it a signal once `is_reached()`, and return its exit code."""
    process = start_trial(folder, "--minutes", 0.1)
    deadline = time.monotonic() + HANGS_AFTER_S
    while not is_reached() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.poll() is None, printed(folder)
    process.send_signal(number)
    return process.wait(HANGS_AFTER_S)


@pytest.mark.system
@pytest.mark.usefixtures("text", "quick_machine", "stopped_at_first_stage")
def test_a_trial_goes_on_after_any_end(tmp_path, capsys):
    """Ctrl-C, kill -9 and SIGTERM at stages that a user would meet."""
    folder = tmp_path / "outputs/mytext"
    assert run(capsys, "mytext", "--minutes", 0.1)[0] == 130

    def log_exists():
        return (folder / "log.txt").exists()

    def a_run_trains():
        shards = folder / "data/train/manifest.json"
        return shards.exists() and max(map(logged_step, run_folders(folder))) > 1

    def a_run_is_done():
        return any(RunFolder(path).done_file.exists() for path in run_folders(folder))

    for is_reached, number, exit_code in (
        (log_exists, signal.SIGINT, 130),
        (a_run_trains, signal.SIGKILL, -signal.SIGKILL),
        (a_run_is_done, signal.SIGTERM, 130),
    ):
        assert end_trial_at(tmp_path, is_reached, number) == exit_code, printed(tmp_path)

    # the project folder is moved
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("mytext", "outputs"):
        (tmp_path / name).rename(moved / name)
    folder = moved / "outputs/mytext"

    process = start_trial(moved, "--minutes", 0.1)

    assert process.wait(HANGS_AFTER_S) == 0, printed(moved)
    *_, sentence, page = printed(moved).strip().splitlines()
    assert page == "Page: outputs/mytext/index.html"
    assert (folder / "index.html").stat().st_size > 10_000
    for path in run_folders(folder):
        steps = [event["step"] for event in events(path, "step")]
        assert RunFolder(path).done_file.exists()
        assert steps == [*range(1, 1 + len(steps))]

    # the sentence is what `eval compare` finds, in other units
    sides = [
        read_runs([folder / "runs" / name for name in trial.run_names(model)])[0]
        for model in trial.MODELS
    ]
    [row] = compare_sides(sides, Options()).pairs
    scores = sides[0][0].evaluations[0].results.scores["validation"]
    bits_per_nat = scores["bits_per_byte"].value / scores["nats_per_token"].value
    assert sentence.startswith("With Canon: ")
    assert numbers(sentence)[0] == pytest.approx(bits_per_nat * abs(row.difference), abs=6e-4)


def plant_trained(sweep, folder, diverged, losses):
    """Plant the runs of a trial as `train_sweep` leaves them; those in `diverged` have failed."""
    for planned in sweep.runs:
        model, _, seed = planned.name.rpartition("-seed")
        path = folder / planned.name
        canon_set = "ABCD" if model == "canon" else ""
        if planned.name in diverged:
            run = planted_run(path, int(seed), model__canon_set=canon_set)
            StatusWriter(run.status_file, steps=500, world_size=1).end("failed", "not finite", 17)
        else:
            evaluated(path, canon_set, losses[model] + 0.001 * int(seed), int(seed))
            add_bits_per_byte(path)

    failures = {name: why for name, why in diverged.items() if name in sweep_names(sweep)}
    if failures:
        write_failures(folder, failures)
        raise UserError("sweep.failed_runs", "some failed", failures=failures)


def add_bits_per_byte(run_folder):
    """Add the model's bits per byte, half of its nats per token, and those of a bigram model."""
    [results] = run_folder.glob("evals/*/*/*/results.json")
    content = json.loads(results.read_text())
    scores = content["scores"]
    nats = scores["validation"]["nats_per_token"]
    scores["validation"]["bits_per_byte"] = nats | {"value": nats["value"] / 2}
    scores["bigram"] = {"bits_per_byte": nats | {"value": 4.5}}
    results.write_text(json.dumps(content))


def sweep_names(sweep):
    """Return the names of a sweep's runs."""
    return {run.name for run in sweep.runs}


@pytest.fixture
def planted(text, quick_machine, monkeypatch, tmp_path):
    """Return a function that runs a trial whose runs are planted; it lists the trained runs."""
    (tmp_path / "outputs").mkdir()
    monkeypatch.setattr(trial.Stages, "run", lambda *words: "")
    monkeypatch.setattr(trial.Stages, "call", lambda *words: '{"text": "x"}')

    def run_planted(capsys, diverged):
        trained = []

        def train(sweep, folder, **options):
            trained.extend(sweep_names(sweep))
            plant_trained(sweep, folder, diverged, {"without-canon": 5.0, "canon": 4.8})

        monkeypatch.setattr(trial, "train_sweep", train)
        code = 0
        try:
            canon_stage("try")(["mytext", "--minutes", "1"])
        except SystemExit as stop:
            code = stop.code
        return code, capsys.readouterr(), trained

    return run_planted


NOT_FINITE = "exit code 2, error[train.not_finite]: loss not finite"


def test_a_seed_that_diverged_is_left_out_and_named(planted, capsys):
    """The others are compared; the same command does not train it again."""
    diverged = {"canon-seed1": NOT_FINITE}
    for launch in (1, 2):
        code, output, trained = planted(capsys, diverged)

        assert code == 0
        if launch == 1:
            assert len(trained) == 4
            assert "canon-seed1" in trained
        else:
            assert len(trained) == 3
            assert "canon-seed1" not in trained

        *_, sentence, _ = output.out.strip().splitlines()
        assert sentence.startswith("With Canon: ")
        assert "2 and 1 seeds" in sentence or "1 and 2 seeds" in sentence
        assert re.search(r"canon-seed1 .* step 17", output.out)
        assert "--lr 0.002" in output.out
        assert {4.5, 2.5, 2.4} <= {round(number, 3) for number in numbers(output.out)}


@pytest.mark.parametrize("models", [("canon",), ("canon", "without-canon")])
def test_a_model_without_a_seed_has_no_verdict(models, planted, capsys):
    diverged = {name: NOT_FINITE for model in models for name in trial.run_names(model)}

    code, output, _ = planted(capsys, diverged)

    assert code == 1
    assert "With Canon: " not in output.out
    for name in diverged:
        assert f"{name} " in output.out

    # the scores of the other model are shown if it has any
    shown = {round(number, 3) for number in numbers(output.out)}
    assert ({4.5, 2.5, 2.501} <= shown) == (len(models) == 1)


def test_a_run_that_failed_otherwise_is_tried_again(planted, capsys):
    failed = {"canon-seed0": NOT_FINITE, "canon-seed1": "exit code 1, OSError: disk full"}
    code, output, _ = planted(capsys, failed)
    assert (code, error_codes(output.err)) == (2, ["sweep.failed_runs"])

    code, output, trained = planted(capsys, {})

    assert code == 0
    assert "canon-seed1" in trained
    assert "canon-seed0" not in trained


@pytest.mark.parametrize(
    ("left", "seconds"), [(600, 450), (60, 45), (30, 15), (18, 4.5), (6, 1.5), (0.1, 0.025)]
)
def test_what_is_not_training_has_its_time(left, seconds):
    assert trial.training_seconds(left) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("mytext", "mytext"), ("a/my text.txt", "my_text"), ("donn\u00e9es.txt", "donn_es"),
        (".texts", "texts"), ("\u6587.txt", "_"), ("...", "text"), ("a/-x", "x"),
    ],
)  # fmt: skip
def test_a_folder_is_named_by_the_text(path, name):
    assert trial.folder_name(path) == name
    check_name(name)


def test_a_fork_that_succeeds_returns():
    trial._in_fork(lambda: None)


@pytest.mark.parametrize(
    ("function", "code"), [(lambda: sys.exit(3), 3), (lambda: os.kill(os.getpid(), 9), 1)]
)
def test_a_fork_ends_as_its_function(function, code):
    with pytest.raises(SystemExit) as stop:
        trial._in_fork(function)

    assert stop.value.code == code


def test_a_fork_prints_the_error_of_its_function(capfd):
    def refuse():
        raise UserError("test.refused", "no")

    assert command_error(capfd, trial._in_fork, refuse) == "test.refused"


@pytest.mark.usefixtures("text", "quick_machine", "stopped_at_first_stage")
@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("mytext --name old", "try.exists"),
        ("mytext --name ../x", "option.invalid"),
        ("short.txt", "new.too_little_text"),
        ("nothing", "input.none"),
        ("mytext --minutes 0", "cli.usage"),
        ("mytext --minutes nan", "cli.usage"),
        ("mytext --minutes inf", "cli.usage"),
    ],
)
def test_refusals_lose_nothing(words, code, tmp_path, capsys):
    foreign = tmp_path / "outputs/old"
    foreign.mkdir(parents=True)
    (foreign / "file").write_text("mine")
    (tmp_path / "short.txt").write_text("too short")

    status, err = run(capsys, *words.split())

    assert (status, error_codes(err)) == (2, [code])
    assert (foreign / "file").read_text() == "mine"
    visible = [path for path in (tmp_path / "outputs").iterdir() if path.name[0] != "."]
    assert visible == [foreign]


@pytest.mark.usefixtures("text", "quick_machine", "stopped_at_first_stage")
def test_a_plan_is_kept_for_its_options(tmp_path, capsys):
    folder = tmp_path / "outputs/mytext"

    def content():
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    assert run(capsys, "mytext", "--minutes", 3)[0] == 130
    plan = content()
    assert {"canon.toml", "without-canon.toml", "try.json"} <= {*plan}

    for words in (("--minutes", 4), ("--text-field", "a"), ("--text-suffixes", ".md")):
        status, err = run(capsys, "mytext", *words)
        assert (status, error_codes(err)) == (2, ["try.other"])
    for same in ("mytext", "./mytext", "mytext/"):
        assert run(capsys, same, "--minutes", 3)[0] == 130
    assert content() == plan

    (folder / "try.json").write_text("{")
    status, err = run(capsys, "mytext", "--minutes", 3)
    assert (status, error_codes(err)) == (2, ["try.damaged"])
