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
    """A finished run with results of the suite `paper`."""
    planted = plant_run(tmp_path / "canon", EVENTS, done=True)
    plant_results(planted, 30, "paper", SCORES)
    return planted


def answers(piqa, rng):
    """Return item records of three tasks with a share `piqa` of right answers, 0.5 and 0.4."""
    piqa_acc = right_or_wrong(400, piqa, rng)
    piqa_acc_norm = right_or_wrong(400, piqa, rng)
    boolq_acc = right_or_wrong(400, 0.5, rng)
    lambada_acc = right_or_wrong(400, 0.4, rng)
    likelihoods = rng.normal(-2.5, 1.0, 400).tolist()
    return {
        "piqa": records({"acc": piqa_acc, "acc_norm": piqa_acc_norm}),
        "boolq": records({"acc": boolq_acc}),
        "lambada_openai": records({"perplexity": likelihoods, "acc": lambada_acc}),
    }


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """Rope and nope at two learning rates, two seeds of the better one; nope is better on piqa."""
    folder = tmp_path_factory.mktemp("six")
    rng = np.random.default_rng(1)
    log = [launch("start"), *(step(k, 7 - k / 10) for k in (10, 20, 30))]
    paths = []
    for position, piqa in (("rope", 0.5), ("nope", 0.85)):
        for rate, seed, loss in ((2, 1, 3.5), (4, 1, 3.25), (4, 2, 3.25)):
            run = plant_run(
                folder / f"{position}-lr{rate}-seed{seed}",
                log,
                done=True,
                optimizer__lr=rate / 1000,
                model__position=position,
                model__init_seed=seed,
            )
            paths.append(run.path)

            for at, share in ((20, 0.5), (30, piqa)):
                items = answers(share, rng)
                plant_answers(run, at, "discriminative", items, described=TASKS)
            scores = {"validation": {"nats_per_token": Score(loss)}}
            plant_results(run, 30, "validation", scores, tasks={"validation": {"version": 2}})
    return paths


@pytest.fixture(scope="module")
def page(six, tmp_path_factory):
    """The page of the six runs."""
    return report(six, tmp_path_factory.mktemp("out"))


def test_one_run_has_its_numbers_in_report_json(run):
    page = report([run.path], None)

    assert page == run.path / "report" / "index.html"
    loss, norm, _ = content(page)["curves"]
    assert loss["lines"][0]["steps"] == [10, 20, 30]
    assert loss["lines"][0]["tokens"] == [TOKENS_A_STEP * at for at in (10, 20, 30)]
    assert loss["lines"][0]["values"] == [7.25, 6.125, 5.0625]
    assert norm["lines"][0]["values"] == [2.5, 1.5, 0.75]

    (suite,) = content(page)["suites"]
    assert suite["columns"] == [{"run": "canon", "step": 30, "limit": None}]
    acc = {"value": 0.482, "stderr": 0.0158, "bound": None, "num_samples": 1000}
    assert suite["rows"][0]["cells"] == [acc | {"num_sources": None}]


def test_one_run_has_its_numbers_on_both_pages(run):
    page = report([run.path], None)
    parsed = Page(page)
    text = markdown(page)

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

    model = {
        name.removeprefix("model."): value
        for name, value in IDENTITY.items()
        if name.startswith("model.")
    }
    parameters = num_parameters(ModelArgs(**model))
    # per layer, keys and values of 256 tokens in 2 bytes, and 3 sums of Canon's in 4
    cache_bytes = 3 * (256 * 2 * 128 * 2 + 4 * 3 * (5 * 128 + 2 * 344))
    for shown in (
        f"{cache_bytes:,}",
        f"{parameters:,}",
        "a planted run",
        "2, 4",
        "2.13.0+cpu",
        "2026-11-20T10:09",
    ):
        assert shown in parsed.text
        assert shown in text


