"""The report shows planted numbers in all three formats."""

import json
import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from canon_pretrain.checkpoint.manifest import Manifest
from canon_pretrain.core.files import write_json
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.counts import num_parameters
from canon_pretrain.report import figures, sections
from canon_pretrain.report.comparison import comparison_content
from canon_pretrain.report.eval_report import escape_markdown, report_content, write_report
from canon_pretrain.report.evaluations import counted_losses
from canon_pretrain.report.figures import MEAN
from canon_pretrain.report.published import published_scores
from canon_pretrain.report.record import RunRecord, read_runs
from canon_pretrain.report.verdicts import Options
from canon_pretrain.run.folder import is_run_folder, named_runs, unique_labels
from canon_pretrain.run.results import Score
from canon_pretrain.run.status import StatusWriter
from eval.__main__ import main
from tests.browser import EVIL as EVIL_PATH
from tests.checkpoint_folders import make_step
from tests.report_pages import Page, content, markdown, report
from tests.report_runs import (
    FINGERPRINT,
    IDENTITY,
    TOKENS_A_STEP,
    evaluated,
    launch,
    plant_answers,
    plant_results,
    plant_run,
    records,
    right_or_wrong,
    run_command,
    step,
)
from tests.support import error_codes

EVIL = "</script><script>alert(1)</script>"
EVENTS = [
    launch("start"),
    step(10, 7.25, 2.5, 1000.0),
    step(20, 6.125, 1.5, 3000.0),
    launch("resume", 4, from_step=20),
    step(30, 5.0625, 0.75, 2000.0),
    {"event": "done", "step": 30, "time": "2026-11-20T10:09:00.000+00:00"},
]
SCORES = {"lambada": {"acc": Score(0.482, 0.0158), "perplexity": Score(1234.5678, 60.25)}}
TASKS = {
    "piqa": {"version": 1, "primary": "acc", "chance": 0.5},
    "boolq": {"version": 1, "primary": ["acc"], "chance": 0.5},
    "lambada_openai": {"version": 1, "primary": ["acc", "perplexity"]},
}


@pytest.fixture
def run(tmp_path):
    planted = plant_run(tmp_path / "canon", EVENTS, done=True)
    plant_results(planted, 30, "paper", SCORES)
    return planted


def answers(piqa, rng):
    """Return item records of three tasks with a share `piqa` of right answers, 0.5 and 0.4."""
    first, both, boolq, lambada = (right_or_wrong(400, x, rng) for x in (piqa, piqa, 0.5, 0.4))
    likelihoods = rng.normal(-2.5, 1.0, 400).tolist()
    metrics = ({"acc": first, "acc_norm": both}, {"acc": boolq})
    metrics += ({"perplexity": likelihoods, "acc": lambada},)
    return dict(zip(TASKS, map(records, metrics), strict=True))


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """Rope and nope at two learning rates, two seeds of the better one; nope is better on piqa."""
    folder, rng, paths = tmp_path_factory.mktemp("six"), np.random.default_rng(1), []
    log = [launch("start"), *(step(k, 7 - k / 10) for k in (10, 20, 30))]
    for position, piqa in (("rope", 0.5), ("nope", 0.85)):
        for rate, seed, loss in ((2, 1, 3.5), (4, 1, 3.25), (4, 2, 3.25)):
            identity = {"model__position": position, "model__init_seed": seed}
            name = f"{position}-lr{rate}-seed{seed}"
            run = plant_run(folder / name, log, done=True, optimizer__lr=rate / 1000, **identity)
            for at, share in ((20, 0.5), (30, piqa)):
                items = answers(share, rng)
                plant_answers(run, at, "discriminative", items, described=TASKS)
            scores = {"validation": {"nats_per_token": Score(loss)}}
            plant_results(run, 30, "validation", scores, tasks={"validation": {"version": 2}})
            paths.append(run.path)
    return paths


@pytest.fixture(scope="module")
def page(six, tmp_path_factory):
    return report(six, tmp_path_factory.mktemp("out"))


