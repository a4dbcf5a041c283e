"""The suite `playground`: scores of synthetic tasks through lm_eval, of runs and their exports."""

import json
import math
import operator
import random
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from canon_pretrain.checkpoint.writer import save_no_dist
from canon_pretrain.data.id_tokenizer import id_tokenizer
from canon_pretrain.hf.export import export
from canon_pretrain.hf.loading import load_model
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.results import read_results, read_samples
from canon_pretrain.synthetic.capo import ROLES
from canon_pretrain.synthetic.evaluation import VERDICTS, evaluation_windows
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
    return ModelArgs(
        vocab_size=task.vocab_size, num_layers=1, dim=32, num_heads=2, ffn_dim=48,
        max_seq_len=task.seq_len, canon_set="ABCD", position="rope",
    )  # fmt: skip


def identity_of(task):
    found = {f"data.task.{key}": value for key, value in task.settings.items() if key != "seq_len"}
    found |= {"data.task.name": task.name, "training.seq_len": task.seq_len}
    found |= {f"model.{name}": value for name, value in asdict(model_args(task)).items()}
    return found | {"data_fingerprint": task.fingerprint}


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
    name, path = find_suite("playground")
    metadata = {"identity": identity_of(task), **options}
    return open_tasks(name, path, metadata, limit, None)["playground"]


def questions(task, windows):
    asked = evaluation_windows(task, windows)
    return [question for window in asked for one in window for question in one.questions]


def scripted(task, windows, answer):
    """A model that answers each question by `answer(its right answer)`."""
    known = {tuple(question.prompt): question.answer for question in questions(task, windows)}

    def reply(request):
        return " ".join(map(str, answer(known[tuple(map(int, request.args[0].split()))])))

    return ScriptedLM(reply, lambda request: -1.0)


@every_task
def test_a_perfect_and_a_wrong_answerer(name, settings):
    task = build_task(name, settings)
    plan = open_task(task, playground_windows=9)
    for answer, score, verdict in (
        (lambda gold: gold, 1.0, "right"),
        (lambda gold: [*gold, 1, 1], 1.0, "right"),  # cut where it is complete
        (lambda gold: [token % (task.vocab_size - 1) + 1 for token in gold], 0.0, None),
        (lambda gold: [], 0.0, "empty"),
    ):
        lm = scripted(task, 9, answer)
        found = plan.run(lm, operator.call)["playground"]
        assert found.num_samples == 9
        counts = {kind: found.scores[kind].value for kind in VERDICTS}
        assert sum(counts.values()) == len(lm.asked) and counts["right"] == score * len(lm.asked)
        assert verdict is None or counts[verdict] == len(lm.asked)
        values = {key: each.value for key, each in found.scores.items() if key not in counts}
        assert {values[metric] for metric in task.metrics if metric in values} == {score}
        assert values.keys() <= plan.description["higher_is_better"].keys()
        assert plan.description["primary"] == [next(iter(values))]


def test_standard_errors_are_over_windows():
    task, draw = build_task("copy", {"n": 3, "seq_len": 60}), random.Random(4)
    plan = open_task(task, limit=12, playground_windows=20)
    lm = scripted(task, 20, lambda gold: gold if draw.random() < 0.6 else gold[:1])
    found = plan.run(lm, operator.call)["playground"]
    pairs = np.array([record["exact"] for record in found.samples])
    means = pairs[:, 0] / pairs[:, 1]
    assert len(means) == found.num_samples == 12 and len(lm.asked) == 12 * 7
    assert set(means) != {0.0, 1.0}
    score = found.scores["exact"]
    assert score.value == pytest.approx(math.fsum(means) / 12, abs=1e-15)
    assert score.stderr == pytest.approx(np.std(means, ddof=1) / math.sqrt(12), rel=1e-12)


def test_parts_add_up_to_the_whole():
    """Every question counts once, however many its window has."""
    task, draw = build_task("depo1", {"n": 4, "k": 2, "vocab": 9, "seq_len": 60}), random.Random(4)
    plan = open_task(task, playground_windows=30)
    lm = scripted(task, 30, lambda gold: gold if draw.random() < 0.5 else gold[:-1])
    found = plan.run(lm, operator.call)["playground"]
    parts = [[record.get(f"exact_k{k}") for record in found.samples] for k in (1, 2)]
    sums = np.sum([x for part in parts for x in part if x], axis=0)
    exact = found.scores["exact"].value
    assert sums[1] == len(lm.asked) and exact == pytest.approx(sums[0] / sums[1])
    assert exact == pytest.approx(found.scores["right"].value / len(lm.asked))
    of_parts = [found.scores[f"exact_k{k}"].value for k in (1, 2)]
    assert min(of_parts) < exact < max(of_parts)
    assert found.scores["exact"].stderr > 0 and found.scores["exact_k1"].stderr > 0


