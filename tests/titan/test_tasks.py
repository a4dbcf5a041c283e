"""Training on a synthetic task: its windows, masked labels, and the loss's divisor."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist

from canon_pretrain.cluster.preflight import plan_job
from canon_pretrain.data.loader import BatchLoader, samples_digest
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.sections import Data
from canon_pretrain.synthetic.copying import Copy
from canon_pretrain.synthetic.task import EVALUATION
from canon_pretrain.synthetic.tasks import TASKS, TaskSection, build_task
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.data import CanonDataLoader, open_data
from canon_pretrain.titan.dry_run import Plan, this_machine
from canon_pretrain.titan.job_config import CanonJobConfig
from canon_pretrain.titan.launch import check_identity, run_identity
from canon_pretrain.titan.tasks import TaskWindows
from canon_pretrain.titan.trainer import CanonTrainer
from canon_pretrain.titan.validation import CanonValidator
from tests.ranks import assert_refused, events, launch
from tests.support import ROOT, refused

DEBUG = ["--config", str(ROOT / "train_configs" / "debug.toml")]
COPY = [*DEBUG, "--data.task.name", "copy", "--data.task.n", "8"]
TASK = Copy(n=8, seq_len=64)
IGNORED, BATCH = -100, 12


def job_of(name, seq_len=2048, **settings):
    job = CanonJobConfig()
    job.data = Data(task=TaskSection(name, **settings))
    job.training.seq_len, job.training.global_batch_size = seq_len, BATCH
    return job


def test_the_model_needs_an_id_for_each_word():
    job = job_of("copy", 64, n=8)
    assert open_data(job).training.fingerprint == TASK.fingerprint
    assert (job.model.vocab_size, job.validation.enable) == (11, True)
    job.model.vocab_size = 16
    open_data(job)
    job.model.vocab_size = 10
    with refused("data.vocab_size", given=10, expected=11):
        open_data(job)
    with refused("data.vocab_size"):
        plan_job([*COPY, "--model.vocab_size", "10"], 1, 1)
    plan = Plan(job_of("copy", 64, n=8), this_machine(1), 1)
    assert (plan.data_fingerprint, plan.data_bytes) == (TASK.fingerprint, 0)


def test_every_setting_is_a_key_and_part_of_the_identity(tmp_path):
    keys = {field.name for field in dataclasses.fields(TaskSection)} | {"seq_len"}
    assert keys == {"name"}.union(*(build_task(name, {}).settings for name in TASKS))
    for name in TASKS:
        opened = open_data(job := job_of(name))
        identity = run_identity(job, opened.training.fingerprint, opened.identity)
        run = RunFolder(tmp_path / name)
        run.path.mkdir()
        run.write_config({}, identity, {})
        assert check_identity(run, identity, [], {}) == {}
    words = ["--training.seq_len", "2048", "--data.task.name", "depo1", "--data.task.name_tokens"]
    for given, expected in (["2"], 2), (["1", "3"], [1, 3]):
        opened = open_data(parse_job([*DEBUG, *words, *given]))
        assert opened.identity["data.task.name_tokens"] == expected


def loaders(world, local):
    sizes = {"seq_len": 64, "global_batch_size": BATCH, "local_batch_size": local}
    for rank in range(world):
        yield BatchLoader(
            TaskWindows(TASK), data_seed=5, dp_rank=rank, dp_world_size=world, **sizes
        )


def test_windows_are_the_same_at_any_world_size():
    ids, kinds = TASK.windows(5, 0, 2 * BATCH)
    counted = TASK.is_counted(kinds)
    digest, state = None, None
    for world, local in ((1, 12), (1, 2), (2, 3), (3, 4)):
        rows = []
        ranks = list(loaders(world, local))
        while ranks[0].next_sample < 2 * BATCH:
            rows += [loader.next_batch() for loader in ranks]
        found = np.concatenate(rows)
        np.testing.assert_array_equal(np.where(found < 0, ~found, found)[:, :-1], ids)
        np.testing.assert_array_equal(found[:, :-1] >= 0, counted)
        assert (found[:, -1] == ~0).all()
        assert state in (None, ranks[0].state_dict()) and digest in (None, samples_digest(found))
        state, digest = ranks[-1].state_dict(), samples_digest(found)
    assert state["source_tokens"] == [2 * BATCH * 64]


def test_labels_are_a_token_ahead_and_masked():
    (plain,) = loaders(1, BATCH)
    with_mask = CanonDataLoader(plain, read_ahead=2)
    inputs, labels = next(iter(with_mask))
    with_mask.close()
    ids, kinds = TASK.windows(5, 0, BATCH)
    assert np.array_equal(inputs["input"], ids)
    assert np.array_equal(labels[:, :-1], np.where(TASK.is_counted(kinds), ids, IGNORED)[:, 1:])
    assert (labels[:, -1] == IGNORED).all() and (labels != IGNORED).any()


def mean_loss(model, windows):
    """Return the mean cross-entropy over the counted labels, in float64, and their number."""
    nats = []
    for ids, kinds in zip(*windows, strict=True):
        logits = model(torch.from_numpy(ids[None]))[0].double().log_softmax(-1)
        for place in range(len(ids) - 1):
            if kinds[place + 1] != 0:
                nats.append(-logits[place, ids[place + 1]].item())
    return np.mean(nats), len(nats)


@torch.no_grad()
def test_validation_is_the_mean_over_counted_labels(monkeypatch):
    job = parse_job([*COPY, "--validation.windows", "5"])
    parts = open_data(job).held_out
    model = Transformer(job.model_args)
    model.init_weights()
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    sums = [CanonValidator(job, parts, rank, 2).measure(model)[0] for rank in (0, 1)]
    nats, counts = map(sum, zip(*sums, strict=True))
    expected, number = mean_loss(model, TASK.windows(0, 0, 5, EVALUATION))
    assert (nats / counts, counts) == (pytest.approx(expected, rel=1e-6), number)


def test_a_step_without_counted_labels_divides_by_one(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    trainer = object.__new__(CanonTrainer)
    trainer.device = torch.device("cpu")
    labels = torch.full((2, 3), IGNORED)
    assert [x.item() for x in trainer._count_labels([labels])] == [1, 0]
    labels[0, 1] = 5
    assert [x.item() for x in trainer._count_labels([labels, labels])] == [2, 1]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """One rank, micro-batches of 12 windows, 6 steps, with a z-loss."""
    base = tmp_path_factory.mktemp("task")
    launch(*words(base / "run"), "--training.local_batch_size", BATCH, ranks=1, output=base / "out")
    return base / "run"


def words(run):
    own = ["--training.steps", 6, "--validation.freq", 3, "--loss.z_loss", 1e-4]
    return [*COPY, *own, "--checkpoint.interval", 2, "--job.dump_folder", run]


@pytest.mark.system
@torch.no_grad()
def test_the_loss_is_the_mean_over_the_global_batch(straight):
    job = parse_job(COPY)
    open_data(job)
    model = Transformer(job.model_args)
    model.init_weights()
    expected, _ = mean_loss(model, TASK.windows(0, 0, BATCH))
    first = events(straight, "step")[0]
    assert first["loss"] == first["max_loss"] == pytest.approx(expected, rel=1e-6)
    assert first["objective"] > first["loss"] and first["source_tokens"] == {"copy": BATCH * 64}
    for event in events(straight, "validation"):
        assert "bits_per_byte" not in event and event["held_out_fingerprint"] == TASK.fingerprint
    assert not events(straight, "count_models")
    identity = RunFolder(straight).read_config()["identity"]
    assert (identity["data.task.name"], identity["data.task.n"]) == ("copy", 8)


@pytest.mark.system
def test_elastic_with_smaller_micro_batches(straight, tmp_path):
    """Stopped on two ranks, resumed on one; a changed setting is refused until allowed."""
    run = words(tmp_path / "run")
    options = {"output": tmp_path / "out"}
    launch(*run, "--run.stop_at", 3, "--training.local_batch_size", 2, ranks=2, **options)
    changed = [*run, "--data.task.n", "9", "--model.vocab_size", "11"]
    ended = launch(*changed, ranks=1, check=False, **options)
    assert_refused(ended, "data.vocab_size")
    ended = launch(*run, "--data.task.loss_on", "all", ranks=1, check=False, **options)
    assert_refused(ended, "run.changed")
    assert "data.task.loss_on" in ended.output
    launch(*run, ranks=1, **options)
    assert "--suite playground" in (tmp_path / "run" / "README.md").read_text()
    for name in ("step", "validation"):
        for mine, whole in zip(events(tmp_path / "run", name), events(straight, name), strict=True):
            assert mine["step"] == whole["step"] and mine["tokens"] == whole["tokens"]
            assert mine["loss"] == pytest.approx(whole["loss"], rel=1e-5)
            assert mine.get("data_digests") == whole.get("data_digests")