def test_a_second_report_has_the_same_bytes(run, capsys):
    page = report([run.path], None)
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
    first_lines = [capsys.readouterr().out.splitlines()[0], markdown(page).splitlines()[2]]
    for line in first_lines:
        assert line.strip("*").startswith("failed ")
        assert "not finite" in line

    # no longer failed once launched again
    StatusWriter(failed.status_file, steps=500, world_size=1).write()
    (state,) = content(report([failed.path], tmp_path / "out"))["runs"]
    assert state["state"] == "unfinished"


def test_a_stopped_run_has_its_last_step(tmp_path):
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

    assert content(page)["comparison"]["pairs"] == []
    suite, probes = content(page)["suites"]
    assert suite["columns"][1] == {"run": "rope", "step": 20, "limit": 100}
    assert suite["rows"][1]["cells"][1] is None  # rope has no perplexity
    assert probes["columns"][1]["limit"] is None  # a full result is preferred to a trial
    assert probes["rows"][0]["cells"][1]["value"] == 0.25

    parsed = Page(page)
    assert ["model.position", "nope", "rope"] in parsed.rows
    # Wilson's bound of a score of 0
    assert ["a acc, n = 1,000", "0.0000 ≤ 0.0038", "0.2500 step 20"] in parsed.rows
    assert any("rope step 20" in cell and "100" in cell for row in parsed.rows for cell in row)

    (warning,) = content(page)["warnings"]
    assert FINGERPRINT[:12] in warning
    assert warning in parsed.text
    assert warning in markdown(page)


def test_results_belong_to_a_checkpoint(run):
    checkpoint = make_step(run.path / "checkpoint", 30)
    stored = Manifest.read(checkpoint).content
    plant_results(run, 30, "mine", {"task": {"acc": Score(0.25)}}, content=stored)
    plant_results(run, 30, "mine", {"task": {"acc": Score(0.5)}}, content="of another")

    page = report([run.path], None)
    assert not content(page)["suites"][0]["warnings"]
    assert "0.2500" in markdown(page)

    shutil.rmtree(checkpoint)
    make_step(run.path / "checkpoint", 30, num_bytes=99)
    page = report([run.path], None)
    assert len(content(page)["suites"][0]["warnings"]) == 1


def test_results_belong_to_a_run(run):
    write_json(run.run_file, {"run_id": "0123abcd", "created": "", "launches": 1})
    other_run = plant_results(run, 30, "theirs", SCORES, run_id="ffffffff")
    other_data = plant_results(run, 30, "theirs", SCORES, train_fingerprint="f" * 64)

    written = content(report([run.path], None))

    assert "theirs" not in {suite["suite"] for suite in written["suites"]}
    of_run, of_data = sorted(written["warnings"], key=lambda warning: str(other_run) not in warning)
    assert str(other_run) in of_run
    assert "ffffffff" in of_run
    assert str(other_data) in of_data


def sampled(at, *texts, **fields):
    """A `samples` event, with prompts "", EVIL and so on."""
    prompts = ("", EVIL, "third")
    samples = [
        {"prompt": prompt, "text": text, "tokens": 3}
        for prompt, text in zip(prompts, texts, strict=False)
    ]
    return {"event": "samples", "step": at, "tokens": at, "samples": samples, **fields}


