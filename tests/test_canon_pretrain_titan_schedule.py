"""The learning rate: InfiniteLR's shape, and torchtitan's own where it is asked for."""

import math

import pytest
import torch
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import OptimizersContainer

from canon_pretrain.errors import UserError
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.job_config import LRScheduler
from canon_pretrain.titan.schedule import build_schedule, learning_rate_factor
from tests.support import ROOT


def rates(config: LRScheduler, training_steps: int, count: int, build=build_schedule) -> list:
    model = torch.nn.Linear(2, 2)
    optimizers = OptimizersContainer([model], torch.optim.AdamW, {"lr": 1.0})
    schedule = build(optimizers, config, training_steps)
    out = []
    for _ in range(count):
        out.append(schedule.schedulers[0].get_last_lr()[0])
        optimizers.step()
        schedule.step()
    return out


def test_infinite_lr_of_seed_000() -> None:
    """Warm-up 500, cosine over 50,000 steps from 1e-3 towards 1e-4, and no further."""
    shape = {"warmup_steps": 500, "decay_steps": 50_000, "decay_type": "cosine"}

    def rate(step: int) -> float:
        return 1e-3 * learning_rate_factor(step, min_lr_factor=0.1, **shape)

    assert rate(0) == pytest.approx(1e-3 / 500)
    assert rate(499) == rate(500) == pytest.approx(1e-3)
    assert rate(25_500) == pytest.approx((1e-3 + 1e-4) / 2)
    quarter = 1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi / 4))
    assert rate(500 + 12_500) == pytest.approx(quarter)
    assert rate(50_500) == rate(10**6) == pytest.approx(1e-4)


@pytest.mark.parametrize("decay_type", ["cosine", "linear", "sqrt"])
def test_a_decay_as_long_as_the_run_is_torchtitans(decay_type: str) -> None:
    ours = LRScheduler(warmup_steps=3, decay_type=decay_type, decay_steps=17)  # type: ignore
    theirs = LRScheduler(warmup_steps=3, decay_type=decay_type)  # type: ignore
    expected = rates(theirs, 20, 20, build=build_lr_schedulers)
    assert rates(ours, 20, 20) == pytest.approx(expected)
    assert rates(theirs, 20, 20) == expected
    # the length of the run does not matter to ours
    assert rates(ours, 999, 20) == pytest.approx(expected)


def test_lengths_that_contradict_each_other_are_refused() -> None:
    words = ["--config", str(ROOT / "train_configs/debug.toml"), "--lr_scheduler.decay_steps"]
    with pytest.raises(UserError, match="unset decay_ratio"):
        parse_job([*words, "5", "--lr_scheduler.decay_ratio", "0.1"])
    with pytest.raises(UserError, match="decay_steps = 0"):
        parse_job([*words, "0"])