def test_one_run_has_its_numbers_in_all_three_formats(run, capsys):
    page = report([run.path], None)
    assert page == run.path / "report" / "index.html"
    loss, norm, _ = content(page)["curves"]
    points = loss["lines"][0]
    assert points["steps"] == [10, 20, 30] and points["values"] == [7.25, 6.125, 5.0625]
    assert points["tokens"] == [TOKENS_A_STEP * at for at in (10, 20, 30)]
    assert norm["lines"][0]["values"] == [2.5, 1.5, 0.75]
    (suite,) = content(page)["suites"]
    assert suite["columns"] == [{"run": "canon", "step": 30, "limit": None}]
    cell = {"value": 0.482, "stderr": 0.0158, "bound": None, "num_samples": 1000}
    cell |= {"num_sources": None}
    assert suite["rows"][0]["cells"] == [cell]

    parsed, text = Page(page), markdown(page)
    for row in (
        ["lambada acc", "0.4820 ± 0.0158 n = 1,000"],
        ["lambada perplexity", "1,234.57 ± 60.25 n = 1,000"],
        ["canon", "5.0625 step 30", "5.0625 step 30", "7.2500 step 10"],
        ["data_fingerprint", FINGERPRINT[:12] + "…"],
        ["resumed at", "20"],
    ):
        assert row in parsed.rows
    assert "| lambada (acc) | 0.4820 ± 0.0158 (n = 1,000) |" in text
    assert "| training.global_batch_size | 8 |" in text
    model = {k.removeprefix("model."): v for k, v in IDENTITY.items() if k.startswith("model.")}
    parameters = f"{num_parameters(ModelArgs(**model)):,}"
    # per layer, keys and values of 256 tokens in 2 bytes, and 3 sums of Canon's in 4
    held = 3 * (256 * 2 * 128 * 2 + 4 * 3 * (5 * 128 + 2 * 344))
    for words in (
        f"{held:,}",
        parameters,
        "a planted run",
        "2, 4",
        "2.13.0+cpu",
        "2026-11-20T10:09",
    ):
        assert words in parsed.text and words in text
    assert capsys.readouterr().out.splitlines()[-1] == f"report: {page}"
    before = [path.read_bytes() for path in sorted(page.parent.iterdir())]
    report([run.path], None)
    assert [path.read_bytes() for path in sorted(page.parent.iterdir())] == before


def test_a_failed_run_is_named_first(run, tmp_path, capsys):
    failed = plant_run(tmp_path / "failed", [launch("start"), step(10, 2.0)])
    status = StatusWriter(failed.status_file, steps=500, world_size=1)
    status.end("failed", "not finite", 17)
    page = report([run.path, failed.path], tmp_path / "out")
    _, state = content(page)["runs"]
    assert (state["state"], state["step"], state["failure"]) == ("failed", 17, "not finite")
    for text in (capsys.readouterr().out.splitlines()[0], markdown(page).splitlines()[2]):
        assert text.strip("*").startswith("failed ") and "not finite" in text
    # no longer failed once launched again
    StatusWriter(failed.status_file, steps=500, world_size=1).write()
    assert content(report([failed.path], tmp_path / "out"))["runs"][0]["state"] == "unfinished"
    stopped = plant_run(tmp_path / "stopped", [*EVENTS[:3], {"event": "stop", "step": 25}])
    (state,) = content(report([stopped.path], tmp_path / "out"))["runs"]
    assert (state["state"], state["step"], state["total_steps"]) == ("stopped", 25, 500)


def test_several_runs_are_side_by_side(run, tmp_path):
    other = plant_run(tmp_path / "rope", EVENTS[:3], model__position="rope", data_fingerprint="b")
    plant_results(run, 30, "probes", {"a": {"acc": Score(0.0, bound=0.0038)}})
    plant_results(other, 20, "paper", {"lambada": {"acc": Score(0.5, 0.02)}}, limit=100, items=100)
    plant_results(other, 20, "probes", {"a": {"acc": Score(0.25)}})
    plant_results(other, 20, "probes", {"a": {"acc": Score(0.75)}}, limit=5)
    page = report([run.path, other.path], tmp_path / "out")
    suite, probes = content(page)["suites"]
    assert probes["columns"][1]["limit"] is None  # a full result is preferred to a trial
    assert probes["rows"][0]["cells"][1]["value"] == 0.25
    assert suite["columns"][1] == {"run": "rope", "step": 20, "limit": 100}
    assert suite["rows"][1]["cells"][1] is None  # rope has no perplexity
    parsed, text = Page(page), markdown(page)
    assert content(page)["comparison"]["pairs"] == []
    assert ["model.position", "nope", "rope"] in parsed.rows
    # Wilson's bound of a score of 0
    assert ["a acc, n = 1,000", "0.0000 ≤ 0.0038", "0.2500 step 20"] in parsed.rows
    assert any("rope step 20" in cell and "100" in cell for row in parsed.rows for cell in row)
    (warning,) = content(page)["warnings"]
    assert FINGERPRINT[:12] in warning and warning in parsed.text and warning in text