def test_samples_are_by_prompt_and_step(tmp_path):
    """Side by side, at most 20 steps; one that a restart undid and damaged lines are not shown."""
    samples = [sampled(at, f"one {at}", f"{EVIL}\n\x1b[2J{at}") for at in range(10, 260, 10)]
    log = [
        launch("start"),
        step(10, 7.0),
        *samples[:5],
        launch("resume", from_step=40),
        *samples[5:],
        samples[0] | {"samples": 3},
        samples[0] | {"samples": [{"prompt": "", "text": 4}]},
    ]
    first_run = plant_run(tmp_path / "one", log)
    not_finite = sampled(250, "", "", reason="not finite")
    second_run = plant_run(tmp_path / "two", [launch("start"), sampled(240, "two", ""), not_finite])

    page = report([first_run.path, second_run.path], tmp_path / "out")

    start, evil = content(page)["samples"]
    assert (start["prompt"], start["sampled"], evil["prompt"]) == ("", 24, EVIL)
    assert [row["step"] for row in start["rows"]] == [20, 40, *range(70, 251, 20)]
    assert start["rows"][-1]["cells"] == [{"text": "one 250"}, {"text": None}]

    parsed = Page(page)
    text = markdown(page)
    for row in (["230", "one 230", "–"], ["250", "one 250", "not finite"]):
        assert row in parsed.rows
        assert f"| {' | '.join(row)} |" in text
    assert ["250", f"{EVIL} \ufffd[2J250", "not finite"] in parsed.rows
    assert [tag for tag, _ in parsed.tags].count("script") == 4
    assert "<script" not in text


def test_values_that_are_not_finite_are_gaps_and_counted(tmp_path):
    events = [step(1, 5.0), step(2, "NaN", "Infinity"), step(3, 4.0), step(4, "NaN")]
    planted = plant_run(tmp_path / "run", events)
    plant_results(planted, 4, "paper", {"wikitext": {"ppl": Score(math.inf)}})

    page = report([planted.path], None)

    loss, norm, _ = content(page)["curves"]
    assert loss["lines"][0]["values"] == [5.0, None, 4.0, None]
    assert norm["lines"][0]["values"] == [1.0, None, 1.0, 1.0]
    for text in (Page(page).text, markdown(page)):
        assert "2 of 4" in text
        assert "(Infinity)" in text


@pytest.fixture
def evil_page(tmp_path):
    """A page of runs with markup in every text that comes from a file."""
    # runs of the same name are labeled with their parents, so a label can contain "</script>"
    paths = [tmp_path / top / "<" / "script><script>alert(1)<" / "script>" for top in "ab"]
    paths.append(tmp_path / EVIL_PATH)
    task = f"{EVIL_PATH}|{EVIL.replace('/', '_')}"
    tasks = {task: {"version": 1, "primary": ["<i>acc"], "chance": 0.5}}
    description = f"{EVIL} | `x` **y**\n# z"
    for k, path in enumerate(paths):
        planted = plant_run(path, EVENTS, description=description, model__position=EVIL * (k + 1))
        for at in (20, 30):
            items = records({"<i>acc": [float(i % 10 < 2 + 3 * k) for i in range(100)]})
            plant_answers(planted, at, "<b>suite", {task: items}, described=tasks, prompt=EVIL)
    return report(paths, tmp_path / "out")


def test_text_from_files_is_never_markup(evil_page):
    parsed = Page(evil_page)
    assert content(evil_page)["comparison"]["pairs"]

    # the page's own scripts only; no element and no handler from a file
    tags = [tag for tag, _ in parsed.tags]
    attributes = {name for _, has in parsed.tags for name in has}
    (library,) = evil_page.parent.glob("plotly-*.min.js")
    assert [has["src"] for _, has in parsed.tags if "src" in has] == [library.name]
    assert tags.count("script") == 4
    assert not {"img", "b", "i"} & set(tags)
    assert not any(name.startswith("on") for name in attributes)

    # but as text
    assert EVIL in parsed.text
    assert EVIL_PATH in parsed.text


def test_text_from_files_is_escaped_in_markdown(evil_page):
    text = markdown(evil_page)

    for markup in ("<script", "<img", "\n# z"):
        assert markup not in text
    assert escape_markdown("a|b\n`c`<d>[e]*g*") == r"a\|b \`c\`&lt;d&gt;\[e\]\*g\*"


