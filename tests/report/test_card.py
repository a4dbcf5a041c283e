"""Model cards of planted runs: their content up to one step, the hub's metadata, the picture."""

import io
import itertools
import re
import shutil

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
from tests.support import ROOT

HOSTILE = "a\n```\n\n\n# no title\n    <script>\n| x |\x1b[31m---\n"


def card(run, at, license_id=None):
    """Return the files of the model card of a run at a step."""
    return model_card(
        run.path,
        at,
        license_id=license_id,
        title="A title",
        lead="A lead.",
        loading="LOADING",
        library="transformers",
    )


def readme(files):
    """Return the text of a card."""
    return files["README.md"].decode()


def architecture_rows(folder, **model):
    """Return the rows of a card on the architecture with these keys of [model], and its tags."""
    identity = {f"model__{name}": value for name, value in model.items()}
    run = plant_run(folder, [], **identity)
    text = readme(card(run, 10))
    table = text.split("## Architecture")[1].split("##")[0]
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(table)
    cells = [token.content for token in tokens if token.type == "inline"]
    cells = cells[cells.index("parameters") :]
    return dict(zip(cells[::2], cells[1::2], strict=True)), ModelCard(text).data.tags


@pytest.fixture
def run(tmp_path):
    """A run of 200 steps, sampled and evaluated at steps 100 and 200, in a folder `secret`."""
    events = [launch("start", hosts=["secret-host"])]
    for n in range(10, 201, 10):
        events.append(step(n, "nan" if n == 60 else 7.0 - n / 100))
        if n % 100 == 0:
            sample = {"prompt": "Say *", "text": HOSTILE if n == 100 else "later", "tokens": 9}
            events.append({"event": "validation", "step": n, "loss": n / 50, "bits_per_byte": 1.5})
            events.append({"event": "samples", "step": n, "tokens": 1, "samples": [sample]})
    planted = plant_run(tmp_path / "secret" / "run", events)

    scores = {"easy": {"acc": Score(0.9, 0.01)}, "hard": {"acc": Score(0.52, 0.02)}}
    plant_results(planted, 100, "discriminative", scores, tasks={"easy": ACC, "hard": ACC})
    later_scores = {"easy": {"acc": Score(0.95, 0.01)}}
    plant_results(planted, 200, "discriminative", later_scores, tasks={"easy": ACC})
    trial = {"qa1": {"acc": Score(0.7, 0.1)}}
    plant_results(planted, 100, "babilong", trial, limit=20, tasks={"qa1": ACC})
    return planted


def test_metadata_of_a_card(run):
    files = card(run, 100, "apache-2.0")
    assert files == card(run, 100, "apache-2.0")

    metadata = ModelCard(readme(files)).data
    assert (metadata.license, metadata.library_name) == ("apache-2.0", "transformers")
    results = {
        (result.dataset_type, result.metric_type): result.metric_value
        for result in metadata.eval_results
    }
    assert results == {("easy", "acc"): 0.9, ("hard", "acc"): 0.52}  # a trial is no result


def test_a_card_is_of_one_step(run):
    text = readme(card(run, 100))

    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(text)
    cells = [token.content for token in tokens if token.type == "inline"]
    rows = dict(itertools.pairwise(cells))
    assert rows["step"] == "100 of 500"
    assert rows["tokens seen"] == f"{100 * 2048:,}"
    assert rows["held-out loss in training"].startswith("2.0000 ")
    assert rows["data fingerprint"] == FINGERPRINT
    assert rows["optimizer.lr"] == "0.004"
    assert rows["easy (acc)"] == "0.9000 ± 0.0100 (n = 1,000)"
    assert "qa1 (acc)" in rows

    (guesses,) = [cell for cell in cells if "hard acc" in cell]
    assert "easy acc" not in guesses
    blocks = [token.content for token in tokens if token.type == "code_block"]
    assert blocks == [HOSTILE.replace("\x1b", "\ufffd")]

    assert "later" not in text
    assert "0.95" not in text
    assert "secret" not in text  # no folder, no host


