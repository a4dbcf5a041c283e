"""Steps that are not finite, and changes of a run's hyperparameters."""

import json
import math
import os
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

TOKENS_PER_STEP = 12 * 64


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
        kind, where = faults.get(self.step, ("", 0))
        if kind and where == rank:
            if kind == "nan":
                parameter = self.model_parts[0].layers["0"].attention.wq.weight
                parameter.grad.to_local().view(-1)[0] = math.nan
            else:
                loss = torch.full_like(loss, math.inf)
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
    run, faults = trial.run, {2: ("nan", 1), 4: ("inf_loss", 0)}
    more = ("--training.steps", 5, "--checkpoint.interval", 1)
    trial.launch(*EVERY_2, *more, before=(break_steps, faults))
    states = {step: state_at(run, step) for step in range(1, 6)}
    for step in (2, 4):
        before, after = states[step - 1], states[step]
        changed = differences(before, after)
        assert not any(is_trained(name) for name in changed), changed
        assert after["train_state.tokens"] == step * TOKENS_PER_STEP
        assert after["dataloader.next_sample"] == step * 12
        assert after["lr_scheduler.last_epoch"] == before["lr_scheduler.last_epoch"] + 1
        trained = {name for name in states[step] if is_trained(name)}
        assert len(trained) > 50
        assert trained <= {*differences(after, states[step + 1])}  # the next step changes all
    tensors = [value for value in states[5].values() if isinstance(value, torch.Tensor)]
    assert all(torch.isfinite(value).all() for value in tensors)
    skips = events(run, "skip")
    expected = [(2, "not finite", 1), (4, "not finite", 1)]
    assert [(e["step"], e["reason"], e["in_a_row"]) for e in skips] == expected
    assert math.isnan(skips[0]["grad_norm"]) and skips[1]["loss"] == math.inf
    assert states[5]["guards.counters"][:3].tolist() == [2, 0, 0]
    assert (status(run).state, status(run).skipped_steps) == ("done", 2)
    # a step event misses the last two steps; the final event counts all
    (done,) = events(run, "done")
    assert done["skipped_steps"] == 2 and 0 < done["cpu_seconds"] < 1000
    lines = events(run, "step")
    assert [line["step"] for line in lines] == list(range(1, 6))
    assert [line["step"] for line in lines if not math.isfinite(float(line["loss"]))] == [4]


def test_consecutive_bad_steps_end_the_run_on_a_good_state(base, trial):
    """Steps 5 to 7: step 4 is bitwise that of a run that stopped there, step 6 is archived."""
    run, faults = trial.run, {step: ("nan", step % 2) for step in (5, 6, 7)}
    command = (*EVERY_2, "--guards.max_bad_steps", 3, "--checkpoint.interval", 3)
    ended = trial.launch(*command, check=False, before=(break_steps, faults))
    assert_refused(ended, "train.not_finite")
    assert status(run).state == "failed"
    assert steps(run) == [3, 4]
    (archived,) = (run / "archive").rglob("step-6")
    assert (archived / "manifest.json").is_file()
    (halt,) = events(run, "halt")
    assert (halt["step"], halt["good_step"], halt["skipped_steps"]) == (7, 4, 0)
    assert [e["in_a_row"] for e in events(run, "skip")] == [1, 2, 3]
    assert differences(state_at(run, 4), state_at(base, 4)) == []
    trial.launch(*command, "--run.stop_at", 8)
    assert_same_run(run, base, step=8)


def count_waits(rank, report):
    """Count the host's reads of tensor values per step."""
    from torch.utils._python_dispatch import TorchDispatchMode

    found, counts = list[str](), dict[int, int]()
    original, aten = CanonTrainer.train_step, torch.ops.aten
    reads = (aten._local_scalar_dense, aten.is_nonzero, aten.nonzero, aten.equal)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in reads:
                found.append(str(func))
            return func(*args, **(kwargs or {}))

    def train_step(self, data):
        found.clear()
        with Watch():
            original(self, data)
        counts[self.step] = len(found)
        report.write_text(json.dumps(counts))

    for name in ("tolist", "numpy"):
        wrap(torch.Tensor, name, before=lambda *_, name=name: found.append(name))
    CanonTrainer.train_step = train_step  # type: ignore[method-assign]