def test_results_belong_to_a_run_and_a_checkpoint(run):
    checkpoint = make_step(run.path / "checkpoint", 30)
    stored = Manifest.read(checkpoint).content
    plant_results(run, 30, "mine", {"task": {"acc": Score(0.25)}}, content=stored)
    plant_results(run, 30, "mine", {"task": {"acc": Score(0.5)}}, content="of another")
    page = report([run.path], None)
    assert not content(page)["suites"][0]["warnings"] and "0.2500" in markdown(page)
    shutil.rmtree(checkpoint)
    make_step(run.path / "checkpoint", 30, num_bytes=99)
    assert len(content(report([run.path], None))["suites"][0]["warnings"]) == 1
    write_json(run.run_file, {"run_id": "0123abcd", "created": "", "launches": 1})
    other = plant_results(run, 30, "theirs", SCORES, run_id="ffffffff")
    data = plant_results(run, 30, "theirs", SCORES, train_fingerprint="f" * 64)
    found = content(report([run.path], None))
    assert "theirs" not in {suite["suite"] for suite in found["suites"]}
    first, second = sorted(found["warnings"], key=lambda words: str(other) not in words)
    assert str(other) in first and "ffffffff" in first and str(data) in second


def sampled(at, *texts, **more):
    """A `samples` event, with prompts "", EVIL and so on."""
    pairs = zip(("", EVIL, "third"), texts, strict=False)
    samples = [{"prompt": prompt, "text": text, "tokens": 3} for prompt, text in pairs]
    return {"event": "samples", "step": at, "tokens": at, "samples": samples, **more}


def test_samples_are_by_prompt_and_step(tmp_path):
    """Side by side, at most 20 steps; one that a restart undid and damaged lines are not shown."""
    one = [sampled(at, f"one {at}", f"{EVIL}\n\x1b[2J{at}") for at in range(10, 260, 10)]
    first = [launch("start"), step(10, 7.0), *one[:5], launch("resume", from_step=40), *one[5:]]
    damaged = [one[0] | {"samples": 3}, one[0] | {"samples": [{"prompt": "", "text": 4}]}]
    runs = [plant_run(tmp_path / "one", [*first, *damaged])]
    gone = sampled(250, "", "", reason="not finite")
    runs.append(plant_run(tmp_path / "two", [launch("start"), sampled(240, "two", ""), gone]))
    page = report([run.path for run in runs], tmp_path / "out")
    start, evil = content(page)["samples"]
    assert (start["prompt"], start["sampled"], evil["prompt"]) == ("", 24, EVIL)
    assert [row["step"] for row in start["rows"]] == [20, 40, *range(70, 251, 20)]
    assert start["rows"][-1]["cells"] == [{"text": "one 250"}, {"text": None}]
    parsed, text = Page(page), markdown(page)
    for row in (["230", "one 230", "–"], ["250", "one 250", "not finite"]):
        assert row in parsed.rows and f"| {' | '.join(row)} |" in text
    assert ["250", f"{EVIL} \ufffd[2J250", "not finite"] in parsed.rows
    assert [tag for tag, _ in parsed.tags].count("script") == 4 and "<script" not in text


def test_values_that_are_not_finite_are_gaps_and_counted(tmp_path):
    events = [step(1, 5.0), step(2, "NaN", "Infinity"), step(3, 4.0), step(4, "NaN")]
    planted = plant_run(tmp_path / "run", events)
    plant_results(planted, 4, "paper", {"wikitext": {"ppl": Score(math.inf)}})
    page = report([planted.path], None)
    loss, norm, _ = content(page)["curves"]
    assert loss["lines"][0]["values"] == [5.0, None, 4.0, None]
    assert norm["lines"][0]["values"] == [1.0, None, 1.0, 1.0]
    for text in (Page(page).text, markdown(page)):
        assert "2 of 4" in text and "(Infinity)" in text


