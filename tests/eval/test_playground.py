"""The suite `playground`: scores of synthetic tasks through lm_eval, of runs and their exports."""

import json
import math
import operator
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from canon_pretrain.checkpoint.writer import save_no_dist
from canon_pretrain.data.id_tokenizer import id_tokenizer
from canon_pretrain.hf.export import export
from canon_pretrain.hf.loading import load_model
from canon_pretrain.model.args import ModelArgs, to_json
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.results import read_results, read_samples
from canon_pretrain.synthetic.capo import ROLES
from canon_pretrain.synthetic.evaluation import VERDICTS, evaluation_windows, pooled_stderr
from canon_pretrain.synthetic.task import EVALUATION
from canon_pretrain.synthetic.tasks import build_task
from canon_pretrain.titan.scores import TaskScores
from eval.__main__ import main
from eval.harness import open_tasks
from eval.model.target import EvalTarget
from eval.suite_names import find_suite
from tests.ranks import events, launch
from tests.scripted_lm import ScriptedLM
from tests.support import ROOT, refused
from tests.variants import prefer_ids_from

CPU = torch.device("cpu")
SETTINGS = [
    ("copy", {"n": 6, "seq_len": 40}),
    ("mano", {"l": 3, "modulus": 5, "seq_len": 48}),
    ("depo1", {"n": 5, "k": 3, "vocab": 6, "seq_len": 96}),
    ("brevo1", {"n": 6, "seq_len": 80}),
    ("lano", {"root": 13, "seq_len": 48}),
    ("capo", {"people": 20, "seq_len": 150}),
]
every_task = pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=[s[0] for s in SETTINGS])


def model_args(task):
    """The sizes of a small model for a task."""
    return ModelArgs(
        vocab_size=task.vocab_size,
        num_layers=1,
        dim=32,
        num_heads=2,
        ffn_dim=48,
        max_seq_len=task.seq_len,
        canon_set="ABCD",
        position="rope",
    )


def identity_of(task):
    """The identity of a run of that small model on a task."""
    settings = {
        f"data.task.{key}": value for key, value in task.settings.items() if key != "seq_len"
    }
    model = {f"model.{name}": value for name, value in to_json(model_args(task)).items()}
    return {
        **settings,
        "data.task.name": task.name,
        "training.seq_len": task.seq_len,
        **model,
        "data_fingerprint": task.fingerprint,
    }


def plant_task_run(folder, task, padding=0):
    """Plant an untrained run; one of `padding` ids after the task's is always the likeliest."""
    args = replace(model_args(task), vocab_size=task.vocab_size + padding)
    model = Transformer(args)
    model.init_weights()
    if padding:
        prefer_ids_from(model, task.vocab_size)
    save_no_dist(dict(model.named_parameters()), folder / "checkpoint" / "step-3", step=3)
    identity = identity_of(task) | {"model.vocab_size": args.vocab_size}
    RunFolder(folder).write_config({"data": {"path": ""}}, identity)
    return folder


def open_task(task, limit=None, **options):
    """Open the suite for a task; return its plan."""
    name, path = find_suite("playground")
    metadata = {"identity": identity_of(task), **options}
    return open_tasks(name, path, metadata, limit, None)["playground"]


def questions(task, num_windows):
    """Return the questions of the first windows."""
    batches = evaluation_windows(task, num_windows)
    return [question for windows in batches for window in windows for question in window.questions]


def scripted(task, num_windows, answer):
    """A model that answers each question by `answer(its right answer)`."""
    right_answers = {
        tuple(question.prompt): question.answer for question in questions(task, num_windows)
    }

    def reply(request):
        prompt = tuple(map(int, request.args[0].split()))
        return " ".join(map(str, answer(right_answers[prompt])))

    return ScriptedLM(reply, lambda request: -1.0)


ANSWERERS = {
    "right": (lambda gold, vocab_size: gold, 1.0, "right"),
    # cut where it is complete
    "longer": (lambda gold, vocab_size: [*gold, 1, 1], 1.0, "right"),
    "wrong": (lambda gold, vocab_size: [token % (vocab_size - 1) + 1 for token in gold], 0.0, None),
    "empty": (lambda gold, vocab_size: [], 0.0, "empty"),
}