def test_labels_of_runs_are_unique(tmp_path):
    paths = [tmp_path / part for part in ("x/run", "y/run", "z/y/run", "other")]

    assert unique_labels(paths) == ["x/run", f"{tmp_path.name}/y/run", "z/y/run", "other"]
    assert unique_labels([tmp_path / "a\x1b[31m\n"]) == ["a\ufffd[31m\ufffd"]


@pytest.fixture
def named_in_error(capsys):
    """Return the function that runs a report that must fail, and looks for a name on stderr."""

    def check(culprit, *words):
        with pytest.raises(SystemExit, match="2"):
            main(["report", *map(str, words)])
        return str(culprit) in capsys.readouterr().err

    return check


def test_missing_folders_are_errors(run, tmp_path, named_in_error):
    file = tmp_path / "file"
    file.touch()

    assert named_in_error(tmp_path / "nothing", tmp_path / "nothing")
    assert named_in_error(file, run.path, "--out", file)
    assert named_in_error("'alibi'", run.path, "--baseline", "alibi")


def test_damaged_files_are_errors(run, named_in_error):
    (results,) = run.path.glob("evals/*/*/*/results.json")
    stored = results.read_text()
    without_limit = stored.replace('"limit"', '"x"')
    text_for_score = stored.replace("0.482", '"x"')
    newer = stored.replace('"version": 1', '"version": 2')
    for broken in (without_limit, text_for_score, newer, "{"):
        results.write_text(broken)
        assert named_in_error(results, run.path)
    results.unlink()

    run.log_file.write_text('{"event": "step", "step": 1}\n')
    assert named_in_error(run.log_file, run.path)
    run.log_file.unlink()
    assert named_in_error(run.log_file, run.path)

    run.config_file.write_text("[]")
    assert named_in_error(run.config_file, run.path)


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
    assert tally["worse"] == []
    assert (len(mean.mean_of), pair.task) == (3, "piqa")
    assert pair.difference == pytest.approx(0.35)

    # the same numbers in the table of differences
    difference = sections.signed(pair.difference)
    cells = [
        "better",
        difference,
        sections.interval(pair.ci),
        sections.p_value(pair.p_holm),
        sections.rounded(pair.value),
        sections.rounded(pair.baseline_value),
    ]
    parsed = Page(page)
    assert ["piqa acc", "nope", *cells] in [row[:8] for row in parsed.rows]
    line = " | ".join(["| piqa (acc) | nope", *cells])
    assert line.replace("<", "&lt;") in markdown(page)

    # and in the tally of verdicts
    (row,) = [row for row in parsed.rows if row[0] == "nope against rope"]
    _, better, worse = row[:3]
    assert better.startswith("2 ")
    assert f"piqa acc {difference}" in better
    assert worse == "0"

    names = [has["aria-labelledby"] for tag, has in parsed.tags if tag == "section"]
    assert names[:5] == ["held-out", "verdicts", "tables", "over-steps", "runs"]


@pytest.fixture(scope="module")
def held_out_runs(tmp_path_factory):
    """Two seeds of nope and of canon, whose loss is lower by 0.1, with losses at two steps."""
    folder = tmp_path_factory.mktemp("held_out")
    runs = []
    for name, canon, shift in (("nope", "", 0.0), ("canon", "ABCD", -0.1)):
        for seed in range(2):
            run = folder / f"{name}{seed}"
            evaluated(run, canon, 6.0 + shift + 0.002 * seed, seed, at=10)
            runs.append(evaluated(run, canon, 5.0 + shift + 0.002 * seed, seed))
    return runs


def test_held_out_loss_is_the_headline_with_its_curve(held_out_runs, tmp_path, capsys):
    page = report(held_out_runs, tmp_path / "out")

    written = content(page)
    (headline,) = written["comparison"]["held_out"]
    assert headline in Page(page).text
    assert headline in markdown(page).splitlines()[2]
    assert capsys.readouterr().out.startswith(headline)
    assert "unigram 7.000" in page.read_text()

    nope, canon = written["held_out"]["lines"]
    assert nope["values"] == pytest.approx([6.001, 5.001])
    assert nope["n"] == [2, 2]
    assert canon["low"] == pytest.approx([5.9, 4.9])
    assert canon["tokens"] == [10 * 2048, 20 * 2048]
    assert written["held_out"]["counted"] == {"unigram": 7.0}


