"""Model cards of planted runs: their content up to one step, the hub's metadata, the picture."""

import io
import re

import numpy as np
import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from PIL import Image

from canon_pretrain.report.card import PICTURE, model_card
from canon_pretrain.report.evaluations import tokens_at
from canon_pretrain.report.picture import DPI, HEIGHT, WIDTH, Line, Panel, draw
from canon_pretrain.report.record import RunRecord
from canon_pretrain.run.log import Event
from canon_pretrain.run.results import Score
from tests.report_runs import ACC, FINGERPRINT, launch, plant_results, plant_run, step

HOSTILE = "a\n```\n\n\n# no title\n    <script>\n| x |\x1b[31m---\n"


def card(run, at, license_id=None):
    about = {"title": "A title", "lead": "A lead.", "loading": "LOADING"}
    return model_card(run.path, at, license_id=license_id, **about)


@pytest.fixture
def run(tmp_path):
    losses = {n: 7.0 - n / 100 for n in range(10, 201, 10)}
    events = [launch("start", hosts=["secret-host"]), *(step(n, x) for n, x in losses.items())]
    events[6]["loss"] = "nan"
    for n in (100, 200):
        events.append({"event": "validation", "step": n, "loss": n / 50, "bits_per_byte": 1.5})
        sample = {"prompt": "Say *", "text": HOSTILE if n == 100 else "later", "tokens": 9}
        events.append({"event": "samples", "step": n, "tokens": 1, "samples": [sample]})
    planted = plant_run(tmp_path / "secret" / "run", sorted(events, key=lambda e: e.get("step", 0)))
    guess, sure = Score(0.52, 0.02), Score(0.9, 0.01)
    for n, scores in ((100, {"easy": sure, "hard": guess}), (200, {"easy": Score(0.95, 0.01)})):
        metrics = {task: {"acc": score} for task, score in scores.items()}
        plant_results(planted, n, "discriminative", metrics, tasks=dict.fromkeys(metrics, ACC))
    trial = {"qa1": {"acc": Score(0.7, 0.1)}}
    plant_results(planted, 100, "babilong", trial, limit=20, tasks={"qa1": ACC})
    return planted


def test_a_card_is_of_one_step(run):
    files = card(run, 100, "apache-2.0")
    assert files == card(run, 100, "apache-2.0")
    text = files["README.md"].decode()
    found = ModelCard(text).data
    assert (found.license, found.library_name) == ("apache-2.0", "transformers")
    results = {(x.dataset_type, x.metric_type): x.metric_value for x in found.eval_results}
    assert results == {("easy", "acc"): 0.9, ("hard", "acc"): 0.52}  # a trial is no result
    tables = MarkdownIt("gfm-like", {"linkify": False}).parse(text)
    cells = [token.content for token in tables if token.type == "inline"]
    rows = {cells[k]: cells[k + 1] for k in range(len(cells) - 1)}
    assert rows["step"] == "100 of 500" and rows["tokens seen"] == f"{100 * 2048:,}"
    assert rows["held-out loss in training"].startswith("2.0000 ")
    assert rows["data fingerprint"] == FINGERPRINT and rows["optimizer.lr"] == "0.004"
    assert rows["easy (acc)"] == "0.9000 ± 0.0100 (n = 1,000)" and "qa1 (acc)" in rows
    guesses = [cell for cell in cells if "hard acc" in cell]
    assert len(guesses) == 1 and "easy acc" not in guesses[0]
    blocks = [token.content for token in tables if token.type == "code_block"]
    assert blocks == [HOSTILE.replace("\x1b", "\ufffd")]
    assert "later" not in text and "0.95" not in text
    assert "secret" not in text  # no folder, no host


def test_a_card_without_log_or_evaluations(tmp_path):
    bare = plant_run(tmp_path / "run", [])
    bare.log_file.unlink()
    files = card(bare, 500)
    assert PICTURE not in files
    found = ModelCard(files["README.md"].decode()).data.to_dict()
    assert "license" not in found and "model-index" not in found and "model_name" not in found
    bare.log_file.write_text('{"event": "step"\n{}\n')  # damaged
    assert card(bare, 500) == files


def test_a_card_says_what_a_run_started_from_and_ran_on(tmp_path):
    sha256 = "ab" * 32
    load = {"checkpoint_step": 7000, "manifest_sha256": sha256, "model_only": True}
    events = [
        launch("start", world_size=2),
        {"event": "initial_load", "checkpoint": "/secret", **load},
        step(10, 3.0),
        launch("resume", from_step=10, world_size=4),
        step(20, 2.0),
    ]
    run = plant_run(tmp_path / "run", events)
    first, second = (card(run, at)["README.md"].decode() for at in (10, 20))
    assert "weights of step 7,000" in first and sha256[:12] in first and "secret" not in first
    assert "| world size | 2 |" in first and "| world size | 2, 4 |" in second