@every_task
@pytest.mark.parametrize("answerer", ANSWERERS)
def test_a_perfect_and_a_wrong_answerer(name, settings, answerer):
    answer, share, verdict = ANSWERERS[answerer]
    task = build_task(name, settings)
    plan = open_task(task, playground_windows=9)
    lm = scripted(task, 9, lambda gold: answer(gold, task.vocab_size))

    result = plan.run(lm, operator.call)["playground"]

    num_questions = len(lm.asked)
    counts = {kind: result.scores[kind].value for kind in VERDICTS}
    assert result.num_samples == 9
    assert sum(counts.values()) == num_questions
    assert counts["right"] == share * num_questions
    if verdict is not None:
        assert counts[verdict] == num_questions

    values = {name: score.value for name, score in result.scores.items() if name not in counts}
    assert {values[metric] for metric in task.metrics if metric in values} == {share}
    assert values.keys() <= plan.description["higher_is_better"].keys()
    assert plan.description["primary"] == [next(iter(values))]


def test_standard_errors_are_over_windows():
    task = build_task("copy", {"n": 3, "seq_len": 60})
    draw = random.Random(4)
    plan = open_task(task, limit=12, playground_windows=20)
    lm = scripted(task, 20, lambda gold: gold if draw.random() < 0.6 else gold[:1])

    result = plan.run(lm, operator.call)["playground"]

    num_right, num_questions = np.array([record["exact"] for record in result.samples]).T
    means = num_right / num_questions
    assert len(means) == 12
    assert result.num_samples == 12
    assert len(lm.asked) == 12 * 7
    assert set(means) != {0.0, 1.0}
    score = result.scores["exact"]
    assert score.value == pytest.approx(math.fsum(means) / 12, abs=1e-15)
    assert score.stderr == pytest.approx(np.std(means, ddof=1) / math.sqrt(12), rel=1e-12)


def test_parts_add_up_to_the_whole():
    """Every question counts once, however many its window has."""
    task = build_task("depo1", {"n": 4, "k": 2, "vocab": 9, "seq_len": 60})
    draw = random.Random(4)
    plan = open_task(task, playground_windows=30)
    lm = scripted(task, 30, lambda gold: gold if draw.random() < 0.5 else gold[:-1])

    result = plan.run(lm, operator.call)["playground"]

    parts = ("exact_k1", "exact_k2")
    counts = [record[part] for part in parts for record in result.samples if record.get(part)]
    num_right, num_questions = np.sum(counts, axis=0)
    scores = result.scores
    exact = scores["exact"].value
    assert num_questions == len(lm.asked)
    assert exact == pytest.approx(num_right / num_questions)
    assert exact == pytest.approx(scores["right"].value / len(lm.asked))

    of_parts = [scores[part].value for part in parts]
    assert min(of_parts) < exact < max(of_parts)
    assert scores["exact"].stderr > 0
    for name in ("exact", *parts):  # as training logs them
        of_windows = [record[name] for record in result.samples if record.get(name)]
        assert scores[name].stderr == pytest.approx(pooled_stderr(of_windows), rel=1e-9)


def evaluate(model, out=None):
    """Run `eval run` on five windows of a run or an export; return its results and samples."""
    words = ["--suite", "playground", "--option", "playground_windows=5"]
    if out is not None:
        words += ["--out", str(out)]
    main(["run", "--checkpoint", str(model), *words])

    (folder,) = [out] if out else model.glob("evals/step-*/playground/*")
    results = read_results(folder / "results.json")
    assert results.num_samples["playground"] == 5
    return results.scores["playground"], read_samples(folder)


@every_task
def test_a_run_its_export_and_training_score_the_same(tmp_path, name, settings):
    task = build_task(name, settings)
    run = plant_task_run(tmp_path / "run", task)
    out = tmp_path / "out"
    export(run, out)

    scores, samples = evaluate(run)

    assert (scores, samples) == evaluate(out, tmp_path / "scores")
    assert sum(scores.pop(kind).value for kind in VERDICTS) == len(questions(task, 5))
    # transformers reads the same ids
    tokenizer = json.loads((out / "tokenizer.json").read_text())
    assert tokenizer == json.loads(id_tokenizer(task.vocab_size))

    # as validations do: divergences are at all positions then
    logged = TaskScores(task, 5).measure(load_model(run / "checkpoint" / "step-3", CPU))
    assert logged.keys() == scores.keys()
    assert {"exact", "valid"} & logged.keys()
    for metric, score in scores.items():
        rel = 0.1 if metric == "kl" else 1e-6
        assert logged[metric].mean == pytest.approx(score.value, rel=rel), metric


