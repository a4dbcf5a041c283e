"""`canon bench`: its rows, and what it refuses."""

import json

import pytest
import torch

from canon_pretrain import bench
from canon_pretrain.machine import timing
from canon_pretrain.model.args import FLAVORS
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.titan import console
from tests.hf_exports import export_model
from tests.support import canon_stage, command_error

SMALL = "--flavor debug --sets AC"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command in this process, with two short pairs and without compilation."""
    file = tmp_path / "rows.json"
    monkeypatch.setattr(console, "init_logging", lambda rank: None)  # pytest has its own
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(bench, "NUM_PAIRS", 2)
    monkeypatch.setattr(bench, "BLOCK_S", 0.0)

    def run(words, *paths):
        canon_stage("bench")([*words.split(), *map(str, paths), "--json", str(file)])
        return json.loads(file.read_text())

    return run


def test_step_compares_sets_with_no_canon(run):
    base, row = run(f"step {SMALL} --tokens 16 --micro-batch 2 --position rope")

    assert (base["name"], row["name"]) == ("no Canon", "Canon-AC")
    assert base["timing"]["ratio"] is None

    timing = row["timing"]
    assert 0 < timing["ratio"]["low"] <= timing["ratio"]["median"] <= timing["ratio"]["high"]
    assert row["tokens_per_second"] == pytest.approx(2 * 16 / timing["seconds"])
    assert timing["peak_bytes"] is None  # no GPU


def test_generate_compares_sets_by_batch(run):
    rows = run(f"generate {SMALL} --batches 1 2 --prompt-tokens 4 --new-tokens 3")

    names = [(row["name"], row["batch"]) for row in rows]
    assert names == [("no Canon", 1), ("Canon-AC", 1), ("no Canon", 2), ("Canon-AC", 2)]
    assert rows[3]["tokens_per_second"] == pytest.approx(2 * 3 / rows[3]["timing"]["seconds"])


def test_generate_compares_an_export_with_transformers(run, tmp_path):
    torch.manual_seed(0)
    model = Transformer(FLAVORS["debug"])
    model.init_weights()
    export = export_model(tmp_path, model)

    rows = run("generate --batches 2 --prompt-tokens 4 --new-tokens 3", export)

    assert [row["name"] for row in rows] == ["canon_pretrain", "transformers"]
    assert [row["equal_answers"] for row in rows] == [1.0, None]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("step --flavor 1b4", "model.unknown_flavor"),
        ("step --sets AE", "model.canon_set"),
        ("step --json /nowhere/x", "bench.no_folder"),
        ("generate --flavor 1b4", "model.unknown_flavor"),
        ("generate --sets AC AE", "model.canon_set"),
        ("generate --json /nowhere/x", "bench.no_folder"),
        ("generate /nowhere --sets AC", "cli.usage"),
        ("generate /nowhere", "file.unreadable"),
    ],
)
def test_bad_arguments_are_refused(words, code, monkeypatch, capsys):
    monkeypatch.setattr(console, "init_logging", lambda rank: None)
    assert command_error(capsys, canon_stage("bench"), words.split()) == code


def test_too_little_gpu_memory_is_an_error(run, monkeypatch, capsys):
    def build(*model):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(timing, "_build", build)
    assert command_error(capsys, run, f"step {SMALL}") == "bench.out_of_memory"


def test_ratios_are_those_of_pairs(monkeypatch):
    pairs = [(base, 1.1 * base) for base in (1.0, 2.0, 4.0, 8.0, 16.0)]  # the machine slows down
    monkeypatch.setattr(timing, "alternate", lambda *timers: pairs)

    def build():
        return lambda: None

    timings = timing.compare({"a": build, "b": build}, num_pairs=5, block_s=0)

    assert (timings["a"].seconds, timings["a"].ratio) == (4.0, None)
    assert timings["b"].seconds == pytest.approx(4.4)
    assert [*vars(timings["b"].ratio).values()] == pytest.approx([1.1] * 3)


def test_at_most_two_candidates_are_in_memory():
    alive: set[str] = set()
    alive_after_builds: list[set[str]] = []

    class Candidate:
        def __init__(self, name):
            alive.add(name)
            self.name = name
            alive_after_builds.append({*alive})

        def __call__(self):
            pass

        def __del__(self):
            alive.discard(self.name)

    builders = {name: (lambda name=name: Candidate(name)) for name in "abc"}
    timing.compare(builders, num_pairs=2, block_s=0)

    assert alive_after_builds == [{"a"}, {"a", "b"}, {"a", "c"}]
