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
from canon_pretrain.synthetic.evaluation import task_of_run
from canon_pretrain.synthetic.task import EVALUATION
from canon_pretrain.synthetic.tasks import RELEASED, TASKS, TaskSection
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.data import CanonDataLoader, open_data
from canon_pretrain.titan.dry_run import Plan, this_machine
from canon_pretrain.titan.job_config import CanonJobConfig
from canon_pretrain.titan.launch import check_identity, run_identity
from canon_pretrain.titan.scores import TaskScores
from canon_pretrain.titan.tasks import TaskWindows
from canon_pretrain.titan.trainer import CanonTrainer
from canon_pretrain.titan.validation import CanonValidator
from tests.ranks import assert_refused, events, launch
from tests.support import ROOT, refused

DEBUG = ["--config", str(ROOT / "train_configs" / "debug.toml")]
COPY = [*DEBUG, "--data.task.name", "copy", "--data.task.n", "8"]
TASK = Copy(n=8, seq_len=64)
IGNORED = -100
BATCH = 12
DATA_SEED = 5


def job_of(name, seq_len=2048, **settings):
    """Return a job of the task with these settings."""
    job = CanonJobConfig()
    job.data = Data(task=TaskSection(name, **settings))
    job.training.seq_len = seq_len
    job.training.global_batch_size = BATCH
    return job


def test_the_model_needs_an_id_for_each_word():
    # 8 words and 3 of the task's own
    job = job_of("copy", 64, n=8)
    assert open_data(job).training.fingerprint == TASK.fingerprint
    assert job.model.vocab_size == 11
    assert job.validation.enable is True

    # more is right, fewer is refused
    job.model.vocab_size = 16
    open_data(job)
    job.model.vocab_size = 10
    with refused("data.vocab_size", given=10, expected=11):
        open_data(job)
    with refused("data.vocab_size"):
        plan_job([*COPY, "--model.vocab_size", "10"], 1, 1)


def test_a_task_is_planned_without_files():
    plan = Plan(job_of("copy", 64, n=8), this_machine(1), 1)
    assert plan.data_fingerprint == TASK.fingerprint
    assert plan.data_bytes == 0


def test_every_setting_is_a_key():
    keys = {field.name for field in dataclasses.fields(TaskSection)}
    classes = [*TASKS.values(), *RELEASED.values()]
    settings = {field.name for cls in classes for field in dataclasses.fields(cls)}
    assert keys | {"seq_len"} == settings | {"name"}


def test_a_released_task_has_the_ids_of_the_release():
    """The model's vocabulary follows; runs without it have the identity that they had."""
    options = [*DEBUG, "--data.task.name", "brevo1", "--data.task.n", "8"]
    plain = parse_job(options)
    released = parse_job([*options, "--data.task.release", "true"])
    identities = [open_data(job).identity for job in (plain, released)]
    assert [job.model.vocab_size for job in (plain, released)] == [13, 10_000]
    assert "data.task.release" not in identities[0]
    assert identities[1]["data.task.release"] is identities[1]["data.task.last_query"] is True
    assert task_of_run(identities[1] | {"training.seq_len": 64}) == released.task
    with refused("task.setting", key="last_query", given=False):
        other = ["--data.task.release", "true", "--data.task.last_query", "false"]
        open_data(parse_job([*options, *other]))


@pytest.mark.parametrize("name", TASKS)
def test_an_unchanged_task_is_the_same_run(name, tmp_path):
    job = job_of(name)
    opened = open_data(job)
    identity = run_identity(job, opened.training.fingerprint, opened.identity)
    run = RunFolder(tmp_path)
    run.write_config({}, identity, {})
    assert check_identity(run, identity, [], {}) == {}


@pytest.mark.parametrize(("values", "setting"), [(["2"], 2), (["1", "3"], [1, 3])])
def test_the_identity_has_one_number_or_several(values, setting):
    job = parse_job([
        *DEBUG,
        *("--training.seq_len", "2048"),
        *("--data.task.name", "depo1"),
        *("--data.task.name_tokens", *values),
    ])  # fmt: skip
    assert open_data(job).identity["data.task.name_tokens"] == setting


def loaders(world_size, local_batch_size):
    """Return the loaders of all ranks."""
    return [
        BatchLoader(
            TaskWindows(TASK),
            data_seed=DATA_SEED,
            dp_rank=rank,
            dp_world_size=world_size,
            seq_len=64,
            global_batch_size=BATCH,
            local_batch_size=local_batch_size,
        )
        for rank in range(world_size)
    ]


def test_windows_are_the_same_at_any_world_size():
    ids, kinds = TASK.windows(DATA_SEED, 0, 2 * BATCH)
    is_counted = TASK.is_counted(kinds)

    states = []
    digests = []
    for world_size, local_batch_size in ((1, 12), (1, 2), (2, 3), (3, 4)):
        ranks = loaders(world_size, local_batch_size)
        batches = []
        while ranks[0].next_sample < 2 * BATCH:
            batches += [loader.next_batch() for loader in ranks]
        rows = np.concatenate(batches)
        states += [loader.state_dict() for loader in (ranks[0], ranks[-1])]
        digests.append(samples_digest(rows))

        # ids that are not counted are complements; the last column has no label
        np.testing.assert_array_equal(np.where(rows < 0, ~rows, rows)[:, :-1], ids)
        np.testing.assert_array_equal(rows[:, :-1] >= 0, is_counted)
        assert (rows[:, -1] == ~0).all()

    assert states == [states[0]] * 8
    assert digests == [digests[0]] * 4
    assert states[0]["source_tokens"] == [2 * BATCH * 64]