def test_the_figure_of_held_out_loss_has_the_unigram_line(held_out_runs):
    runs, _ = read_runs(held_out_runs)
    compared = comparison_content(runs)
    lines = {architecture.label: architecture.runs for architecture in compared.architectures}
    curves = figures.held_out_curves(runs, lines)

    figure = figures.draw_held_out(curves, list(lines))

    (line,) = figure["layout"]["shapes"]
    (label,) = figure["layout"]["annotations"]
    assert (line["y0"], line["y1"], label["y"]) == (7.0, 7.0, 7.0)
    assert "unigram" in label["text"]
    assert sections.verdicts_by_architecture(compared) == {}  # held-out loss is not a task


def test_one_run_has_a_section_of_held_out_loss(held_out_runs, tmp_path):
    text = markdown(report(held_out_runs[:1], tmp_path / "one"))

    titles = re.findall("^## (.*)$", text, re.MULTILINE)
    assert titles[:3] == ["Held-out loss", "Run", "Training curves"]


def test_scores_by_architecture(page):
    for architecture in content(page)["comparison"]["architectures"]:
        (chosen,) = [recipe for recipe in architecture["recipes"] if recipe["chosen"]]
        assert (chosen["learning_rate"], chosen["loss"]) == (0.004, pytest.approx(3.25))

    scores = content(page)["comparison"]["scores"]
    (boolq,) = [row for row in scores if row["task"] == "boolq"]
    rows = Page(page).rows
    for kind, column_title in (("best", "of 3"), ("chosen", "2 run")):
        heads = [k for k, row in enumerate(rows) if row[:1] == ["task"]]
        (head,) = [k for k in heads if column_title in rows[k][1]]
        shown = next(row for row in rows[head:] if row[0] == "boolq acc")
        values = [f"{cell[kind]['value']:.4f}" for cell in boolq["cells"]]
        assert [cell.split()[0] for cell in shown[1:3]] == values


def test_published_scores_are_beside_the_runs(page):
    rows = [row for row in Page(page).rows if row[0] == "piqa acc" and row[-1] == "0.7225"]
    assert [row[-3:] for row in rows] == [["0.7002", "0.7187", "0.7225"]] * 3

    published = published_scores([("lambada_openai", "acc"), ("wikitext", "word_perplexity")])
    lambada, wikitext = published.rows
    assert lambada.values == [0.426, 0.4566, 0.4665]
    assert wikitext.values == [18.53, 16.56, 16.42]
    assert published_scores([("mine", "acc")]) is None


CHANCES = {"1-hop": 0.2, "1-hop-random": 0.2, "2-hop": 0.3333}  # by kind of birth-year probe


PROBE_LENGTHS = {f"{kind}-{length}": length for kind in CHANCES for length in (1024, 0, 256)}


def plant_probes(run, shift, limit):
    """Plant birth-year scores: exact falls with the length, rank does not."""
    tasks = {}
    scores = {}
    for name, length in PROBE_LENGTHS.items():
        kind = name.rpartition("-")[0]
        tasks[name] = {"primary": ["exact"]}
        tasks[f"{name}_rank"] = {
            "part": "rank",
            "primary": ["rank"],
            "part_of": name,
            "chance": CHANCES[kind],
        }
        scores[name] = {"exact": Score(0.5 + shift - length / 4096), "rank": Score(0.6 + shift)}
    plant_results(run, 30, "birth-year", scores, limit=limit, tasks=tasks)


