"""The learning rate against formulas; the loss: tests/kernels/test_linear_cross_entropy.py."""

import math
from collections.abc import Callable

import pytest
import torch
from torchtitan.components.optimizer import OptimizersContainer

from canon_pretrain.run.config import build
from canon_pretrain.titan.job_config import CanonJobConfig, check_job
from canon_pretrain.titan.spec import build_schedule

STEPS, WARMUP, FLOOR = 20, 3, 0.1


def job_of(**schedule):
    """Return a checked job of 20 steps at lr 1 with this [lr_scheduler]."""
    values = {
        "training": {"steps": STEPS, "global_batch_size": 1},
        "optimizer": {"lr": 1.0},
        "lr_scheduler": {"min_lr_factor": FLOOR, "warmup_steps": WARMUP} | schedule,
    }
    job = build(CanonJobConfig, values, source="test")
    check_job(job)
    return job


def rates(job, count=STEPS):
    """Return the rate of each of the first `count` steps."""
    model = torch.nn.Linear(2, 2)
    optimizers = OptimizersContainer([model], torch.optim.AdamW, {"lr": job.optimizer.lr})
    schedule = build_schedule(optimizers, job.lr_scheduler, job.training.steps)
    out = []
    for _ in range(count):
        out.append(schedule.schedulers[0].get_last_lr()[0])
        optimizers.step()
        schedule.step()
    return out


SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "sqrt": lambda progress: 1 - progress**0.5,
}


def expected(begin, length, shape, floor=FLOOR):
    """Return warmup over 3 steps, 1 up to step `begin` (from 0), then decay over `length` steps."""
    out = []
    for step in range(STEPS):
        progress = min(max(0, step - begin) / length, 1)
        rate = floor + (1 - floor) * shape(progress)
        out.append((step + 1) / WARMUP if step < WARMUP else rate)
    return out


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("more", "begin", "length"),
    [
        ({}, WARMUP, STEPS - WARMUP),
        ({"decay_ratio": 0.85}, WARMUP, STEPS - WARMUP),  # the longest that fits
        ({"decay_ratio": 0.2}, STEPS - 4, 4),  # WSD
        ({"decay_steps": 8}, WARMUP, 8),  # then it stays at its floor
    ],
)
def test_the_rate_of_each_step(name, more, begin, length):
    found = rates(job_of(decay_type=name, **more))
    assert found == pytest.approx(expected(begin, length, SHAPES[name]))


def test_a_run_prolonged_at_a_stable_rate_is_the_longer_run():
    """WSD and InfiniteLR do not depend on the run's length there; a cosine does."""
    for schedule, is_same in (
        ({"decay_ratio": 0.25}, True),
        ({"decay_steps": 8}, True),
        ({}, False),
    ):
        long = job_of(**schedule)
        long.training.steps = 40
        assert (rates(long, 15) == rates(job_of(**schedule), 15)) is is_same
