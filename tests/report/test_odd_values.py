"""Every view of runs with each odd value in each field of each file; a broken run hides no other.

One copy of a whole run per field, beside a good one: the views of several runs see all of them at
once, the views of one run each in turn. Nothing may raise what the command line does not catch.
"""

import copy
import json
import logging
import os

import pytest

from canon_pretrain.cluster.sweep import (
    PlannedRun,
    Sweep,
    held_out_verdicts,
    read_sweep,
    show_table,
    sweep_rows,
)
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.terminal import Console
from canon_pretrain.report import card, picture
from canon_pretrain.report.comparison import comparison_content
from canon_pretrain.report.diff import compare, describe
from canon_pretrain.report.eval_report import report_content, write_report
from canon_pretrain.report.export import TensorBoardTarget
from canon_pretrain.report.export import copy as export
from canon_pretrain.report.figures import labels_of
from canon_pretrain.report.plot import page_content, write_page
from canon_pretrain.report.record import RunRecord, read_runs
from canon_pretrain.report.status import overview, summarize_run
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.launches import begin_launch
from canon_pretrain.run.log import json_value
from tests.board_runs import plant_board
from tests.checkpoint_folders import make_step
from tests.report_runs import (
    ACC,
    NOW,
    TOKENS_A_STEP,
    launch,
    plant_answers,
    plant_run,
    plant_status,
    records,
    step,
)
from tests.support import canon_stage

checkpoint = canon_stage("checkpoint")
playground = canon_stage("playground")

TEXT = "0f" * 32
LAST = 40
ODD = {
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
    "the text NaN": "NaN",
    "the text Infinity": "Infinity",
    "the text -Infinity": "-Infinity",
    "null": None,
    "text": "x",
    "list": [],
    "object": {},
    "true": True,
    "0": 0,
    "-1": -1,
    "too large": 10**400,
}
QUICK = ("the text NaN", "null")


def values_of(system, default=()):
    """Return the odd values with the mark of the tier that tries them: `long` tries the others."""
    tiers = dict.fromkeys(system, [pytest.mark.system]) | dict.fromkeys(default, [])
    return [pytest.param(x, id=x, marks=tiers.get(x, [pytest.mark.long])) for x in ODD]


OF_SEVERAL = values_of(system=("null", "text", "list", "too large"), default=("the text NaN",))
OF_ONE = values_of(system=("the text NaN",))  # a minute of CPU each


def at(number, event, **fields):
    """An event at that step."""
    time = f"2026-11-20T10:06:{number:02}.000+00:00"
    return {"event": event, "time": time, "step": number, "tokens": TOKENS_A_STEP * number} | fields


SPEEDS = {
    "mfu": 0.4,
    "data_wait": 0.1,
    "seconds_per_step": 1.0,
    "memory_gib": 1.5,
    "tokens_per_second_per_device": 4500.0,
    "skipped_steps": 1,
    "restarts": 0,
    "checkpoint_seconds": 1.0,
    "checkpoint_stall_seconds": 0.5,
    "max_loss": 8.0,
}


DATA = {"lr": 1e-3, "data_digests": ["a" * 16] * 10, "source_tokens": {"a": 5, "b": 6}}


SOURCE = {"loss": 5.0, "bits_per_byte": 1.2, "tokens": 5}


def log():
    """Events of every kind, with every field that a view reads."""
    events = [
        launch("start", hosts=["a"], canon_backend="reference", run_id="aabbccdd", segment=1),
        at(1, "initial_load", checkpoint_step=5, model_only=True, manifest_sha256="ab" * 32),
    ]
    for number in (10, 20, 30):
        validation = at(
            number,
            "validation",
            loss=6.0 - number / 10,
            bits_per_byte=1.5,
            held_out_fingerprint=TEXT,
            sources={"a": SOURCE, "b": SOURCE},
            scores={"exact": 0.5, "first_1": 1.0},
        )
        samples = at(number, "samples", samples=[{"prompt": "A", "text": "b", "tokens": 3}])
        events += [step(number, 7.0 - number / 10) | SPEEDS | DATA, validation, samples]

    events += [
        at(25, "skip", loss="NaN", grad_norm=1.0, reason="loss is not finite"),
        at(30, "checkpoint", seconds=1.0),
        launch("resume", from_step=30, run_id="aabbccdd", segment=2),
        step(LAST, 3.0) | SPEEDS,
        at(LAST, "stop", reason="SIGTERM", cpu_seconds=3.0),
    ]
    return events