def test_a_card_names_guesses_at_the_chance_of_the_items(tmp_path):
    """Tasks of lm_eval declare no chance level: the number of answers per item is it."""
    run = plant_run(tmp_path / "run", [launch("start"), step(10, 3.0)])
    items = [
        {"doc_id": n, "doc_hash": f"{n}", "prompt_hash": "", "filter": "none", "acc": n % 2}
        | {"answers": [[-1.0, False]] * 2}
        for n in range(100)
    ]
    scores = {"piqa": {"acc": Score(0.5, 0.05)}}
    samples = {"piqa": items}
    plant_results(run, 10, "piqa", scores, tasks={"piqa": {"primary": ["acc"]}}, samples=samples)
    assert "guessing: piqa acc (chance 0.500)" in card(run, 10)["README.md"].decode()


def test_a_card_of_a_synthetic_task(tmp_path):
    scores = [
        {"event": "validation", "step": n, "loss": 2.0, "scores": {"exact": n / 20, "first": 1.0}}
        for n in (10, 20)
    ]
    events = [launch("start"), step(10, 3.0), step(20, 2.0), *scores]
    task = plant_run(tmp_path / "run", events, data__task__name="copy")
    files = card(task, 20)
    assert "| scores in training | exact 1.0000, first 1.0000 |" in files["README.md"].decode()
    assert files[PICTURE] != card(task, 10)[PICTURE]


def test_a_card_of_a_run_that_diverged(tmp_path):
    losses = {10: 7.0, 20: 6.0, 30: "nan", 40: "nan"}
    events = [launch("start"), *(step(n, x, grad_norm=None) for n, x in losses.items())]
    run = plant_run(tmp_path / "run", events)
    known, diverged = (card(run, at)[PICTURE] for at in (20, 40))
    assert known != diverged  # the second has a longer axis


def test_tokens_of_a_step_are_found_without_reading_all_steps(tmp_path):
    lookups = []

    class Counted(Event):
        def __getitem__(self, name):
            lookups.append(name)
            return super().__getitem__(name)

    run = RunRecord(tmp_path)
    run.steps = [Counted(step=n, tokens=n * n) for n in range(10, 5001, 10)]
    for at in (1, 10, 14, 15, 16, 4990, 5000, 9000):
        near = min(range(10, 5001, 10), key=lambda n, at=at: abs(n - at))
        assert tokens_at(run, at) == at * near
    assert len(lookups) < 8 * 20
    run.steps = []
    assert tokens_at(run, 1) is None


def test_the_picture_shows_its_lines():
    x = np.arange(50) * 1e4
    rising, gap = Line("", x, x / 1e4), Line("", x, np.where(x < 1e5, np.nan, 20.0))
    image = Image.open(io.BytesIO(draw([Panel("one", [rising, gap])] * 2, "png")))
    width, height = round(WIDTH * DPI), round(HEIGHT * DPI)
    assert image.size == (2 * width, height)

    pixels = np.asarray(image.convert("RGB"), int)[:, :width]
    redness = pixels[..., 0] - pixels[..., 2]  # the first color is blue, the second orange
    ends = {}
    for name, is_colored in (("rising", redness < -50), ("gap", redness > 50)):
        rows, columns = np.nonzero(is_colored)
        left, right = columns.min(), columns.max()
        ends[name] = [rows[columns == end].mean() for end in (left, right)], left, right
    heights, left, right = ends["rising"]
    assert heights[0] - heights[1] > 240 and left < 70 and right > width - 60
    heights, left, right = ends["gap"]
    assert abs(heights[0] - heights[1]) < 3 and 100 < left < 200 and right > width - 60


def test_a_point_between_two_gaps_is_drawn():
    values = np.full(100, np.nan)
    values[50] = 1.0
    lines = [Line("", np.arange(100.0), values)]
    image = Image.open(io.BytesIO(draw([Panel("", lines)], "png"))).convert("RGB")
    pixels = np.asarray(image, int)
    assert (pixels[..., 2] - pixels[..., 0] > 50).sum() > 8


@pytest.mark.parametrize("kind", ["svg", "pdf"])
def test_a_figure_for_papers_has_its_text_and_equal_bytes(kind):
    x = np.arange(9) * 1e6
    line = Line("loss in $ 中", x, 9 - x / 1e6, 8 - x / 1e6, 10 - x / 1e6)
    panel = Panel("bits per byte", [line], {"bigram": 2.25})
    content = draw([panel], kind)
    assert content == draw([panel], kind)
    if kind == "svg":
        texts = re.findall(r">([^<>]+)</text>", content.decode())
        assert {"loss in $ 中", "bits per byte", "bigram 2.250", "tokens", "8M"} <= set(texts)
    else:
        assert content.startswith(b"%PDF")