def test_a_card_without_log_or_evaluations(tmp_path):
    bare = plant_run(tmp_path / "run", [])
    bare.log_file.unlink()

    files = card(bare, 500)

    metadata = ModelCard(readme(files)).data.to_dict()
    assert PICTURE not in files
    assert not {"license", "model-index", "model_name"} & metadata.keys()

    bare.log_file.write_text('{"event": "step"\n{}\n')  # damaged
    assert card(bare, 500) == files


def test_a_card_says_what_a_run_started_from_and_ran_on(tmp_path):
    sha256 = "ab" * 32
    initial_load = {
        "event": "initial_load",
        "checkpoint": "/secret",
        "checkpoint_step": 7000,
        "manifest_sha256": sha256,
        "model_only": True,
    }
    events = [
        launch("start", world_size=2),
        initial_load,
        step(10, 3.0),
        launch("resume", from_step=10, world_size=4),
        step(20, 2.0),
    ]
    run = plant_run(tmp_path / "run", events)

    before = readme(card(run, 10))
    after = readme(card(run, 20))

    assert "weights of step 7,000" in before
    assert sha256[:12] in before
    assert "secret" not in before
    assert "| world size | 2 |" in before
    assert "| world size | 2, 4 |" in after


def test_a_card_names_guesses_at_the_chance_of_the_items(tmp_path):
    """Tasks of lm_eval declare no chance level: the number of answers per item is it."""
    run = plant_run(tmp_path / "run", [launch("start"), step(10, 3.0)])
    items = [
        {
            "doc_id": n,
            "doc_hash": f"{n}",
            "prompt_hash": "",
            "filter": "none",
            "acc": n % 2,
            "answers": [[-1.0, False]] * 2,
        }
        for n in range(100)
    ]
    plant_results(
        run,
        10,
        "piqa",
        {"piqa": {"acc": Score(0.5, 0.05)}},
        tasks={"piqa": {"primary": ["acc"]}},
        samples={"piqa": items},
    )

    text = readme(card(run, 10))

    assert "guessing: piqa acc (chance 0.500)" in text


@pytest.fixture(scope="module")
def plain_rows(tmp_path_factory):
    rows, _ = architecture_rows(tmp_path_factory.mktemp("plain"))
    return rows


FILTERS = ("static", "dynamic", "scalar", "shift")
PATTERN = {
    "num_layers": 5,
    "pattern": ["fast", "fast", "near"],
    "layers": {
        "fast": {
            "mixer": "gated_deltanet",
            "num_heads": 4,
            "expand_k": 0.5,
            "expand_v": 1.0,
            "canon_set": "AB",
        },
        "near": {"window": 16},
    },
}
OPTIONS = [
    *(("Canon layers", {"canon_set": sites}) for sites in ("FKOQV", "FO", "Q", "A", "")),
    *(
        ("Canon layers", {"canon_filter": name, "canon_scale": scale, "canon_kernel": 2})
        for name in FILTERS
        for scale in ("none", "sqrt")
    ),
    ("Canon layers", {"canon_set": "KO", "canon_filter": "dynamic_heads"}),
    (
        "Canon layers",
        {"canon_set": "KO", "canon_filter": "dynamic_heads", "canon_scale": "sqrt"},
    ),
    ("Canon layers", {"canon_residual": False}),
    ("Canon layers", {"canon_activation": True}),
    ("Canon layers", {"canon_trainable": False}),
    ("smear", {"smear": True}),
    ("mixer", {"window": 1024}),
    ("mixer", {"qk_norm": "per_head"}),
    ("mixer", {"attention_gate": "per_channel"}),
    ("norm", {"norm_place": "output"}),
    ("vocabulary", {"embed_norm": True}),
    *(
        ("positions", {"position": "relative", **changes})
        for changes in ({}, {"relative_dim": 8}, {"relative_extent": 99})
    ),
    *(("positions", {"position": "h_alibi", "h_alibi_heads": heads}) for heads in (0, 1, 3)),
]
"""The row of a card that an option changes, and the option."""