def test_ids_that_pad_the_vocabulary_are_no_answer(tmp_path):
    task = build_task(*SETTINGS[0])
    run = plant_task_run(tmp_path / "run", task, padding=40)
    out = tmp_path / "out"
    export(run, out)

    tokenizer = json.loads((out / "tokenizer.json").read_text())
    assert tokenizer == json.loads(id_tokenizer(task.vocab_size))
    assert evaluate(run) == evaluate(out, tmp_path / "scores")

    model = load_model(run / "checkpoint" / "step-3", CPU)
    answers = TaskScores(task, 4)._answers(model)
    assert max(token for answer in filter(None, answers) for token in answer) < task.vocab_size


def log_probabilities(model, ids):
    """Return the log-probabilities of the next token at each position, in float64, as lists."""
    with torch.no_grad():
        return model(torch.from_numpy(ids)[None])[0].double().log_softmax(-1).tolist()


def divergence_by_loops(task, model, ids):
    """Lano's mean divergence of the model from the true distribution, in nats."""
    logs = log_probabilities(model, ids)
    truth = task.distribution(ids)[:-1].tolist()
    total = 0.0
    for p_of_position, log_q_of_position in zip(truth, logs, strict=False):
        for p, log_q in zip(p_of_position, log_q_of_position, strict=True):
            if p:
                total += p * (math.log(p) - log_q)
    return total / len(truth)


def bits_per_parameter_by_loops(task, model, ids):
    """Capo's bits of knowledge per parameter by part 3.3's formula, for 20 people."""
    logs = log_probabilities(model, ids)
    roles = task.token_roles(ids[None])[0].tolist()
    nats = 0.0
    people = 0
    for at, role in enumerate(roles):
        people += ids[at] == 1 and at + 1 < len(ids) and ids[at + 1] != 1
        if ROLES[role] not in ("none", "working_city"):
            nats -= logs[at - 1][ids[at]]

    names = 400 * 400 * 1000
    attributes = 2 * 12 * 28 * 200 * 200 * 300 * 100 * 263
    bits = 20 * (math.log2(names) - nats / people / math.log(2))
    bits += 20 * math.log2(attributes)
    return bits / sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(
    ("name", "settings", "metric", "by_loops"),
    [
        (*SETTINGS[-2], "kl", divergence_by_loops),
        (*SETTINGS[-1], "bits_per_parameter", bits_per_parameter_by_loops),
    ],
    ids=["lano", "capo"],
)
def test_scores_from_likelihoods_equal_loops(name, settings, metric, by_loops):
    """Lano's divergence, and Capo's bits, from whole windows' logits."""
    task = build_task(name, settings)
    model = Transformer(model_args(task))
    model.init_weights()

    scores = TaskScores(task, 4).measure(model)

    windows = task.windows(0, 0, 4, EVALUATION).ids
    expected = np.mean([by_loops(task, model, ids) for ids in windows])
    assert scores[metric].mean == pytest.approx(expected, rel=1e-5)


@pytest.mark.system
def test_validations_on_two_ranks_equal_eval(tmp_path):
    run = tmp_path / "run"
    launch(
        *("--config", ROOT / "train_configs" / "debug.toml"),
        *("--job.dump_folder", run),
        *("--data.task.name", "mano", "--data.task.l", 2, "--data.task.modulus", 3),
        *("--validation.windows", 3, "--validation.last_windows", 5, "--validation.freq", 10),
        *("--training.steps", 20),
        ranks=2,
        output=tmp_path / "out",
    )
    scores, _ = evaluate(run)

    first, last = events(run, "validation")
    assert (first["step"], last["step"]) == (10, 20)
    assert first["scores"].keys() == last["scores"].keys()
    assert last["scores"] == {metric: scores[metric].value for metric in last["scores"]}
    assert last["score_stderrs"].keys() == last["scores"].keys()
    assert 0 < last["scores"]["exact"] < 1


def test_other_models_and_options_are_refused(tmp_path):
    task = build_task("copy", {"n": 6, "seq_len": 40})
    with refused("playground.windows", given="0"):
        open_task(task, playground_windows="0")
    with refused("playground.no_task"):
        open_tasks(*find_suite("playground"), {}, None, None)

    run = plant_task_run(tmp_path / "run", task)
    with refused("eval.no_data"):
        EvalTarget.open(run).check_held_out()
    with refused("tokenizer.not_ids"):
        EvalTarget.open(run).tokenizer.encode("3 of")