def plant(folder, seed):
    """Plant a run that has everything: two launches, a checkpoint, results with answers."""
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    for _ in range(2):
        begin_launch(run)
    plant_run(folder, log(), held_out_fingerprint=TEXT, model__init_seed=seed, data__data_seed=seed)

    stored = json.loads(run.config_file.read_text())
    stored["config"] |= {
        "training": {"steps": 500},
        "run": {"heartbeat_s": 10.0},
        "checkpoint": {"folder": "checkpoint"},
        "data": {"path": "/data"},
    }
    run.config_file.write_text(json.dumps(stored))
    plant_status(run)
    make_step(run.path / "checkpoint", LAST)

    plant_answers(
        run,
        LAST,
        "discriminative",
        {"piqa": records({"acc": [1.0, 0.0] * 10})},
        described={"piqa": ACC},
    )
    plant_answers(
        run,
        LAST,
        "validation",
        {"validation": records({"nats_per_token": [[-5.0 * n, n] for n in range(1, 21)]})},
        scores={"validation": {"nats_per_token": 5.0}},
        described={"validation": {"primary": ["nats_per_token"]}},
    )
    return run


def places(value, path=()):
    """Yield the path of a JSON value and of all in it; of a list, of its first item only."""
    yield path
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value[:1])
    else:
        return
    for key, item in items:
        yield from places(item, (*path, key))


def replaced(value, path, odd):
    """Return a copy of a JSON value with `odd` at `path`."""
    if not path:
        return odd
    changed = copy.deepcopy(value)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = odd
    return changed


def broken_logs(run, odd):
    """Yield a name and a log, for each field of the last event of a kind with the odd value."""
    events = [json.loads(line) for line in run.log_file.read_text().splitlines()]
    last = {event["event"]: number for number, event in enumerate(events)}
    for kind, number in last.items():
        for path in places(events[number]):
            broken = replaced(events[number], path, odd)
            changed = [*events[:number], broken, *events[number + 1 :]]
            yield f"{kind} {path}", "".join(json.dumps(event) + "\n" for event in changed)