def test_an_option_changes_its_row_of_a_card_only(tmp_path, plain_rows):
    texts = []
    for i, (label, changes) in enumerate(OPTIONS):
        rows, _ = architecture_rows(tmp_path / f"{i}", **changes)
        changed = {name for name in rows if rows[name] != plain_rows.get(name)}
        assert changed - {"parameters"} == {label}, changes
        assert rows.keys() >= plain_rows.keys()
        texts.append(rows[label])
    assert len({*texts}) == len(texts)


def test_the_numbers_of_an_architecture_are_on_its_card(tmp_path, plain_rows):
    smeared, _ = architecture_rows(tmp_path / "smear", smear=True)
    # a weight for each of the gate's channels, and the scale
    number, plain_number = (int(x["parameters"].replace(",", "")) for x in (smeared, plain_rows))
    assert number - plain_number == 13
    assert "12" in smeared["smear"]

    near, _ = architecture_rows(tmp_path / "near", window=1024)
    assert near["mixer"].startswith(plain_rows["mixer"])
    assert "1,024" in near["mixer"]

    # the terms of the sums: two taps of the token for each of four, and the residual
    scaled = {"canon_set": "KO", "canon_filter": "dynamic_heads", "canon_scale": "sqrt"}
    rows, _ = architecture_rows(tmp_path / "scaled", **scaled)
    assert "9 or 5;" in rows["Canon layers"]


def test_a_card_has_a_row_for_each_kind_of_layer(tmp_path, plain_rows):
    """And one for what all kinds have in common, with the order of the layers."""
    rows, tags = architecture_rows(tmp_path / "run", **PATTERN)

    kinds = ("fast", "near")
    canon = {kind: rows[f"Canon layers, layers {kind}"] for kind in kinds}
    mixers = {kind: rows[f"mixer, layers {kind}"] for kind in kinds}
    assert not {"mixer", "Canon layers"} & rows.keys()
    for label in ("positions", "feed-forward", "norm"):
        assert rows[label] == plain_rows[label]
    assert "Canon-AB:" in canon["fast"]
    assert "Canon-ABCD:" in canon["near"]
    assert "16" in mixers["near"]
    order = rows["order of the layers"]
    assert order.endswith("4 fast, 1 near")
    assert tags == ["canon_pretrain", "gated_deltanet", "attention", "nope"]


def test_a_card_of_layers_with_norms_in_other_places(tmp_path):
    delta = PATTERN["layers"]["fast"] | {"allow_neg_eigval": True}
    changes = PATTERN | {"layers": {"fast": delta, "near": {"norm_place": "output"}}}
    rows, _ = architecture_rows(tmp_path / "run", **changes)
    assert rows["norm, layers fast"] == "rmsnorm"
    assert "outputs" in rows["norm, layers near"]
    assert "negative eigenvalues" in rows["mixer, layers fast"]


def test_a_card_names_a_mixer_of_the_users_own(tmp_path):
    """By its class and its file's name, of which hostile ones break no table."""
    file = tmp_path / "run" / "mixers" / "a|b.py"
    file.parent.mkdir(parents=True)
    example = ROOT / "train_configs" / "mixers" / "decaying_average.py"
    file.write_bytes(example.read_bytes())
    rows, tags = architecture_rows(tmp_path / "run", mixer="a|b.py:DecayingAverage")
    assert "(a|b.py:DecayingAverage)" in rows["mixer"]
    assert tags == ["canon_pretrain", "DecayingAverage", "nope"]


