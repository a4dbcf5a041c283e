"""Steps that are not finite, and changes of a run's hyperparameters."""

import json
import math
import os
import re
import signal

import pytest
import torch

from canon_pretrain.run.folder import RunFolder
from canon_pretrain.titan.trainer import CanonTrainer
from tests.fault_runs import EVERY_2, checkpoint, copy, steps, wrap
from tests.ranks import (
    assert_refused,
    assert_same_run,
    differences,
    events,
    logged_step,
    status,
    whole_state,
)

BATCH = 12
SEQ_LEN = 64
TOKENS_PER_STEP = BATCH * SEQ_LEN


def state_at(run, step):
    return whole_state(checkpoint(run, step))


def is_trained(name):
    """Return whether the optimizer changes it: weights, moments, their step counts."""
    if name.startswith("optimizer."):
        return name.startswith("optimizer.state.")
    return not name.startswith(("lr_scheduler", "dataloader", "train_state", "guards"))


@pytest.fixture
def half(base, trial):
    """A copy of the unharmed run up to step 8."""
    run = copy(base, trial.run, last=8)
    RunFolder(run).done_file.unlink()
    return run


def break_steps(rank, faults):
    """Break steps by number -> (kind, rank): `nan` in a gradient, or `inf_loss`."""
    original = CanonTrainer.forward_backward_step

    def forward_backward_step(self, **arguments):
        loss = original(self, **arguments)
        kind, faulty_rank = faults.get(self.step, (None, None))
        if rank != faulty_rank:
            return loss

        if kind == "inf_loss":
            return torch.full_like(loss, math.inf)
        assert kind == "nan"
        parameter = self.model_parts[0].layers["0"].attention.wq.weight
        parameter.grad.to_local().view(-1)[0] = math.nan
        return loss

    CanonTrainer.forward_backward_step = forward_backward_step  # type: ignore[method-assign]


def die_at(rank, step):
    """kill -9 by itself, in the middle of `step`."""

    def die(trainer, data):
        if trainer.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    wrap(CanonTrainer, "train_step", before=die)


def test_a_bad_step_changes_no_weight_on_any_rank(trial):
    """A NaN in one gradient of rank 1 at step 2, an infinite loss of rank 0 at step 4."""
    run = trial.run
    faults = {2: ("nan", 1), 4: ("inf_loss", 0)}
    trial.launch(
        *EVERY_2,
        *("--training.steps", 5),
        *("--checkpoint.interval", 1),
        before=(break_steps, faults),
    )
    states = {step: state_at(run, step) for step in range(1, 6)}

    # a bad step takes its batch and its learning rate, and changes no weight; the next one does
    for step in faults:
        before = states[step - 1]
        after = states[step]
        changed = differences(before, after)
        assert not any(is_trained(name) for name in changed), changed
        assert after["train_state.tokens"] == step * TOKENS_PER_STEP
        assert after["dataloader.next_sample"] == step * BATCH
        assert after["lr_scheduler.last_epoch"] == before["lr_scheduler.last_epoch"] + 1

        trained = {name for name in after if is_trained(name)}
        assert len(trained) > 50
        assert trained <= {*differences(after, states[step + 1])}

    # nothing that is not finite stays
    tensors = [value for value in states[5].values() if isinstance(value, torch.Tensor)]
    assert all(torch.isfinite(value).all() for value in tensors)
    assert states[5]["guards.counters"][:3].tolist() == [2, 0, 0]

    # the log names both steps and their cause
    nan_step, inf_step = events(run, "skip")
    for skip, step in ((nan_step, 2), (inf_step, 4)):
        assert (skip["step"], skip["reason"], skip["in_a_row"]) == (step, "not finite", 1)
    assert math.isnan(nan_step["grad_norm"])
    assert inf_step["loss"] == math.inf
    lines = events(run, "step")
    assert [line["step"] for line in lines] == list(range(1, 6))
    assert [line["step"] for line in lines if not math.isfinite(float(line["loss"]))] == [4]

    # a step event misses the last two steps; the final event counts all
    (done,) = events(run, "done")
    assert done["skipped_steps"] == 2
    assert 0 < done["cpu_seconds"] < 1000
    assert (status(run).state, status(run).skipped_steps) == ("done", 2)


def test_consecutive_bad_steps_end_the_run_on_a_good_state(base, trial):
    """Steps 5 to 7: step 4 is bitwise that of a run that stopped there, step 6 is archived."""
    run = trial.run
    faults = {step: ("nan", step % 2) for step in (5, 6, 7)}
    command = (*EVERY_2, "--guards.max_bad_steps", 3, "--checkpoint.interval", 3)

    ended = trial.launch(*command, check=False, before=(break_steps, faults))

    assert_refused(ended, "train.not_finite")
    assert status(run).state == "failed"
    assert steps(run) == [3, 4]
    (archived,) = (run / "archive").rglob("step-6")
    assert (archived / "manifest.json").is_file()
    (halt,) = events(run, "halt")
    assert (halt["step"], halt["good_step"], halt["skipped_steps"]) == (7, 4, 0)
    assert [event["in_a_row"] for event in events(run, "skip")] == [1, 2, 3]
    assert differences(state_at(run, 4), state_at(base, 4)) == []

    # the next launch continues from the good state
    trial.launch(*command, "--run.stop_at", 8)
    assert_same_run(run, base, step=8)