def plant_babilong(run, shift):
    """Plant Babilong scores of qa1 to qa5 at 0k and 4k, without the last one."""
    names = [(qa, length) for qa in range(1, 6) for length in (0, 4)]
    scores = {
        f"babilong_qa{qa}_{length}k": {"acc": Score(qa / 10 + shift)} for qa, length in names[:-1]
    }
    plant_results(run, 30, "babilong", scores)


@pytest.fixture
def lengths_page(tmp_path):
    """A page of two seeds of rope and a trial of nope with scores over length."""
    paths = []
    for name, seed, shift in (("rope", 1, 0.0), ("rope", 2, 0.1), ("nope", 1, 0.2)):
        run = plant_run(
            tmp_path / f"{name}{seed}", EVENTS, model__position=name, model__init_seed=seed
        )
        plant_probes(run, shift, limit=3 if name == "nope" else None)
        plant_babilong(run, shift)
        paths.append(run.path)
    return report(paths, tmp_path / "out")


def test_accuracy_over_length_by_architecture(lengths_page):
    probes, _ = content(lengths_page)["lengths"]

    assert probes["limited"] == ["nope1"]
    chances = [panel["chance"] for panel in probes["panels"]]
    assert chances == [None, None, None, *CHANCES.values()]

    panels = {(panel["series"], panel["metric"]): panel for panel in probes["panels"]}
    exact = panels["1-hop", "exact"]
    rope, _ = exact["lines"]
    assert exact["lengths"] == [0, 256, 1024]
    assert rope["values"] == pytest.approx([0.55, 0.4875, 0.3])
    assert rope["n"] == [2, 2, 2]
    assert rope["low"] == pytest.approx([0.5, 0.4375, 0.25])

    assert any(row[1:] == ["0", "256", "1,024"] for row in Page(lengths_page).rows)


def test_accuracy_over_length_by_task(lengths_page):
    _, babilong = content(lengths_page)["lengths"]

    panels = {panel["series"]: panel for panel in babilong["panels"]}
    assert list(panels) == [MEAN, "qa1", "qa2", "qa3", "qa4", "qa5"]
    _, nope = panels[MEAN]["lines"]
    assert panels[MEAN]["lengths"] == [0]  # qa5 is missing at 4k
    assert nope["values"] == pytest.approx([0.3 + 0.2])


def test_long_tables_have_fewer_columns(six):
    compared = comparison_content(read_runs(six)[0])
    pair = compared.pairs[0]

    short = sections.pairs(replace(compared, pairs=[pair] * 1000))
    long = sections.pairs(replace(compared, pairs=[pair] * 1001))

    assert len(long.rows) == 1001
    assert len(long.columns) < len(short.columns)


def plant_long_run(folder, rng, tasks, **identity):
    """Plant a run of 2,000 steps with 400 log events, samples and two evaluations."""
    events = [launch("start")]
    for at, loss in enumerate(rng.normal(8, 0.1, 400), 1):
        events.append(step(5 * at, loss - np.log(at), rng.gamma(3), rng.normal(9e3, 50)))
    for at in range(200, 2001, 200):
        texts = ["".join(rng.choice([*"abcdefgh "], 300)) for _ in range(3)]
        events.append(sampled(at, *texts))
    run = plant_run(folder, events, **identity)

    for at in (1000, 2000):
        scores = {task: {"acc": Score(rng.uniform(), 0.0123 + at / 1e6)} for task in tasks}
        plant_results(run, at, "discriminative", scores, tasks=tasks)
    return run