def test_text_from_files_is_never_markup(tmp_path):
    # runs of the same name are labeled with their parents, so a label can contain "</script>"
    paths = [tmp_path / top / "<" / "script><script>alert(1)<" / "script>" for top in "ab"]
    paths.append(tmp_path / EVIL_PATH)
    task = f"{EVIL_PATH}|{EVIL.replace('/', '_')}"
    tasks = {task: {"version": 1, "primary": ["<i>acc"], "chance": 0.5}}
    for k, path in enumerate(paths):
        words = f"{EVIL} | `x` **y**\n# z"
        planted = plant_run(path, EVENTS, description=words, model__position=EVIL * (k + 1))
        for at in (20, 30):
            items = records({"<i>acc": [float(i % 10 < 2 + 3 * k) for i in range(100)]})
            plant_answers(planted, at, "<b>suite", {task: items}, described=tasks, prompt=EVIL)
    page = report(paths, tmp_path / "out")
    parsed = Page(page)
    names = [tag for tag, _ in parsed.tags]
    attributes = {name for _, has in parsed.tags for name in has}
    [library] = page.parent.glob("plotly-*.min.js")
    assert [has["src"] for _, has in parsed.tags if "src" in has] == [library.name]
    assert content(page)["comparison"]["pairs"]
    assert names.count("script") == 4 and not {"img", "b", "i"} & set(names)
    assert not any(name.startswith("on") for name in attributes)
    assert EVIL in parsed.text and EVIL_PATH in parsed.text  # as text
    text = markdown(page)
    assert "<script" not in text and "<img" not in text and "\n# z" not in text
    assert escape_markdown("a|b\n`c`<d>[e]*g*") == r"a\|b \`c\`&lt;d&gt;\[e\]\*g\*"


def test_labels_of_runs_are_unique(tmp_path):
    paths = [tmp_path / part for part in ("x/run", "y/run", "z/y/run", "other")]
    assert unique_labels(paths) == ["x/run", f"{tmp_path.name}/y/run", "z/y/run", "other"]
    assert unique_labels([tmp_path / "a\x1b[31m\n"]) == ["a\ufffd[31m\ufffd"]


def test_missing_and_damaged_files_are_errors(run, tmp_path, capsys):
    def fails(culprit, *arguments):
        with pytest.raises(SystemExit, match="2"):
            main(["report", *map(str, arguments or [run.path])])
        return str(culprit) in capsys.readouterr().err

    (tmp_path / "file").touch()
    assert fails(tmp_path / "nothing", tmp_path / "nothing")
    assert fails(tmp_path / "file", run.path, "--out", tmp_path / "file")
    assert fails("'alibi'", run.path, "--baseline", "alibi")
    (results,) = run.path.glob("evals/*/*/*/results.json")
    stored = results.read_text()
    newer = stored.replace('"version": 1', '"version": 2')
    for broken in (stored.replace('"limit"', '"x"'), stored.replace("0.482", '"x"'), newer, "{"):
        results.write_text(broken)
        assert fails(results)
    results.unlink()
    run.log_file.write_text('{"event": "step", "step": 1}\n')
    assert fails(run.log_file)
    run.log_file.unlink()
    assert fails(run.log_file)
    run.config_file.write_text("[]")
    assert fails(run.config_file)


def test_bad_lines_of_a_log_are_reported_once(run, caplog):
    before = read_runs([run.path])[0][0].events
    for line in (b'{"event": "step"}', b"[" * 100_000, b"\xff\xfe{}"):
        run.log_file.write_bytes(line + b"\n" + run.log_file.read_bytes())
    assert read_runs([run.path])[0][0].events == before
    assert len(caplog.records) == 1


