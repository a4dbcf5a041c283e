"""A small model learns a small setting of each synthetic task; minutes each on one core."""

from collections import Counter
from itertools import pairwise

import pytest

from canon_pretrain.run.results import read_results
from canon_pretrain.synthetic.task import EVALUATION_SEED
from canon_pretrain.titan.command_line import parse_job
from eval.__main__ import main
from tests.support import ROOT, train

FOLDER = ROOT / "train_configs" / "playground" / "tiny"


def trained_score(run, name, *options):
    """Train a tiny config in `run`, and return its main score."""
    config = FOLDER / f"{name}.toml"
    train("--config", config, "--job.dump_folder", run, *options, timeout=900)
    main(["run", "--checkpoint", str(run), "--suite", "playground"])
    (path,) = (run / "evals").rglob("results.json")
    results = read_results(path)
    (score,) = results.asked["tasks"]["playground"]["primary"]
    return results.scores["playground"][score].value


SOLVED = sorted({path.stem for path in FOLDER.glob("*.toml")} - {"automata"})


@pytest.mark.learning
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SOLVED)
def test_a_small_model_solves(name, tmp_path):
    assert trained_score(tmp_path, name) > 0.95


def counted_score(task, num_windows):
    """Return the share of questions that the most frequent symbol after the last one answers."""
    num_right = 0
    questions = [*task.questions(EVALUATION_SEED, 0, num_windows)]
    for question in questions:
        *_, last = question.prompt
        followers = Counter(
            token
            for before, token in pairwise(question.prompt)
            if before == last and token <= task.symbols
        )
        [(answer, _)] = followers.most_common(1) or [(0, 0)]
        num_right += task.judge(question.prompt, [answer]).values["valid"]
    return num_right / len(questions)


@pytest.mark.learning
@pytest.mark.timeout(1200)
def test_automata_are_learned_in_context(tmp_path):
    """A few examples do not determine an automaton: better than counts of pairs of symbols."""
    job = parse_job(["--config", str(FOLDER / "automata.toml")])
    assert trained_score(tmp_path, "automata") > counted_score(job.task, 200) + 0.03


@pytest.mark.learning
@pytest.mark.timeout(1200)
def test_attention_and_canon_recall_64_pairs_after_32(tmp_path):
    trained_score(tmp_path / "32", "mqar")

    sizes = {"pairs": 64, "queries": 64, "slots": 64}
    score = trained_score(
        tmp_path / "64",
        "mqar",
        *(word for key, size in sizes.items() for word in (f"--data.task.{key}", size)),
        *("--training.seq_len", 257),
        *("--training.steps", 40),
        *("--lr_scheduler.warmup_steps", 4),
        *("--validation.freq", 20),
        *("--checkpoint.initial_load_path", tmp_path / "32" / "checkpoint" / "step-400"),
    )
    assert score >= 0.99


def s5_score(tmp_path, mixer, length):
    """Train one layer of a linear model on words of S5, and return its score at that length."""
    return trained_score(
        tmp_path,
        "state",
        *("--model.mixer", mixer),
        *("--model.ffn", "gated"),
        *("--model.num_layers", 1),
        *("--model.position", "nope"),
        *("--data.task.group", "s5"),
        *("--data.task.l", length),
        *("--training.steps", 1000),
    )


@pytest.mark.learning
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("mixer", ["gla", "mamba2", "gated_deltanet"])
def test_no_linear_model_of_one_layer_solves_s5(mixer, tmp_path):
    """Its word problem is complete for NC1; a guess is right 1 time in 120."""
    assert s5_score(tmp_path, mixer, 16) < 0.1


@pytest.mark.learning
@pytest.mark.timeout(2400)
def test_one_layer_learns_products_of_two_elements(tmp_path):
    """So it is the length that one layer of the same size and steps fails at: 0.49 measured."""
    assert s5_score(tmp_path, "gla", 2) > 0.3
