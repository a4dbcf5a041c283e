"""Steps that are not finite, and changes of a run's hyperparameters."""

import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from canon_pretrain.run.folder import RunFolder
from tests.fault_runs import checkpoint, copy, steps, wrap
from tests.ranks import (
    assert_refused,
    assert_same_run,
    differences,
    events,
    launch,
    logged_step,
    status,
    whole_state,
)
from tests.support import debug_run

STEPS = 40
KEEP_ALL = ("--checkpoint.keep_latest_k", 0, "--checkpoint.async_mode", "disabled")
RUN = ("--training.steps", STEPS, *KEEP_ALL)
TOKENS_PER_STEP = 12 * 64


def job(data: Path, folder: Path, *more: object) -> list[object]:
    return [*debug_run(data, folder), *RUN, *more]


def state_at(run: Path, step: int) -> dict[str, Any]:
    return whole_state(checkpoint(run, step))


def is_trained(name: str) -> bool:
    """Return whether the optimizer changes it: weights, moments, their step counts."""
    if name.startswith("optimizer."):
        return name.startswith("optimizer.state.")
    return not name.startswith(("lr_scheduler", "dataloader", "train_state", "guards"))


@pytest.fixture(scope="module")
def straight(data_folder, tmp_path_factory):
    """A run of 40 steps on 2 ranks without faults, with a checkpoint every 4 steps."""
    base = tmp_path_factory.mktemp("straight")
    launch(*job(data_folder, base / "run", "--checkpoint.interval", 4), output=base)
    return base / "run"


@pytest.fixture
def half(straight, tmp_path):
    """A copy of the straight run up to step 8."""
    run = copy(straight, tmp_path / "run", last=8)
    RunFolder(run).done_file.unlink()
    return run


def break_steps(rank: int, faults: dict[int, tuple[str, int]]) -> None:
    """Break steps by number -> (kind, rank): `nan` in a gradient, or `inf_loss`."""
    from canon_pretrain.titan.trainer import CanonTrainer

    original = CanonTrainer.forward_backward_step

    def forward_backward_step(self: Any, **arguments: Any) -> torch.Tensor:
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


def die_at(rank: int, step: int) -> None:
    """kill -9 by itself, in the middle of `step`."""
    from canon_pretrain.titan.trainer import CanonTrainer

    def die(trainer: Any, data: Any) -> None:
        if trainer.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    wrap(CanonTrainer, "train_step", before=die)


def test_a_bad_step_changes_no_weight_on_any_rank(data_folder, tmp_path):
    """A NaN in one gradient of rank 1 at step 2, an infinite loss of rank 0 at step 4."""
    run = tmp_path / "run"
    faults = {2: ("nan", 1), 4: ("inf_loss", 0)}
    more = ("--training.steps", 5, "--checkpoint.interval", 1)
    argv = [*job(data_folder, run), *more]
    launch(*argv, output=tmp_path, before=(break_steps, faults))

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
    assert (skips[0]["grad_norm"], skips[1]["loss"]) == ("NaN", "Infinity")
    assert states[5]["guards.counters"][:3].tolist() == [2, 0, 0]
    assert (status(run).state, status(run).skipped_steps) == ("done", 2)
    # a step event misses the last two steps; the final event counts all
    assert events(run, "done")[0]["skipped_steps"] == 2
    lines = events(run, "step")
    assert [line["step"] for line in lines] == list(range(1, 6))
    assert [line["step"] for line in lines if not math.isfinite(float(line["loss"]))] == [4]


HALT_AT_3 = ("--guards.max_bad_steps", 3, "--checkpoint.interval", 3)


def test_consecutive_bad_steps_end_the_run_on_a_good_state(straight, data_folder, tmp_path):
    """Steps 5 to 7: step 4 is bitwise that of a run that stopped there, step 6 is archived."""
    run = tmp_path / "run"
    faults = {step: ("nan", step % 2) for step in (5, 6, 7)}
    argv = job(data_folder, run, *HALT_AT_3)
    ended = launch(*argv, output=tmp_path, check=False, before=(break_steps, faults))
    assert_refused(ended, "train.not_finite")
    assert status(run).state == "failed"
    assert steps(run) == [3, 4]
    (archived,) = (run / "archive").rglob("step-6")
    assert (archived / "manifest.json").is_file()
    (halt,) = events(run, "halt")
    assert (halt["step"], halt["good_step"], halt["skipped_steps"]) == (7, 4, 0)
    assert [e["in_a_row"] for e in events(run, "skip")] == [1, 2, 3]
    assert differences(state_at(run, 4), state_at(straight, 4)) == []

    launch(*argv, "--run.stop_at", 8, output=tmp_path)
    assert_same_run(run, straight, step=8)