def test_a_card_of_a_synthetic_task(tmp_path):
    scores = [
        {"event": "validation", "step": n, "loss": 2.0, "scores": {"exact": n / 20, "first": 1.0}}
        for n in (10, 20)
    ]
    events = [launch("start"), step(10, 3.0), step(20, 2.0), *scores]
    task = plant_run(tmp_path / "run", events, data__task__name="copy")

    files = card(task, 20)

    assert "| scores in training | exact 1.0000, first 1.0000 |" in readme(files)
    assert files[PICTURE] != card(task, 10)[PICTURE]


@pytest.mark.parametrize(
    ("mixer", "label"),
    [
        ("gla", "gated linear attention (GLA), 4 heads"),
        (
            "decaying_average.py:DecayingAverage",
            "a class of its own (decaying_average.py:DecayingAverage), 4 heads",
        ),
    ],
)
def test_a_card_names_the_mixer(mixer, label, tmp_path):
    changes = {"model__mixer": mixer, "model__canon_set": "AC"}
    planted = plant_run(tmp_path / "run", [launch("start"), step(10, 3.0)], **changes)
    planted.mixers.mkdir()
    shutil.copy(ROOT / "train_configs/mixers/decaying_average.py", planted.mixers)

    assert f"| mixer | {label} |" in readme(card(planted, 10))


def test_a_card_of_a_run_that_diverged(tmp_path):
    losses = {10: 7.0, 20: 6.0, 30: "nan", 40: "nan"}
    events = [launch("start"), *(step(n, x, grad_norm=None) for n, x in losses.items())]
    run = plant_run(tmp_path / "run", events)

    before = card(run, 20)[PICTURE]
    diverged = card(run, 40)[PICTURE]

    assert before != diverged  # the second has a longer axis


def test_tokens_of_a_step_are_found_without_reading_all_steps(tmp_path):
    lookups = []

    class Counted(Event):
        def __getitem__(self, name):
            lookups.append(name)
            return super().__getitem__(name)

    logged = range(10, 5001, 10)
    run = RunRecord(tmp_path)
    run.steps = [Counted(step=n, tokens=n * n) for n in logged]

    for at in (1, 10, 14, 15, 16, 4990, 5000, 9000):
        nearest = min(logged, key=lambda n, at=at: abs(n - at))
        assert tokens_at(run, at) == at * nearest
    assert len(lookups) < 8 * 20

    run.steps = []
    assert tokens_at(run, 1) is None


def colored_ends(is_colored):
    """Return the columns where a line starts and ends, and its heights there."""
    rows, columns = np.nonzero(is_colored)
    left = columns.min()
    right = columns.max()
    return left, right, rows[columns == left].mean(), rows[columns == right].mean()


def test_the_picture_shows_its_lines():
    x = np.arange(50) * 1e4
    rising = Line("", x, x / 1e4)
    gap = Line("", x, np.where(x < 1e5, np.nan, 20.0))

    image = Image.open(io.BytesIO(draw([Panel("one", [rising, gap])] * 2, "png")))

    width = round(WIDTH * DPI)
    height = round(HEIGHT * DPI)
    assert image.size == (2 * width, height)

    # the first color is blue, the second orange
    pixels = np.asarray(image.convert("RGB"), int)[:, :width]
    redness = pixels[..., 0] - pixels[..., 2]
    left, right, start, end = colored_ends(redness < -50)
    assert start - end > 240
    assert left < 70
    assert right > width - 60

    left, right, start, end = colored_ends(redness > 50)
    assert abs(start - end) < 3
    assert 100 < left < 200
    assert right > width - 60


def test_a_point_between_two_gaps_is_drawn():
    values = np.full(100, np.nan)
    values[50] = 1.0
    line = Line("", np.arange(100.0), values)

    image = Image.open(io.BytesIO(draw([Panel("", [line])], "png"))).convert("RGB")

    pixels = np.asarray(image, int)
    is_blue = pixels[..., 2] - pixels[..., 0] > 50
    assert is_blue.sum() > 8


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