def test_the_planted_difference_is_better(six, page):
    compared = comparison_content(read_runs(six)[0])
    (tally,) = sections.verdicts_by_architecture(compared).values()
    mean, pair = tally["better"]
    assert (len(mean.mean_of), pair.task, tally["worse"]) == (3, "piqa", [])
    assert pair.difference == pytest.approx(0.35)
    shown = ["better", sections.signed(pair.difference), sections.interval(pair.ci)]
    shown += [sections.p_value(pair.p_holm)]
    shown += [sections.rounded(value) for value in (pair.value, pair.baseline_value)]
    parsed, text = Page(page), markdown(page)
    row = ["piqa acc", "nope", *shown]
    assert row in [found[:8] for found in parsed.rows]
    assert " | ".join(["| piqa (acc) | nope", *shown]).replace("<", "&lt;") in text
    (row,) = (row for row in parsed.rows if row[0] == "nope against rope")
    assert row[1].startswith("2 ") and f"piqa acc {shown[1]}" in row[1] and row[2] == "0"
    names = [x["aria-labelledby"] for tag, x in parsed.tags if tag == "section"]
    assert names[:5] == ["held-out", "verdicts", "tables", "over-steps", "runs"]


def test_held_out_loss_is_the_headline_with_its_curve(tmp_path, capsys):
    runs = []
    for name, canon, shift in (("nope", "", 0.0), ("canon", "ABCD", -0.1)):
        for seed in range(2):
            folder = tmp_path / f"{name}{seed}"
            evaluated(folder, canon, 6.0 + shift + 0.002 * seed, seed, at=10)
            runs.append(evaluated(folder, canon, 5.0 + shift + 0.002 * seed, seed))
    page = report(runs, tmp_path / "out")
    found, text = content(page), Page(page).text
    (headline,) = found["comparison"]["held_out"]
    assert headline in text and headline in markdown(page).splitlines()[2]
    assert capsys.readouterr().out.startswith(headline)
    nope, canon = found["held_out"]["lines"]
    assert nope["values"] == pytest.approx([6.001, 5.001]) and nope["n"] == [2, 2]
    assert canon["low"] == pytest.approx([5.9, 4.9]) and canon["tokens"] == [10 * 2048, 20 * 2048]
    assert found["held_out"]["counted"] == {"unigram": 7.0}
    compared = comparison_content(read_runs(runs)[0])
    labels = [nope["label"], canon["label"]]
    lines = {each.label: each.runs for each in compared.architectures}
    curves = figures.held_out_curves(read_runs(runs)[0], lines)
    figure = figures.draw_held_out(curves, labels)
    (line,), (label,) = (figure["layout"][kind] for kind in ("shapes", "annotations"))
    assert (line["y0"], line["y1"], label["y"]) == (7.0, 7.0, 7.0) and "unigram" in label["text"]
    assert "unigram 7.000" in page.read_text()
    assert sections.verdicts_by_architecture(compared) == {}  # held-out loss is not a task
    one = markdown(report(runs[:1], tmp_path / "one"))
    titles = re.findall("^## (.*)$", one, re.MULTILINE)
    assert titles[:3] == ["Held-out loss", "Run", "Training curves"]


def test_scores_by_architecture_with_published_ones_beside_them(page):
    for each in content(page)["comparison"]["architectures"]:
        (chosen,) = [recipe for recipe in each["recipes"] if recipe["chosen"]]
        assert (chosen["learning_rate"], chosen["loss"]) == (0.004, pytest.approx(3.25))
    (row,) = (r for r in content(page)["comparison"]["scores"] if r["task"] == "boolq")
    parsed = Page(page)
    for kind, words in (("best", "of 3"), ("chosen", "2 run")):
        heads = (k for k, shown in enumerate(parsed.rows) if shown[:1] == ["task"])
        (head,) = (k for k in heads if words in parsed.rows[k][1])
        found = next(shown for shown in parsed.rows[head:] if shown[0] == "boolq acc")
        values = [f"{cell[kind]['value']:.4f}" for cell in row["cells"]]
        assert [x.split()[0] for x in found[1:3]] == values
    rows = [r for r in parsed.rows if r[0] == "piqa acc" and r[-1] == "0.7225"]
    assert [row[-3:] for row in rows] == [["0.7002", "0.7187", "0.7225"]] * 3
    found = published_scores([("lambada_openai", "acc"), ("wikitext", "word_perplexity")])
    values = [row.values for row in found.rows]
    assert values == [[0.426, 0.4566, 0.4665], [18.53, 16.56, 16.42]]
    assert published_scores([("mine", "acc")]) is None