def broken_files(run, odd):
    """Yield a name, a file of the run and its content, for each field with the odd value."""
    for name, content in broken_logs(run, odd):
        yield name, run.log_file, content

    documents = [
        run.status_file,
        run.run_file,
        run.config_file,
        *sorted(run.path.glob("evals/*/*/*/results.json")),
        *sorted(run.path.glob("checkpoint/*/manifest.json")),
    ]
    for file in documents:
        stored = json.loads(file.read_text())
        for path in places(stored):
            yield f"{file.name} {path}", file, json.dumps(replaced(stored, path, odd))

    for file in sorted(run.path.glob("evals/*/*/*/samples-*.jsonl")):
        first, *others = file.read_text().splitlines(keepends=True)
        stored = json.loads(first)
        for path in places(stored):
            changed = json.dumps(replaced(stored, path, odd)) + "\n"
            yield f"{file.name} {path}", file, "".join([changed, *others])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without an odd value."""
    return plant(tmp_path_factory.mktemp("whole") / "run", 0)


@pytest.fixture(scope="module")
def runs(whole, request, tmp_path_factory):
    """Return the folder of a good run and of those with the value in a field, by name."""
    folder = tmp_path_factory.mktemp("runs")
    files = [path for path in whole.path.rglob("*") if path.is_file()]
    names = {}
    for number, (name, broken, content) in enumerate(broken_files(whole, ODD[request.param])):
        run = folder / f"run-{number}"
        names[run] = name
        for file in files:
            target = run / file.relative_to(whole.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            if file == broken:
                target.write_text(content)
            else:
                os.link(file, target)

    plant(folder / "good", 1)
    return folder, names


def show_differences(path, good, out):
    """View: `run diff`."""
    list(describe(compare(RunRecord(path), good, rtol=0.0), with_own=True))


def export_scalars(path, good, out):
    """View: `run export tensorboard`."""
    export(RunRecord(path), lambda record: TensorBoardTarget(out / "tb", record, live=False))


def make_card(path, good, out):
    """View: the model card."""
    card.model_card(path, LAST, title="t", lead="l", loading="x", library=None, license_id=None)


def list_checkpoints(path, good, out):
    """View: `checkpoint list`."""
    checkpoint(["list", str(path)])


VIEWS = (show_differences, export_scalars, make_card, list_checkpoints)


class TestViews:
    @pytest.mark.parametrize("runs", OF_SEVERAL, indirect=True)
    def test_of_several_runs(self, runs, tmp_path, capsys, caplog):
        caplog.set_level(logging.ERROR)  # of lines that are left out
        folder, names = runs
        paths = [*names, folder / "good"]

        # status
        summaries = [summarize_run(path, NOW) for path in paths]
        console = Console(width=1000, color_system=None)
        console.print(overview(summaries, console))
        shown = [line for line in capsys.readouterr().out.splitlines() if "run-" in line]
        assert len(shown) >= len(names)
        json.dumps(json_value(summaries), allow_nan=False)
        unexpected = [
            (names[path], problem)
            for path, summary in zip(names, summaries, strict=False)
            for problem in summary.problems
            if "Error: " in problem
        ]
        assert not unexpected

        # the table of a sweep
        planned = [PlannedRun(path.name, "a.toml", 1e-3, 0) for path in paths]
        sweep = Sweep(planned, {"a.toml": "0" * 8})
        rows = sweep_rows(sweep, folder, NOW)
        show_table(rows, held_out_verdicts(sweep, rows))
        assert rows[-1].loss == 3.0
        assert rows[-1].held_out_loss == 5.0

        # plot and report
        kept, errors = read_runs(paths)
        assert kept[-1].label == "good"
        assert len(kept) + len(errors) == len(paths)
        assert {error.code for error in errors} <= {"file.unreadable", "run.not_a_run"}
        write_page(tmp_path / "plot.html", page_content(kept))
        written = report_content(kept, comparison_content(kept))
        write_report(tmp_path, "index.html", written, labels_of(written))

    @pytest.mark.parametrize("runs", OF_ONE, indirect=True)
    def test_of_one_run(self, runs, tmp_path, monkeypatch):
        monkeypatch.setattr(picture, "DPI", 10)
        folder, names = runs
        good = RunRecord(folder / "good")

        num_refused = 0
        failed = []
        for path, name in names.items():
            for view in VIEWS:
                try:
                    view(path, good, tmp_path)
                except (UserError, SystemExit):
                    num_refused += 1
                except Exception as error:
                    failed.append((view.__name__, name, repr(error)))

        assert not failed
        assert num_refused < len(names), "most odd values are no reason to show nothing"


BOARD_FIELDS = [
    ("config.json", ("identity", "training.seq_len")),
    ("config.json", ("identity", "training.steps")),
    ("config.json", ("identity", "data.task.name")),
    ("config.json", ("identity", "data.task.n")),
    ("config.json", ("identity", "optimizer.lr")),
    ("config.json", ("identity", "model.dim")),
    ("config.json", ()),
    ("config.json", ("identity",)),
    ("config.json", ("config",)),
    ("config.json", ("config", "model")),
    ("log.jsonl", ("loss",)),
    ("log.jsonl", ("scores",)),
    ("log.jsonl", ("step",)),
    ("log.jsonl", ("event",)),
    ("log.jsonl", ("time",)),
    ("log.jsonl", ("scores", "exact")),
]


@pytest.mark.parametrize("odd", [pytest.param(name, id=name) for name in (*QUICK, "list")])
def test_a_board_shows_its_other_runs(odd, tmp_path, capsys):
    board = plant_board(tmp_path, lambda run: {500: 0.5 + 0.1 * run.seed})
    planned = read_sweep(tmp_path).runs
    assert len(planned) > len(BOARD_FIELDS), "some are whole"
    for (name, path), run in zip(BOARD_FIELDS, planned, strict=False):
        file = tmp_path / run.name / name
        text = file.read_text()
        *before, last = text.splitlines() if name == "log.jsonl" else [text]
        changed = json.dumps(replaced(json.loads(last), path, ODD[odd]))
        file.write_text("".join(f"{line}\n" for line in (*before, changed)))

    for words in (["status", "--json"], ["status"], ["report"]):
        playground([words[0], str(board), "--out", str(tmp_path), *words[1:]])
        assert planned[-1].name in capsys.readouterr().out or words == ["report"]

    report = json.loads((tmp_path / "report.json").read_text())
    states = {run["name"]: run["state"] for run in report["runs"]}
    assert states[planned[-1].name] == "done"
    assert "damaged" in states.values()