@pytest.mark.system  # renders 100,000 cells
def test_a_page_of_many_runs_is_small(tmp_path, six):
    """40 runs x 61 tasks at two steps, with logs and samples: at most 1 MB beside plotly."""
    num_runs = 40
    rng = np.random.default_rng(0)
    tasks = {f"task_number_{k}": {"primary": ["acc"]} for k in range(61)}
    runs = []
    for k in range(num_runs):
        run = plant_long_run(tmp_path / f"architecture-{k}", rng, tasks, model__dim=128 + 8 * k)
        runs.append(RunRecord(run.path))

    # as many verdicts as of runs with item records
    compared = comparison_content(runs, None, Options())
    pair, *_ = comparison_content(read_runs(six)[0]).pairs
    pairs = [
        replace(
            pair,
            architecture=architecture.label,
            task=task,
            difference=rng.normal(),
            verdict=rng.choice(["better", *["within noise"] * 3]),
        )
        for architecture in compared.architectures[1:]
        for task in tasks
    ]
    compared = replace(compared, refused=[], pairs=pairs)

    written = report_content(runs, compared)
    write_report(tmp_path, "index.html", written, figures.labels_of(written))

    assert len(written.score_curves) == len(tasks)
    assert len(compared.pairs) == (num_runs - 1) * len(tasks)
    assert (tmp_path / "index.html").stat().st_size < 1e6


EXPORT = {"model_type": "canon", "architectures": ["CanonForCausalLM"], "vocab_size": 600}


@pytest.mark.parametrize("foreign", [EXPORT, {"config": {"model": {}}}, {}, [], "torn"])
def test_a_folder_with_a_foreign_config_is_no_run(foreign, run, tmp_path, capsys):
    """`hf export outputs/mine/hf` puts an export beside the runs of outputs/mine."""
    runs = run.path.parent
    other = runs / "hf"
    other.mkdir()
    (other / "config.json").write_text(foreign if foreign == "torn" else json.dumps(foreign))
    page = tmp_path / "x.html"

    # among runs it is passed over
    assert named_runs([runs]) == [run.path]
    assert not is_run_folder(other)
    report([runs], tmp_path / "out")
    for words in (["status", runs], ["plot", runs, "--out", page]):
        assert run_command(*words) == 0
        assert "hf" not in capsys.readouterr().out.replace(str(runs), "")

    # named, it is an error
    code = "run.not_a_run" if isinstance(foreign, dict) else "file.unreadable"
    for words in (["status"], ["plot", "--out", page], ["export", "tensorboard"]):
        assert run_command(*words, other) == 2
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
    only_results = name.endswith("results.json")
    out = tmp_path / "out"

    with pytest.raises(SystemExit, match="2"):
        main(["report", str(run.path), str(broken.path), "--out", str(out)])

    code = "results.damaged" if only_results else "file.unreadable"
    assert error_codes(capsys.readouterr().err) == [code]
    written = content(out / "index.html")
    labels = [state["label"] for state in written["runs"]]
    assert labels == (["canon", "broken"] if only_results else ["canon"])
    assert any(str(broken.path) in warning for warning in written["warnings"])

    # plots note damaged results only
    page = tmp_path / "curves.html"
    exit_code = run_command("plot", run.path, broken.path, "--out", page)
    assert exit_code == (0 if only_results else 2)
    assert str(broken.path) in page.read_text()

    assert run_command("status", run.path, broken.path) == 0
    names = re.findall("canon|broken", capsys.readouterr().out)
    assert {"canon", "broken"} <= set(names)


def test_a_setting_that_is_not_finite_is_shown(tmp_path):
    """`--training.max_norm inf` is a setting of the run."""
    run = plant_run(tmp_path / "run", EVENTS, training__max_norm=math.inf)
    page = report([run.path], None)
    assert ["training.max_norm", "inf"] in Page(page).rows


def test_a_count_model_of_different_tokens_is_no_line(tmp_path):
    runs = []
    for seed, bigram in enumerate((3.0, 3.5)):
        run = RunRecord(evaluated(tmp_path / f"{seed}", "", 5.0, seed))
        (evaluation,) = run.evaluations
        evaluation.results.scores["bigram"] = {"nats_per_token": Score(bigram)}
        runs.append(run)
    text = runs[0].evaluations[0].text

    assert counted_losses(runs[:1], text)["bigram"] == 3.0
    assert "bigram" not in counted_losses(runs, text)