def test_accuracy_over_length_by_architecture(tmp_path):
    kinds = {"1-hop": 0.2, "1-hop-random": 0.2, "2-hop": 0.3333}
    lengths = {f"{kind}-{length}": length for kind in kinds for length in (1024, 0, 256)}
    tasks, paths = {name: {"primary": ["exact"]} for name in lengths}, []
    for name in lengths:
        chance = {"part_of": name, "chance": kinds[name.rpartition("-")[0]]}
        tasks[f"{name}_rank"] = {"part": "rank", "primary": ["rank"], **chance}
    for name, seed, shift in (("rope", 1, 0.0), ("rope", 2, 0.1), ("nope", 1, 0.2)):
        identity = {"model__position": name, "model__init_seed": seed}
        run = plant_run(tmp_path / f"{name}{seed}", EVENTS, **identity)
        paths.append(run.path)
        exact = {k: Score(0.5 + shift - length / 4096) for k, length in lengths.items()}
        probes = {k: {"exact": exact[k], "rank": Score(0.6 + shift)} for k in lengths}
        limit = 3 if name == "nope" else None
        plant_results(run, 30, "birth-year", probes, limit=limit, tasks=tasks)
        names = [(k, length) for k in range(1, 6) for length in (0, 4)][:-1]
        babilong = {f"babilong_qa{k}_{x}k": {"acc": Score(k / 10 + shift)} for k, x in names}
        plant_results(run, 30, "babilong", babilong)
    page = report(paths, tmp_path / "out")
    probed, by_task = content(page)["lengths"]
    assert probed["limited"] == ["nope1"]
    panels = {(panel["series"], panel["metric"]): panel for panel in probed["panels"]}
    assert [x["chance"] for x in panels.values()] == [None, None, None, *kinds.values()]
    exact = panels["1-hop", "exact"]
    assert exact["lengths"] == [0, 256, 1024]
    rope, _ = exact["lines"]
    assert rope["values"] == pytest.approx([0.55, 0.4875, 0.3]) and rope["n"] == [2, 2, 2]
    assert rope["low"] == pytest.approx([0.5, 0.4375, 0.25])
    series = {panel["series"]: panel for panel in by_task["panels"]}
    assert list(series) == [MEAN, "qa1", "qa2", "qa3", "qa4", "qa5"]
    mean = series[MEAN]
    assert mean["lengths"] == [0]  # qa5 is missing at 4k
    assert mean["lines"][1]["values"] == pytest.approx([0.3 + 0.2])
    assert any(row[1:] == ["0", "256", "1,024"] for row in Page(page).rows)


def test_long_tables_have_fewer_columns(six):
    compared = comparison_content(read_runs(six)[0])
    pair = compared.pairs[0]
    short, long = (
        sections.pairs(replace(compared, pairs=[pair] * count)) for count in (1000, 1001)
    )
    assert len(long.rows) == 1001 and len(long.columns) < len(short.columns)


@pytest.mark.system  # renders 100,000 cells
def test_a_page_of_many_runs_is_small(tmp_path, six):
    """40 runs x 61 tasks at two steps, with logs and samples: at most 1 MB beside plotly."""
    rng, runs = np.random.default_rng(0), []
    tasks = {f"task_number_{k}": {"primary": ["acc"]} for k in range(61)}
    for architecture in range(40):
        events = [launch("start")]
        for at, loss in enumerate(rng.normal(8, 0.1, 400), 1):
            events.append(step(5 * at, loss - np.log(at), rng.gamma(3), rng.normal(9e3, 50)))
        for at in range(200, 2001, 200):
            texts = ["".join(rng.choice([*"abcdefgh "], 300)) for _ in range(3)]
            events.append(sampled(at, *texts))
        identity = {"model__dim": 128 + 8 * architecture}
        run = plant_run(tmp_path / f"architecture-{architecture}", events, **identity)
        for at in (1000, 2000):
            scores = {task: {"acc": Score(rng.uniform(), 0.0123 + at / 1e6)} for task in tasks}
            plant_results(run, at, "discriminative", scores, tasks=tasks)
        runs.append(RunRecord(run.path))

    compared = comparison_content(runs, None, Options())
    [pair, *_] = comparison_content(read_runs(six)[0]).pairs
    pairs = [
        replace(
            pair,
            architecture=each.label,
            task=task,
            difference=rng.normal(),
            verdict=rng.choice(["better", *["within noise"] * 3]),
        )
        for each in compared.architectures[1:]
        for task in tasks
    ]
    compared = replace(compared, refused=[], pairs=pairs)
    found = report_content(runs, compared)
    write_report(tmp_path, "index.html", found, figures.labels_of(found))
    assert len(found.score_curves) == len(tasks)
    assert len(compared.pairs) == 39 * len(tasks)
    assert (tmp_path / "index.html").stat().st_size < 1e6