def count_waits(rank: int, report: Path) -> None:
    """Count the host's reads of tensor values per step."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from canon_pretrain.titan.trainer import CanonTrainer

    found, counts = list[str](), dict[int, int]()
    original, aten = CanonTrainer.train_step, torch.ops.aten
    reads = (aten._local_scalar_dense, aten.is_nonzero, aten.nonzero, aten.equal)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func.overloadpacket in reads:
                found.append(str(func))
            return func(*args, **(kwargs or {}))

    def train_step(self: Any, data: Any) -> None:
        found.clear()
        with Watch():
            original(self, data)
        counts[self.step] = len(found)
        report.write_text(json.dumps(counts))

    for name in ("tolist", "numpy"):
        wrap(torch.Tensor, name, before=lambda *_, name=name: found.append(name))
    CanonTrainer.train_step = train_step  # type: ignore[method-assign]


def test_only_logged_steps_read_values_from_the_device(data_folder, tmp_path):
    """On a GPU each such read would wait for the step; on a CPU they can be counted."""
    report = tmp_path / "report.json"
    argv = [*job(data_folder, tmp_path / "run"), "--training.steps", 12, "--metrics.log_freq", 10]
    argv += ["--checkpoint.interval", 100]
    launch(*argv, output=tmp_path, ranks=1, before=(count_waits, report))
    counts = json.loads(report.read_text())
    # torch's one-time reads are over by step 3; reads of logged steps show that the watch works
    assert [counts[str(step)] for step in (4, 5, 6, 7, 8, 9, 11)] == [0] * 7
    assert counts["10"] > 0 and counts["12"] > 0


def test_a_change_takes_effect_once_it_is_allowed(half, straight, data_folder):
    """The checkpoint does not override the new rate, weight decay and batch size."""
    output = half.parent
    new = ("--optimizer.lr", 1e-3, "--training.global_batch_size", 8, "--metrics.log_freq", 2)
    names = ("optimizer.lr", "optimizer.weight_decay", "training.global_batch_size")
    argv = job(data_folder, half, *new, "--optimizer.weight_decay", 0.5)
    before = {path: path.stat().st_mtime_ns for path in (half / "checkpoint").rglob("*")}
    assert_refused(launch(*argv, output=output, ranks=1, check=False), "run.changed")
    assert {path: path.stat().st_mtime_ns for path in (half / "checkpoint").rglob("*")} == before
    launch(*argv, "--run.allow_changes", *names, "--run.stop_at", 10, output=output)
    (event,) = events(half, "changed")
    changes = dict(zip(names, ([3e-3, 1e-3], [0.03, 0.5], [12, 8]), strict=True))
    assert (event["step"], event["run"]) == (8, changes)
    assert event["config"]["metrics.log_freq"] == [1, 2]
    record = RunFolder(half).read_config()
    assert record["identity"]["optimizer.lr"] == 1e-3
    assert record["config"]["training"]["global_batch_size"] == 8

    # it is part of the run now: no need to allow it again
    launch(*argv, "--run.stop_at", 12, output=output, ranks=4)
    assert len(events(half, "changed")) == 1
    old_rates = {event["step"]: event["lr"] for event in events(straight, "step")}
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


def test_a_finished_run_is_prolonged(straight, data_folder, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    argv = [*job(data_folder, run), "--training.steps", 42]
    launch(*argv, "--run.allow_changes", "training.steps", output=tmp_path, ranks=1)
    assert RunFolder(run).done_file.read_text() == "42\n"
    assert status(run).state == "done"
    lines = events(run, "step")
    assert [line["step"] for line in lines] == list(range(1, 43))
    factors = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 38)) for k in (36, 37)]
    assert [line["lr"] for line in lines[40:]] == pytest.approx([3e-3 * f for f in factors])


def test_a_change_survives_a_kill_before_the_first_save(half, data_folder):
    """config.json has the new seed, the newest checkpoint still the old one."""
    argv = job(data_folder, half, "--data.data_seed", 5, "--checkpoint.interval", 20)
    allowed = ("--run.allow_changes", "data.data_seed")
    killed = launch(*argv, *allowed, output=half.parent, ranks=1, check=False, before=(die_at, 10))
    assert killed.codes == [-9]
    again = launch(*argv, *allowed, "--run.stop_at", 9, output=half.parent, ranks=1, check=False)
    assert again.codes == [0], again.output
    assert logged_step(half) == 9