def test_labels_are_a_token_ahead_and_masked():
    (loader,) = loaders(1, BATCH)
    dataloader = CanonDataLoader(loader, read_ahead=2)

    inputs, labels = next(iter(dataloader))
    dataloader.close()

    ids, kinds = TASK.windows(DATA_SEED, 0, BATCH)
    expected = np.where(TASK.is_counted(kinds), ids, IGNORED)
    assert np.array_equal(inputs["input"], ids)
    assert np.array_equal(labels[:, :-1], expected[:, 1:])
    assert (labels[:, -1] == IGNORED).all()
    assert (labels != IGNORED).any()


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

    # nats and labels of two ranks
    ((nats_0, count_0),) = CanonValidator(job, parts, 0, 2).measure(model)
    ((nats_1, count_1),) = CanonValidator(job, parts, 1, 2).measure(model)

    expected, num_labels = mean_loss(model, TASK.windows(0, 0, 5, EVALUATION))
    assert count_0 + count_1 == num_labels
    assert (nats_0 + nats_1) / num_labels == pytest.approx(expected, rel=1e-6)


def test_the_last_step_asks_about_more_windows(monkeypatch):
    job = parse_job([*COPY, "--validation.windows", "2", "--validation.last_windows", "5"])
    parts = open_data(job).held_out
    model = Transformer(job.model_args)
    model.init_weights()
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    validator = CanonValidator(job, parts, 0, 1)

    before = validator.validate([model], job.training.steps - 1)
    last = validator.validate([model], job.training.steps)

    for fields, num_windows in ((before, 2), (last, 5)):
        expected = TaskScores(TASK, num_windows).measure(model)
        assert fields["scores"] == {name: score.mean for name, score in expected.items()}
        assert fields["score_stderrs"] == {name: score.stderr for name, score in expected.items()}
    assert before["tokens_scored"] == last["tokens_scored"]  # the loss is of the same windows


def test_a_step_without_counted_labels_divides_by_one(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    trainer = object.__new__(CanonTrainer)
    trainer.device = torch.device("cpu")
    labels = torch.full((2, 3), IGNORED)
    assert [count.item() for count in trainer._count_labels([labels])] == [1, 0]

    labels[0, 1] = 5
    assert [count.item() for count in trainer._count_labels([labels, labels])] == [2, 1]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run on one rank, in micro-batches of 12 windows."""
    base = tmp_path_factory.mktemp("task")
    launch(
        *copy_run(base / "run"),
        *("--training.local_batch_size", BATCH),
        ranks=1,
        output=base / "out",
    )
    return base / "run"


def copy_run(run):
    """Return the command line of 6 steps of the task, with a z-loss, into `run`."""
    return [
        *COPY,
        *("--job.dump_folder", run),
        *("--training.steps", 6),
        *("--validation.freq", 3),
        *("--checkpoint.interval", 2),
        *("--loss.z_loss", 1e-4),
    ]


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
    assert first["objective"] > first["loss"]
    assert first["source_tokens"] == {"copy": BATCH * 64}


@pytest.mark.system
def test_the_log_of_a_task_has_no_figures_of_text(straight):
    for event in events(straight, "validation"):
        assert "bits_per_byte" not in event
        assert event["held_out_fingerprint"] == TASK.fingerprint
    assert not events(straight, "count_models")
    identity = RunFolder(straight).read_config()["identity"]
    assert identity["data.task.name"] == "copy"
    assert identity["data.task.n"] == 8


@pytest.mark.system
def test_elastic_with_smaller_micro_batches(straight, tmp_path):
    """Stopped on two ranks, resumed on one; a changed setting is refused until allowed."""
    run = tmp_path / "run"

    def launch_run(*options, ranks=1, check=True):
        return launch(*copy_run(run), *options, ranks=ranks, check=check, output=tmp_path / "out")

    launch_run("--run.stop_at", 3, "--training.local_batch_size", 2, ranks=2)

    # changed settings
    too_small = launch_run("--data.task.n", "9", "--model.vocab_size", "11", check=False)
    assert_refused(too_small, "data.vocab_size")
    changed = launch_run("--data.task.loss_on", "all", check=False)
    assert_refused(changed, "run.changed")
    assert "data.task.loss_on" in changed.output

    # resumed, with the losses and samples of the other run
    launch_run()
    assert "--suite playground" in (run / "README.md").read_text()
    for name in ("step", "validation"):
        for event, expected in zip(events(run, name), events(straight, name), strict=True):
            assert event["step"] == expected["step"]
            assert event["tokens"] == expected["tokens"]
            assert event["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert event.get("data_digests") == expected.get("data_digests")
