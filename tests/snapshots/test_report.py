"""What `run status`, `run diff` and `eval compare` print."""

import json
import re
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from canon_pretrain.core.terminal import Console
from canon_pretrain.explain import PartRow, StepContent, print_step
from canon_pretrain.report.status import overview, summarize_run
from eval.__main__ import main as eval_main
from tests.board_runs import BOARD, curve, plant_board
from tests.checkpoint_folders import make_step
from tests.report.test_card import OPTIONS, PATTERN, architecture_rows
from tests.report_runs import (
    ACC,
    NOW,
    evaluated,
    launch,
    plant_answers,
    plant_run,
    planted_run,
    records,
    right_or_wrong,
    run_command,
    step,
    training_run,
)
from tests.support import canon_stage

playground = canon_stage("playground")


@pytest.mark.parametrize("width", [80, 200])
def test_run_status(tmp_path, monkeypatch, snapshot, width):
    monkeypatch.chdir(tmp_path)
    training = training_run(tmp_path / "training", job_id="812", nodes="n[1-2]", restart_count=2)
    make_step(training.path / "checkpoint", 10)
    training_run(tmp_path / "dead", age_s=61, checkpoint_failures=1)
    training_run(tmp_path / "failed", state="failed", reason="OutOfMemoryError: x")
    damaged = training_run(tmp_path / "damaged", state="stopped", reason="SIGTERM")
    damaged.run_file.write_text("{}")
    plant_run(tmp_path / "done", [launch("start"), step(1, 6.0)], done=True)

    runs = [summarize_run(path, NOW) for path in sorted(Path().iterdir())]
    output = StringIO()
    console = Console(file=output, width=width)
    console.print(overview(runs, console))
    assert re.sub(r"[\d-]{10} [\d:]{8} UTC", "TIME", output.getvalue()) == snapshot


def test_run_diff(tmp_path, capsys, snapshot):
    for name, rate, second_digest in (("a", 0.004, "1" * 16), ("b", 0.002, "2" * 16)):
        events = [
            launch("start"),
            step(1, 7.0) | {"data_digests": ["0" * 16]},
            step(2, 6.0 + rate) | {"data_digests": [second_digest]},
        ]
        plant_run(tmp_path / name, events, optimizer__lr=rate, description=name)

    assert run_command("diff", tmp_path / "a", tmp_path / "b") == 1
    assert capsys.readouterr().out.replace(str(tmp_path), "RUNS") == snapshot


def test_eval_compare(tmp_path, capsys, monkeypatch, snapshot):
    monkeypatch.setenv("COLUMNS", "140")
    rng = np.random.default_rng(1)
    for name, canon, loss, share in (("a", "", 5.0, 0.55), ("b", "A", 4.9, 0.85)):
        for seed in range(2):
            evaluated(tmp_path / f"{name}{seed}", canon, loss + 0.002 * seed, seed)
            run = planted_run(tmp_path / f"{name}{seed}", seed, model__canon_set=canon)
            # the noise of an item in all runs, and of this run
            noise = np.random.default_rng(2).gamma(9, 0.1, 1000)
            bits = noise - share / 10 + rng.normal(0, 0.02, 1000)
            answers = {
                "acc": right_or_wrong(1000, share, rng),
                "gold_bits_per_byte": bits.tolist(),
            }
            plant_answers(
                run,
                20,
                "discriminative",
                {"boolq": records(answers)},
                described={"boolq": ACC | {"primary": [*answers]}},
            )

    runs_a = [str(tmp_path / f"a{seed}") for seed in range(2)]
    runs_b = [str(tmp_path / f"b{seed}") for seed in range(2)]
    eval_main(["compare", "--a", *runs_a, "--b", *runs_b])

    assert capsys.readouterr().out == snapshot


def test_eval_compare_losses(tmp_path, capsys, monkeypatch, snapshot):
    monkeypatch.setenv("COLUMNS", "140")
    rng = np.random.default_rng(4)
    for name, mean in (("a", 3.2), ("b0", 3.1), ("b1", 3.11)):
        losses = [f"{k},{loss:.4f}\n" for k, loss in enumerate(rng.normal(mean, 0.02, 30))]
        (tmp_path / f"{name}.csv").write_text("document,loss\n" + "".join(losses))

    a, *b = [str(tmp_path / f"{name}.csv") for name in ("a", "b0", "b1")]
    eval_main(["compare", "--losses", *b, "--against", a])

    assert capsys.readouterr().out == snapshot


def test_explain(capsys, monkeypatch, snapshot):
    monkeypatch.setenv("COLUMNS", "100")
    rows = []
    for document, deviations in ((17, 12.3), (4, 0.52), (9, -0.7), (3, None)):
        row = PartRow(
            sample=60 + document,
            source="web",
            fingerprint="0" * 64,
            document=document,
            document_tokens=5000,
            start=1234,
            tokens=3,
            nats_per_token=3.75 if deviations else None,
            deviations=deviations,
            gradient_share=0.25 if deviations else None,
            text="text \x1b of it",
            ids=[5, 6, 7],
            nats=[None, 3.0, 4.5],
        )
        rows.append(row)

    print_step(StepContent(1200, 1000, 4, 3.75, 3.7, 0.5, 0.51, rows), top=3)
    print_step(StepContent(1200, None, 4, None, None, None, None, rows[3:]), top=3)

    assert capsys.readouterr().out == snapshot


def test_playground_report(tmp_path, snapshot):
    with_rates = BOARD.replace("[tasks.copy]", "[tasks.copy]\nlearning_rates = [1e-3, 2e-3]")
    claim = '[[claims]]\ntask = "copy/n8"\nbetter = "rope"\nworse = "nope"\n'

    def scores(run):
        if "n16-nope" in run.name:  # it has not run
            return None
        return curve(0.05 * len(Path(run.config).stem), run.seed)

    path = plant_board(tmp_path, scores, with_rates + claim)
    playground(["report", str(path), "--out", str(tmp_path)])
    page = (tmp_path / "report.md").read_text()
    assert re.sub(r"(page written \| )[^ ]+", r"\1TIME", page) == snapshot


def test_architectures_on_a_card(tmp_path, snapshot):
    described = {}
    for i, (label, changes) in enumerate(OPTIONS):
        rows, _ = architecture_rows(tmp_path / f"{i}", **changes)
        described[json.dumps(changes)] = rows[label]
    described["pattern"], _ = architecture_rows(tmp_path / "pattern", **PATTERN)
    assert described == snapshot