def count_waits(rank, report):
    """Count the host's reads of tensor values per step."""
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    reading_operators = (aten._local_scalar_dense, aten.is_nonzero, aten.nonzero, aten.equal)
    original = CanonTrainer.train_step
    reads_of_step = list[str]()
    counts = dict[int, int]()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in reading_operators:
                reads_of_step.append(str(func))
            return func(*args, **(kwargs or {}))

    def train_step(self, data):
        reads_of_step.clear()
        with Watch():
            original(self, data)
        counts[self.step] = len(reads_of_step)
        report.write_text(json.dumps(counts))

    for name in ("tolist", "numpy"):
        wrap(torch.Tensor, name, before=lambda *_, name=name: reads_of_step.append(name))
    CanonTrainer.train_step = train_step  # type: ignore[method-assign]


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_only_logged_steps_read_values_from_the_device(optimizer, trial):
    """On a GPU each such read would wait for the step; on a CPU they can be counted."""
    report = trial.folder / "report.json"
    trial.launch(
        *EVERY_2,
        *("--optimizer.name", optimizer),
        *("--metrics.log_freq", 10),
        *("--checkpoint.interval", 100),
        ranks=1,
        before=(count_waits, report),
    )
    counts = json.loads(report.read_text())

    # torch's one-time reads are over by step 3; reads of logged steps show that the watch works
    for step in (4, 5, 6, 7, 8, 9, 11):
        assert counts[str(step)] == 0
    assert counts["10"] > 0
    assert counts["12"] > 0


def test_a_change_takes_effect_once_it_is_allowed(half, base, trial):
    """The checkpoint does not override the new rate, weight decay and batch size."""
    changes = {
        "optimizer.lr": [3e-3, 1e-3],
        "optimizer.weight_decay": [0.03, 0.5],
        "training.global_batch_size": [BATCH, 8],
    }
    new_values = [word for name, (_, new) in changes.items() for word in (f"--{name}", new)]
    command = (*EVERY_2, *new_values, "--metrics.log_freq", 2)

    def checkpoint_times():
        return {path: path.stat().st_mtime_ns for path in (half / "checkpoint").rglob("*")}

    # refused, without a change of the checkpoints
    before = checkpoint_times()
    assert_refused(trial.launch(*command, ranks=1, check=False), "run.changed")
    assert checkpoint_times() == before

    # allowed: recorded in the log and in config.json
    trial.launch(*command, "--run.allow_changes", *changes, "--run.stop_at", 10)
    (event,) = events(half, "changed")
    assert event["step"] == 8
    assert event["run"] == changes
    assert event["config"]["metrics.log_freq"] == [1, 2]
    record = RunFolder(half).read_config()
    assert record["identity"]["optimizer.lr"] == 1e-3
    assert record["config"]["training"]["global_batch_size"] == 8

    # it is part of the run now: no need to allow it again
    trial.launch(*command, ranks=4)
    assert len(events(half, "changed")) == 1

    # a third of the rate, 8 sequences per step, and each step's samples, from step 9 on
    old_rates = {event["step"]: event["lr"] for event in events(base, "step")}
    lines = events(half, "step")
    assert [line["step"] for line in lines] == [*range(1, 9), 10, 12]
    for line in lines[8:]:
        new_steps = line["step"] - 8
        assert line["lr"] == pytest.approx(old_rates[line["step"]] / 3, rel=1e-12)
        assert line["tokens"] == 8 * TOKENS_PER_STEP + new_steps * 8 * SEQ_LEN
    assert sum(len(line["data_digests"]) for line in lines) == 12

    # the checkpoint has the new values
    state = state_at(half, 12)
    is_rate = re.compile(r".*\.param_groups\..*_lr")
    assert {state[name] for name in state if is_rate.fullmatch(name)} == {1e-3}
    assert set(state["lr_scheduler.base_lrs"]) == {1e-3}
    assert {state[name] for name in state if name.endswith(".weight_decay")} == {0.5}
    assert state["dataloader.next_sample"] == 8 * BATCH + 4 * 8


def test_a_finished_run_changes_nothing_until_it_is_prolonged(base, trial):
    run = copy(base, trial.run)

    def files():
        paths = (path for path in run.rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in paths if path.name != "status.json"}

    before = files()
    assert before[RunFolder(run).done_file] == b"12\n"
    trial.launch(*EVERY_2, ranks=1)
    assert files() == before
    now = status(run)
    assert (now.state, now.step, now.launches) == ("done", 12, 2)

    # two more steps, at the rates of a cosine of 14 steps: 10 after 4 of warm-up
    trial.launch(
        *EVERY_2,
        *("--training.steps", 14),
        *("--run.allow_changes", "training.steps"),
        ranks=1,
    )
    assert RunFolder(run).done_file.read_text() == "14\n"
    assert status(run).state == "done"
    lines = events(run, "step")
    assert [line["step"] for line in lines] == list(range(1, 15))
    for line, progress in zip(lines[12:], (8 / 10, 9 / 10), strict=True):
        factor = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))
        assert line["lr"] == pytest.approx(3e-3 * factor)


def test_a_change_survives_a_kill_before_the_first_save(half, trial):
    """config.json has the new seed, the newest checkpoint still the old one."""
    command = (
        *("--data.data_seed", 5),
        *("--checkpoint.interval", 20),
        *("--run.allow_changes", "data.data_seed"),
    )
    killed = trial.launch(*command, ranks=1, check=False, before=(die_at, 10))
    assert killed.codes == [-9]

    trial.launch(*command, "--run.stop_at", 9, ranks=1)

    assert logged_step(half) == 9