EXPORT = {"model_type": "canon", "architectures": ["CanonForCausalLM"], "vocab_size": 600}


@pytest.mark.parametrize("foreign", [EXPORT, {"config": {"model": {}}}, {}, [], "torn"])
def test_a_folder_with_a_foreign_config_is_no_run(foreign, run, tmp_path, capsys):
    """`hf export outputs/mine/hf` puts an export beside the runs of outputs/mine."""
    other = run.path.parent / "hf" / "config.json"
    other.parent.mkdir()
    other.write_text(foreign if foreign == "torn" else json.dumps(foreign))
    assert named_runs([run.path.parent]) == [run.path]
    assert not is_run_folder(other.parent)
    report([run.path.parent], tmp_path / "out")
    page = tmp_path / "x.html"
    for words in (["status", run.path.parent], ["plot", run.path.parent, "--out", page]):
        assert run_command(*words) == 0
        assert "hf" not in capsys.readouterr().out.replace(str(run.path.parent), "")
    code = "run.not_a_run" if isinstance(foreign, dict) else "file.unreadable"
    for words in (["status"], ["plot", "--out", page], ["export", "tensorboard"]):
        assert run_command(*words, other.parent) == 2
        assert error_codes(capsys.readouterr().err) == [code]


BROKEN = {
    "config.json": "{",
    "log.jsonl": '{"event": "step", "step": 1}\n',
    "evals/step-30/paper/0/results.json": "{",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_run_hides_no_other(name, run, tmp_path, capsys):
    """It is left out, said on the page and as an error; the exit code is 2."""
    broken = plant_run(tmp_path / "broken", EVENTS, model__init_seed=8)
    plant_results(broken, 30, "paper", SCORES)
    (broken.path / name).parent.mkdir(parents=True, exist_ok=True)
    (broken.path / name).write_text(BROKEN[name])
    code = "results.damaged" if name.endswith("results.json") else "file.unreadable"
    out, kept = tmp_path / "out", ["canon", *["broken"] * (code == "results.damaged")]
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(run.path), str(broken.path), "--out", str(out)])
    assert error_codes(capsys.readouterr().err) == [code]
    found = content(out / "index.html")
    assert [each["label"] for each in found["runs"]] == kept
    assert any(str(broken.path) in line for line in found["warnings"])
    page = tmp_path / "curves.html"
    is_whole = code == "results.damaged"  # plots note damaged results only
    assert run_command("plot", run.path, broken.path, "--out", page) == (0 if is_whole else 2)
    assert str(broken.path) in page.read_text()
    assert run_command("status", run.path, broken.path) == 0
    assert {"canon", "broken"} <= {*re.findall("canon|broken", capsys.readouterr().out)}


def test_a_setting_that_is_not_finite_is_shown(tmp_path):
    """`--training.max_norm inf` is a setting of the run."""
    run = plant_run(tmp_path / "run", EVENTS, training__max_norm=math.inf)
    page = report([run.path], None)
    assert ["training.max_norm", "inf"] in Page(page).rows


def test_a_count_model_of_different_tokens_is_no_line(tmp_path):
    runs = []
    for seed, bigram in enumerate((3.0, 3.5)):
        run = RunRecord(evaluated(tmp_path / f"{seed}", "", 5.0, seed))
        [evaluation] = run.evaluations
        evaluation.results.scores["bigram"] = {"nats_per_token": Score(bigram)}
        runs.append(run)
    text = runs[0].evaluations[0].text
    assert counted_losses(runs[:1], text)["bigram"] == 3.0
    assert "bigram" not in counted_losses(runs, text)
