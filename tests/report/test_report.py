"""The report says what lies in the run folders: planted numbers come back in all three formats."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from canon_pretrain.checkpoint.manifest import Manifest
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import write_json
from canon_pretrain.model.args import ModelArgs, num_parameters
from canon_pretrain.report.eval_report import escape_markdown, report
from canon_pretrain.report.evaluations import read_runs
from canon_pretrain.run.folder import RunFolder, unique_labels
from canon_pretrain.run.results import Score, read_results
from canon_pretrain.run.status import StatusWriter
from eval.__main__ import main
from eval.run import print_results
from tests.checkpoint_folders import make_step
from tests.report_pages import Page, content, markdown
from tests.report_runs import (
    FINGERPRINT,
    IDENTITY,
    TOKENS_A_STEP,
    launch,
    plant_items,
    plant_results,
    plant_run,
    step,
)

EVENTS = [
    launch("start"),
    step(10, 7.25, 2.5, 1000.0),
    step(20, 6.125, 1.5, 3000.0),
    launch("resume", 4, from_step=20),
    step(30, 5.0625, 0.75, 2000.0),
    {"event": "done", "step": 30, "time": "2026-11-20T10:09:00.000+00:00"},
]
SCORES = {"lambada": {"acc": Score(0.482, 0.0158), "perplexity": Score(1234.5678, 60.25)}}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """One finished run with a restart and one suite."""
    planted = plant_run(tmp_path / "canon", EVENTS, done=True)
    plant_results(planted, 30, "paper", SCORES)
    return planted


def test_one_run_says_its_numbers_in_all_three_formats(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    page = report([run.path], None)
    assert page == run.path / "report" / "index.html"
    loss, norm, speed = content(page)["curves"]
    points = loss["lines"][0]
    assert points["steps"] == [10, 20, 30]
    assert points["tokens"] == [10 * TOKENS_A_STEP, 20 * TOKENS_A_STEP, 30 * TOKENS_A_STEP]
    assert points["values"] == [7.25, 6.125, 5.0625]
    assert norm["lines"][0]["values"] == [2.5, 1.5, 0.75]
    assert speed["lines"][0]["figures"]["median"] == 2000.0
    assert loss["lines"][0]["figures"]["highest"] == {"value": 7.25, "step": 10}

    (suite,) = content(page)["suites"]
    assert suite["columns"] == [{"run": "canon", "step": 30, "limit": None}]
    cell = {"value": 0.482, "stderr": 0.0158, "bound": None, "num_samples": 1000}
    assert suite["rows"][0] == {"task": "lambada", "metric": "acc", "cells": [cell]}

    parsed = Page(page)
    assert ["lambada acc", "0.4820 ± 0.0158 n = 1,000"] in parsed.rows
    assert ["lambada perplexity", "1,234.57 ± 60.25 n = 1,000"] in parsed.rows
    assert ["canon", "5.0625 step 30", "5.0625 step 30", "7.2500 step 10", "6.1250"] in parsed.rows
    assert "| lambada acc | 0.4820 ± 0.0158 (n = 1,000) |" in markdown(page)
    figures = "5.0625 (step 30) | 5.0625 (step 30) | 7.2500 (step 10) | 6.1250"
    assert f"| canon | {figures} |" in markdown(page)
    model = {k.removeprefix("model."): v for k, v in IDENTITY.items() if k.startswith("model.")}
    parameters = num_parameters(ModelArgs(**model))
    for words in (
        "done, step 30 of 500",
        f"{30 * TOKENS_A_STEP:,}",
        f"{parameters:,}",
        "quickstart: 3 layers, 128 wide, 4 heads",
        "position nope, Canon-ABCD",
        "8 × 256 tokens a step",
        FINGERPRINT[:12],
        "data 3, init 7",
        "2, then 4",
        "torch 2.13.0+cpu, torchtitan 0.2.2",
        "2026-11-20 10:09 UTC",
        "canon: resumed from step 20 on 4 devices, 2026-11-20 10:05 UTC",
    ):
        assert words in parsed.text
        assert words in markdown(page)
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == f"report: {page}"
    assert "0.4820 ± 0.0158" in printed


def test_markdown_tables_are_whole(run: RunFolder) -> None:
    """Every row of a table has as many cells as its head, and a blank line stands around it."""
    other = plant_run(run.path.parent / "rope", EVENTS, model__position="rope")
    plant_results(run, 20, "paper", SCORES)
    lines = markdown(report([run.path, other.path], run.path.parent / "out")).splitlines()
    cells = [len(re.findall(r"(?<!\\)\|", text)) if text.startswith("|") else 0 for text in lines]
    for k, (before, count) in enumerate(zip(cells, cells[1:], strict=False), start=1):
        assert count == before or 0 in (before, count), lines[k]
        if before == 0 and count:
            assert lines[k - 1] == "" and lines[k + 1].startswith("|---"), lines[k]
        if before and not count:
            assert lines[k] == "", lines[k]
    assert "| model.position | nope | rope |" in lines


@pytest.mark.parametrize(
    ("events", "words"),
    [
        (EVENTS[:3], "not done, at step 20 of 500"),
        (EVENTS[:4], "not done, at step 20 of 500"),
        ([*EVENTS[:3], {"event": "stop", "step": 25}], "stopped on request at step 25 of 500"),
        ([launch("start")], "not done, at step 0 of 500"),
        ([], "not done, at step 0 of 500"),
    ],
)
def test_state_of_an_unfinished_run(
    tmp_path: Path, events: list[dict[str, Any]], words: str
) -> None:
    page = report([plant_run(tmp_path / "run", events).path], None)
    assert words in Page(page).text and words in markdown(page)


def test_scores_of_0_and_1_show_wilsons_interval(run: RunFolder) -> None:
    """Issue 17, item 3: a score of 0 is not shown as surely 0."""
    plant_results(run, 30, "probes", {"a": {"acc": Score(0.0, bound=0.0038)}})
    plant_results(run, 30, "more", {"b": {"acc": Score(1.0, bound=0.9962)}}, items=9)
    page = report([run.path], None)
    assert ["b acc", "1.0000 ≥ 0.9962 n = 9"] in Page(page).rows
    assert "| a acc | 0.0000 ≤ 0.0038 (n = 1,000) |" in markdown(page)


def test_a_failed_run_is_called_failed_first(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 17, item 3: status.json says failed, although the last logged loss looks healthy."""
    failed = plant_run(tmp_path / "failed", [launch("start"), step(10, 2.0)])
    StatusWriter(failed.status_file, steps=500, world_size=1).end(
        "failed", "loss is not finite", 17
    )
    for paths in ([failed.path], [run.path, failed.path]):
        page = report(paths, tmp_path / "out")
        assert (
            content(page)["runs"][-1] | {"state": "failed", "step": 17}
            == (content(page)["runs"][-1])
        )
        words = "failed failed at step 17 of 500: loss is not finite"
        assert words in capsys.readouterr().out.splitlines()[0]
        text, lines = Page(page).text, markdown(page).splitlines()
        assert text.index(words) < text.index("Runs" if len(paths) > 1 else "planted")
        assert words in lines[2]
    # launched again, it is no longer failed
    StatusWriter(failed.status_file, steps=500, world_size=1).write()
    assert content(report([failed.path], tmp_path / "out"))["runs"][0]["state"] == "unfinished"