def test_only_logged_steps_read_values_from_the_device(trial):
    """On a GPU each such read would wait for the step; on a CPU they can be counted."""
    report = trial.folder / "report.json"
    command = (*EVERY_2, "--metrics.log_freq", 10, "--checkpoint.interval", 100)
    trial.launch(*command, ranks=1, before=(count_waits, report))
    counts = json.loads(report.read_text())
    # torch's one-time reads are over by step 3; reads of logged steps show that the watch works
    assert [counts[str(step)] for step in (4, 5, 6, 7, 8, 9, 11)] == [0] * 7
    assert counts["10"] > 0 and counts["12"] > 0


def test_a_change_takes_effect_once_it_is_allowed(half, base, trial):
    """The checkpoint does not override the new rate, weight decay and batch size."""
    new = ("--optimizer.lr", 1e-3, "--training.global_batch_size", 8, "--metrics.log_freq", 2)
    names = ("optimizer.lr", "optimizer.weight_decay", "training.global_batch_size")
    command = (*EVERY_2, *new, "--optimizer.weight_decay", 0.5)
    before = {path: path.stat().st_mtime_ns for path in (half / "checkpoint").rglob("*")}
    assert_refused(trial.launch(*command, ranks=1, check=False), "run.changed")
    assert {path: path.stat().st_mtime_ns for path in (half / "checkpoint").rglob("*")} == before
    trial.launch(*command, "--run.allow_changes", *names, "--run.stop_at", 10)
    (event,) = events(half, "changed")
    changes = dict(zip(names, ([3e-3, 1e-3], [0.03, 0.5], [12, 8]), strict=True))
    assert (event["step"], event["run"]) == (8, changes)
    assert event["config"]["metrics.log_freq"] == [1, 2]
    record = RunFolder(half).read_config()
    assert record["identity"]["optimizer.lr"] == 1e-3
    assert record["config"]["training"]["global_batch_size"] == 8

    # it is part of the run now: no need to allow it again
    trial.launch(*command, ranks=4)
    assert len(events(half, "changed")) == 1
    old_rates = {event["step"]: event["lr"] for event in events(base, "step")}
    lines = events(half, "step")
    assert [line["step"] for line in lines] == [*range(1, 9), 10, 12]
    for line in lines[8:]:
        assert line["lr"] == pytest.approx(old_rates[line["step"]] / 3, rel=1e-12)
        assert line["tokens"] == 8 * TOKENS_PER_STEP + (line["step"] - 8) * 8 * 64
    assert sum(len(line["data_digests"]) for line in lines) == 12
    state = state_at(half, 12)
    groups = {v for name, v in state.items() if ".param_groups." in name and name.endswith("_lr")}
    assert groups == {1e-3} == set(state["lr_scheduler.base_lrs"])
    assert {v for name, v in state.items() if name.endswith(".weight_decay")} == {0.5}
    assert state["dataloader.next_sample"] == 8 * 12 + 4 * 8


def test_a_finished_run_changes_nothing_until_it_is_prolonged(base, trial):
    run = copy(base, trial.run)

    def files():
        paths = (path for path in run.rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in paths if path.name != "status.json"}

    before = files()
    assert before[RunFolder(run).done_file] == b"12\n"
    trial.launch(*EVERY_2, ranks=1)
    assert files() == before
    found = status(run)
    assert (found.state, found.step, found.launches) == ("done", 12, 2)
    longer = ("--training.steps", 14, "--run.allow_changes", "training.steps")
    trial.launch(*EVERY_2, *longer, ranks=1)
    assert RunFolder(run).done_file.read_text() == "14\n" and status(run).state == "done"
    lines = events(run, "step")
    assert [line["step"] for line in lines] == list(range(1, 15))
    factors = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 10)) for k in (8, 9)]
    assert [line["lr"] for line in lines[12:]] == pytest.approx([3e-3 * f for f in factors])


def test_a_change_survives_a_kill_before_the_first_save(half, trial):
    """config.json has the new seed, the newest checkpoint still the old one."""
    command = ("--data.data_seed", 5, "--checkpoint.interval", 20)
    command += ("--run.allow_changes", "data.data_seed")
    assert trial.launch(*command, ranks=1, check=False, before=(die_at, 10)).codes == [-9]
    trial.launch(*command, "--run.stop_at", 9, ranks=1)
    assert logged_step(half) == 9