def evaluate(run, *options):
    """The results of `eval run` on five windows of a run's newest checkpoint, and its samples."""
    words = ["--suite", "playground", "--option", "playground_windows=5", *map(str, options)]
    main(["run", "--checkpoint", str(run), *words])
    (folder,) = [options[1]] if options else run.glob("evals/step-*/playground/*")
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
    assert (scores, samples) == evaluate(out, "--out", tmp_path / "scores")
    assert sum(scores.pop(kind).value for kind in VERDICTS) == len(questions(task, 5))
    # as validations do: divergences are at all positions then
    logged = TaskScores(task, 5).measure(load_model(run / "checkpoint" / "step-3", CPU))
    assert logged.keys() == scores.keys() and {"exact", "valid"} & logged.keys()
    for metric, score in scores.items():
        rel = 0.1 if metric == "kl" else 1e-6
        assert logged[metric] == pytest.approx(score.value, rel=rel), metric
    # transformers reads the same ids
    written = json.loads((out / "tokenizer.json").read_text())
    assert written == json.loads(id_tokenizer(task.vocab_size))


def test_ids_that_pad_the_vocabulary_are_no_answer(tmp_path):
    task = build_task(*SETTINGS[0])
    run = plant_task_run(tmp_path / "run", task, padding=40)
    export(run, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "tokenizer.json").read_text())
    assert written == json.loads(id_tokenizer(task.vocab_size))
    scores, samples = evaluate(run)
    assert (scores, samples) == evaluate(tmp_path / "out", "--out", tmp_path / "scores")
    model = load_model(run / "checkpoint" / "step-3", CPU)
    answers = TaskScores(task, 4)._answers(model)
    assert max(map(max, filter(None, answers))) < task.vocab_size


@pytest.mark.parametrize(("name", "settings"), SETTINGS[-2:], ids=["lano", "capo"])
def test_scores_from_likelihoods_equal_loops(name, settings):
    """Lano's divergence, and Capo's bits by part 3.3's formula, from whole windows' logits."""
    task = build_task(name, settings)
    model = Transformer(model_args(task))
    model.init_weights()
    found = TaskScores(task, 4).measure(model)
    expected = []
    for ids in task.windows(0, 0, 4, EVALUATION).ids:
        with torch.no_grad():
            logs = model(torch.from_numpy(ids)[None])[0].double().log_softmax(-1).tolist()
        total, people = 0.0, 0
        if name == "lano":
            truth = task.distribution(ids)[:-1]
            for p, q in zip(truth.tolist(), logs, strict=False):
                total += sum(x * (math.log(x) - y) for x, y in zip(p, q, strict=True) if x)
            expected.append(total / len(truth))
            continue
        for at, role in enumerate(task.token_roles(ids[None])[0].tolist()):
            people += ids[at] == 1 and at + 1 < len(ids) and ids[at + 1] != 1
            if ROLES[role] not in ("none", "working_city"):
                total -= logs[at - 1][ids[at]]
        known = 20 * (math.log2(400 * 400 * 1000) - total / people / math.log(2))
        known += 20 * math.log2(2 * 12 * 28 * 200 * 200 * 300 * 100 * 263)
        expected.append(known / sum(weight.numel() for weight in model.parameters()))
    metric = "kl" if name == "lano" else "bits_per_parameter"
    assert found[metric] == pytest.approx(np.mean(expected), rel=1e-5)


@pytest.mark.system
def test_validations_on_two_ranks_equal_eval(tmp_path):
    run = tmp_path / "run"
    config = ["--config", ROOT / "train_configs" / "debug.toml", "--job.dump_folder", run]
    more = ["--data.task.name", "mano", "--data.task.l", 2, "--data.task.modulus", 3]
    more += ["--validation.windows", 5, "--validation.freq", 10, "--training.steps", 20]
    launch(*config, *more, ranks=2, output=tmp_path / "out")
    first, last = events(run, "validation")
    assert (first["step"], last["step"]) == (10, 20) and first["scores"].keys() == last[
        "scores"
    ].keys()
    scores, _ = evaluate(run)
    found = {metric: scores[metric].value for metric in last["scores"]}
    assert last["scores"] == found and 0 < found["exact"] < 1


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