@pytest.mark.parametrize("count", [1, 6])
def test_names_are_whole_in_a_terminal_of_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Issue 17, item 3: `eval report`, `eval compare` and `eval run` break no name."""
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"nope_canon_abcd_1b3_seed_{k}" for k in range(count)]
    tasks = ["babilong_qa1_4k", "arc_challenge"]
    for k, name in enumerate(names):
        run = plant_run(tmp_path / name, EVENTS, model__init_seed=k, model__dim=128 + 64 * k)
        values = {task: {"acc_norm": [1.0, 0.0] * 20} for task in tasks}
        path = plant_items(run, 30 - 10 * (k == 5), "discriminative", values, tasks={})
    report([tmp_path / name for name in names], tmp_path / "out")
    printed = capsys.readouterr().out
    table = printed.partition("report: ")[0]
    assert all(len(line) <= 80 or "against" in line for line in table.splitlines())
    assert all(name in table for name in names)
    assert all(f"{task} acc_norm" in table for task in tasks) == (count == 1)
    print_results(Console(), "checkpoint", read_results(path))
    if count > 1:
        main(["compare", *(str(tmp_path / name) for name in names[:2])])
    printed = capsys.readouterr().out
    assert all(re.search(rf"{task}.*acc_norm", printed) for task in tasks)


def test_several_runs_stand_side_by_side(run: RunFolder, tmp_path: Path) -> None:
    other = plant_run(tmp_path / "rope", EVENTS[:3], model__position="rope", model__canon_set="")
    plant_results(other, 20, "paper", {"lambada": {"acc": Score(0.5, 0.02)}}, limit=100, items=100)
    third = plant_run(tmp_path / "bare", EVENTS[:2])
    page = report([run.path, other.path, third.path], tmp_path / "out")
    assert page == tmp_path / "out" / "index.html"
    assert [item["run"] for item in content(page)["curves"][0]["lines"]] == [
        "canon",
        "rope",
        "bare",
    ]
    (suite,) = content(page)["suites"]
    assert suite["columns"] == [
        {"run": "canon", "step": 30, "limit": None},
        {"run": "rope", "step": 20, "limit": 100},
    ]
    assert suite["rows"][1]["cells"][1] is None  # rope has no perplexity
    mark = "first 100 items only: not a result"
    parsed = Page(page)
    assert f"rope step 20, {mark}" in [text for row in parsed.rows for text in row]
    assert ["model.position", "nope", "rope", "nope"] in parsed.rows
    assert f"rope, step 20, {mark}" in markdown(page)
    assert "| lambada perplexity | 1,234.57 ± 60.25 (n = 1,000) | – |" in markdown(page)
    for text in (parsed.text, markdown(page)):
        assert "bare: no evaluation results yet" in text
        assert "The columns are at different steps." in text
        assert "trained on different data" not in text


def test_every_step_is_listed_where_there_are_several(run: RunFolder) -> None:
    plant_results(run, 20, "paper", {"lambada": {"acc": Score(0.25, 0.01)}})
    page = report([run.path], None)
    (suite,) = content(page)["suites"]
    assert [column["step"] for column in suite["columns"]] == [30]
    listed = [(row["metric"], row["step"], row["value"]) for row in suite["every_step"]]
    assert listed == [("acc", 20, 0.25), ("acc", 30, 0.482), ("perplexity", 30, 1234.5678)]
    assert "| lambada acc | canon | 20 | 0.2500 ± 0.0100 (n = 1,000) |" in markdown(page)
    assert ["lambada acc", "canon", "20", "0.2500 ± 0.0100 n = 1,000"] in Page(page).rows


def test_a_trial_never_stands_before_a_whole_result(run: RunFolder) -> None:
    whole = {"task": {"acc": Score(0.25)}}
    plant_results(run, 30, "mine", whole)
    plant_results(run, 30, "mine", {"task": {"acc": Score(0.75)}}, limit=5)
    content = json.loads((report([run.path], None).parent / "report.json").read_text())
    (suite,) = [s for s in content["suites"] if s["suite"] == "mine"]
    assert suite["columns"] == [{"run": run.path.name, "step": 30, "limit": None}]
    assert suite["rows"][0]["cells"][0]["value"] == 0.25
    assert sorted(row["value"] for row in suite["every_step"]) == [0.25, 0.75]


def test_a_checkpoint_of_other_content_is_said_in_words(run: RunFolder) -> None:
    """Issue 17, items 10 and 22: a checkpoint is known by its content; of several results of one
    step those of the checkpoint that is there are shown."""
    checkpoint = make_step(run.path / "checkpoint", 30)
    content = Manifest.read(checkpoint).content
    plant_results(run, 30, "mine", {"task": {"acc": Score(0.25)}}, content=content)
    again = "no longer what was evaluated"
    assert again not in (report([run.path], None).parent / "report.md").read_text()
    plant_results(run, 30, "mine", {"task": {"acc": Score(0.5)}}, content="of another")
    text = (report([run.path], None).parent / "report.md").read_text()
    assert again not in text and "0.2500" in text
    shutil.rmtree(checkpoint)
    make_step(run.path / "checkpoint", 30, num_bytes=99)
    assert again in (report([run.path], None).parent / "report.md").read_text()


def test_different_data_and_different_questions_are_said_in_words(tmp_path: Path) -> None:
    runs = []
    for name, data in (("a", "a" * 64), ("b", "b" * 64)):
        runs.append(plant_run(tmp_path / name, EVENTS, data_fingerprint=data))
        plant_results(runs[-1], 30, "validation", SCORES, held_out_fingerprint=name * 64)
    page = report([planted.path for planted in runs], tmp_path / "out")
    for text in (Page(page).text, markdown(page)):
        assert f"trained on different data (a: {'a' * 12}; b: {'b' * 12})" in text
        assert "held_out_fingerprint" in text and f"a: {'a' * 24}…; b: {'b' * 24}…" in text


def test_a_difference_deep_in_the_question_is_named_and_many_are_counted(tmp_path: Path) -> None:
    runs = []
    for k, name in enumerate("ab"):
        runs.append(plant_run(tmp_path / name, EVENTS))
        tasks = {f"t{i}": {"version": 1 + k * (i >= 2), "prompt": "same"} for i in range(9)}
        plant_results(runs[-1], 30, "paper", SCORES, tasks=tasks if k else tasks | {"old": 1})
    page = report([planted.path for planted in runs], tmp_path / "out")
    (suite,) = content(page)["suites"]
    assert suite["warnings"][0] == "Not the same question: `tasks.t2.version` differs (a: 1; b: 2)."
    assert suite["warnings"][5:] == ["3 more parts of the question differ."]


def test_runs_without_evaluations_or_steps_have_a_report(tmp_path: Path) -> None:
    page = report([plant_run(tmp_path / "run", [launch("start")]).path], None)
    for text in (Page(page).text, markdown(page)):
        assert "run: no evaluation results yet" in text
        assert "run: no step logged yet" in text
    assert content(page)["suites"] == []


def test_values_that_are_not_finite_are_gaps_and_counted(tmp_path: Path) -> None:
    events = [step(1, 5.0), step(2, "NaN", "Infinity"), step(3, 4.0), step(4, "NaN")]
    planted = plant_run(tmp_path / "run", events)
    plant_results(planted, 4, "paper", {"wikitext": {"ppl": Score(math.inf)}})
    page = report([planted.path], None)
    loss, norm, _ = content(page)["curves"]
    assert loss["lines"][0]["values"] == [5.0, None, 4.0, None]
    assert norm["lines"][0]["values"] == [1.0, None, 1.0, 1.0]
    assert loss["lines"][0]["figures"]["last"] == {"value": 4.0, "step": 3}
    for text in (Page(page).text, markdown(page)):
        assert "2 of 4 logged values are missing or not finite (the first at step 2)" in text
        assert "1 of 4 logged values are missing or not finite (the first at step 2)" in text
        assert "not finite (Infinity)" in text


def test_a_long_log_is_thinned_and_says_so(tmp_path: Path) -> None:
    events = [step(k, 3.0 + (k * 37 % 101) / 1000) for k in range(1, 9001)]
    events[4567]["loss"] = 99.0
    page = report([plant_run(tmp_path / "run", events).path], None)
    points = content(page)["curves"][0]["lines"][0]
    assert points["logged"] == 9000 and len(points["values"]) <= 4000
    assert points["values"][points["steps"].index(4568)] == 99.0
    words = f"run: {len(points['values']):,} of 9,000 logged points are drawn"
    assert words in Page(page).text and words in markdown(page)


def test_equal_inputs_give_equal_bytes(run: RunFolder, tmp_path: Path) -> None:
    folders = [report([run.path], tmp_path / name).parent for name in ("one", "two")]
    names = ["index.html", "report.json", "report.md"]
    assert sorted(path.name for path in folders[0].iterdir()) == names
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_the_page_holds_all_it_needs_and_plotly_once(run: RunFolder) -> None:
    page = report([run.path], None)
    text = page.read_text()
    assert len(re.findall(r"\* plotly\.js v", text)) == 1
    assert len(text) < 6_000_000
    tags = Page(page).tags
    assert [attributes.get("src") for tag, attributes in tags if tag == "script"] == [None] * 5
    assert [attributes["href"] for tag, attributes in tags if tag == "link"] == ["data:,"]


EVIL = "</script><script>alert(1)</script>"
EVIL_NAME = '"><img src=x onerror=alert(1)>'


def test_text_from_files_is_never_markup(tmp_path: Path) -> None:
    # two runs of one name get their parents' too, and so a label can hold "</script>"
    paths = [tmp_path / top / "<" / "script><script>alert(1)<" / "script>" for top in "ab"]
    paths.append(tmp_path / EVIL_NAME)
    task = f"{EVIL_NAME}|{EVIL.replace('/', '_')}"
    tasks = {task: {"version": 1, "primary": ["<i>acc"], "chance": 0.5}}
    for k, path in enumerate(paths):
        words = f"{EVIL} | `x` **y**\n# z"
        planted = plant_run(path, EVENTS, description=words, model__position=EVIL * (k + 1))
        for at in (20, 30):
            values = {task: {"<i>acc": [float(i % 10 < 2 + 3 * k) for i in range(100)]}}
            plant_items(planted, at, "<b>suite", values, tasks=tasks, prompt=EVIL)
    page = report(paths, tmp_path / "out")
    parsed = Page(page)
    names = [tag for tag, _ in parsed.tags]
    assert content(page)["verdicts"]["architectures"]
    assert names.count("script") == 5 and not {"img", "b", "i"} & set(names)
    assert not any(name.startswith("on") for _, attributes in parsed.tags for name in attributes)
    assert EVIL in parsed.text and EVIL_NAME in parsed.text  # shown as what they are
    labels = [facts["label"] for facts in content(page)["runs"]]
    assert labels[0].endswith(EVIL) and labels[2] == EVIL_NAME
    text = markdown(page)
    assert "<script" not in text and "<img" not in text and "\n# z" not in text
    assert "\\| \\`x\\` \\*\\*y\\*\\*" in text


def test_markdown_escapes_what_begins_markup() -> None:
    assert escape_markdown("a|b\n`c` <d> [e](f) *g*") == (
        "a\\|b \\`c\\` &lt;d&gt; \\[e\\](f) \\*g\\*"
    )


def test_labels_tell_folders_of_one_name_apart(tmp_path: Path) -> None:
    paths = [tmp_path / part for part in ("x/run", "y/run", "z/y/run", "other")]
    labels = unique_labels(paths)
    assert labels == ["x/run", f"{tmp_path.name}/y/run", "z/y/run", "other"]
    assert unique_labels([tmp_path / "a\x1b[31m\n"]) == [
        "a\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}"
    ]


def refused(paths: list[Path], out: Path | None = None) -> str:
    """The one line that `report` refuses with."""
    with pytest.raises(UserError) as error:
        report(paths, out)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_refuses_what_is_no_run_or_damaged(run: RunFolder, tmp_path: Path) -> None:
    assert f"{tmp_path / 'nothing'} is not a run folder" in refused([tmp_path / "nothing"])
    assert "no run given" in refused([])
    assert "is given twice" in refused([run.path, run.path / ".." / run.path.name])
    (results,) = run.path.glob("evals/*/*/*/results.json")
    stored = results.read_text()
    for broken in (stored.replace('"limit"', '"x"'), stored.replace("0.482", '"0.482"'), "{"):
        results.write_text(broken)
        assert f"{results} is damaged" in refused([run.path])
    results.write_text(stored.replace('"version": 1', '"version": 2'))
    assert "version 2" in refused([run.path])
    results.unlink()
    run.log_file.write_text('{"event": "step", "step": 1}\n')
    assert f"{run.log_file} is damaged" in refused([run.path])
    run.log_file.unlink()
    assert f"{run.log_file} is missing" in refused([run.path])
    run.config_file.write_text("[]")
    assert f"{run.config_file} is damaged" in refused([run.path])


@pytest.mark.parametrize(
    "line",
    [
        b'{"event": "step"}',
        b'{"event": "step", "step": "x", "tokens": 1}',
        b'{"event": "step", "step": 1, "tokens": 1, "loss": null}',
        b'{"event": "step", "step": 1, "tokens": 1, "loss": 1%s}' % (b"0" * 400),
        b'{"event": "step", "step": 1%s, "tokens": 1}' % (b"0" * 30),
        b'{"event": "validation", "step": 1, "sources": [1]}',
        b'{"event": "resume"}',
        b"[" * 100_000,
        b"\xff\xfe{}",
        b"[]",
        b"3",
    ],
)
def test_skips_and_counts_a_line_that_is_no_event(
    run: RunFolder, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Issue 17, item 25: what is no event costs itself alone, and is said once."""
    before = read_runs([run.path])[0].events
    run.log_file.write_bytes(line + b"\n" + run.log_file.read_bytes())
    assert read_runs([run.path])[0].events == before
    assert "1 line(s)" in caplog.text and len(caplog.records) == 1


def test_results_are_known_by_the_runs_id(run: RunFolder, tmp_path: Path) -> None:
    """Issue 17, items 10 and 22: the path is not looked at; another run's results are left out."""
    write_json(run.run_file, {"run_id": "0123abcd", "created": "", "launches": 1})
    scores = {"lambada": {"acc": Score(0.75, 0.01)}}
    elsewhere = tmp_path / "elsewhere" / "checkpoint" / "step-30"
    elsewhere.mkdir(parents=True)
    plant_results(run, 30, "mine", scores, checkpoint=str(elsewhere), run_id="0123abcd")
    other = plant_results(run, 30, "theirs", scores, run_id="ffffffff")
    data = plant_results(run, 30, "theirs", scores, train_fingerprint="f" * 64)
    found = content(report([run.path], None))
    assert {suite["suite"] for suite in found["suites"]} == {"paper", "mine"}
    (first, second) = sorted(found["warnings"], key=lambda words: str(other) not in words)
    assert str(other) in first and "ffffffff" in first and "0123abcd" in first
    assert str(data) in second and "f" * 64 in second and FINGERPRINT in second


@pytest.mark.parametrize("asked", [{"step": 20}, {"suite": "other"}])
def test_what_was_asked_counts_not_the_folders_name(run: RunFolder, asked: dict[str, Any]) -> None:
    path = plant_results(run, 30, "mine", SCORES)
    stored = json.loads(path.read_text())
    stored["asked"] |= asked
    path.write_text(json.dumps(stored))
    found = read_runs([run.path])[0].evaluations
    expected = {"suite": "mine", "step": 30} | asked
    assert sum(expected.items() <= results.asked.items() for results in found) == 1


def test_refuses_an_out_that_is_a_file(run: RunFolder, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert f"{file} can't be the report's folder" in refused([run.path], file)
    assert f"{file / 'below'} can't be" in refused([run.path], file / "below")


def test_reaches_no_torch() -> None:
    made = "canon_pretrain.report.eval_report"
    code = f"import sys, {made}; assert not {{'torch', 'torchtitan'}} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
