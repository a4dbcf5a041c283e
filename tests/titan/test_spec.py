"""The loss and the learning rate, against formulas written here."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer

from canon_pretrain.run.config import Loss, build
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.job_config import CanonJobConfig, check_job
from canon_pretrain.titan.spec import build_schedule, head_loss, learning_rate_factor
from tests.support import ROOT

FORMS = [Loss(), Loss(z_loss=0.3), Loss(squared_loss=0.3)]
every_form = pytest.mark.parametrize("config", FORMS, ids=str)
every_way = pytest.mark.parametrize("chunk_tokens", [0, 4096, 5])


def logits_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    """Large logits, far from 0 in the mean, so that logsumexp is neither small nor the loss."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 + 4 * torch.randn(2, 5, 11, generator=generator)
    labels = torch.randint(11, (2, 5), generator=generator)
    labels[1, 2] = IGNORE_INDEX
    return logits, labels


def by_hand(logits: torch.Tensor, labels: torch.Tensor, config: Loss) -> tuple[float, float]:
    """The definitions, a token at a time, in float64."""
    cross_entropy = objective = 0.0
    for row, label in zip(logits.flatten(0, 1).tolist(), labels.flatten().tolist(), strict=True):
        if label == IGNORE_INDEX:
            continue
        z = math.log(math.fsum(math.exp(value) for value in row))
        loss = z - row[label]
        cross_entropy += loss
        objective += loss + config.z_loss * z**2 + config.squared_loss * loss**2
    return cross_entropy, objective


def of_logits(
    config: Loss, logits: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of given logits: of a head whose weight is the identity."""
    nats_N, objective = head_loss(config)(
        logits.flatten(0, 1), torch.eye(logits.shape[-1], dtype=logits.dtype), labels.flatten()
    )
    return nats_N.sum(), objective


@every_form
@every_way
def test_sums_and_gradients_are_those_of_the_definition(config, chunk_tokens):
    config = dataclasses.replace(config, chunk_tokens=chunk_tokens)
    logits, labels = logits_and_labels()
    logits.requires_grad_()
    loss, objective = of_logits(config, logits, labels)
    expected = by_hand(logits.detach(), labels, config)
    assert (loss.item(), objective.item()) == pytest.approx(expected, rel=1e-6)
    objective.backward()
    assert logits.grad is not None
    # the derivative by central differences, of a few logits; none at an ignored token
    for place in ((0, 0, 3), (1, 4, int(labels[1, 4])), (0, 2, int(labels[0, 2])), (1, 2, 5)):
        sides = []
        for sign in (1, -1):
            moved = logits.detach().double()
            moved[place] += sign * 1e-5
            sides.append(by_hand(moved, labels, config)[1])
        assert logits.grad[place].item() == pytest.approx((sides[0] - sides[1]) / 2e-5, abs=2e-5)


# torch looks whether what it compiles for has gradients


STEPS, WARMUP, FLOOR = 20, 3, 0.1


def job_of(**schedule: object) -> CanonJobConfig:
    """A job of 20 steps at lr 1 with this [lr_scheduler] in its file, checked."""
    values = {
        "training": {"steps": STEPS, "global_batch_size": 1},
        "optimizer": {"lr": 1.0},
        "lr_scheduler": {"min_lr_factor": FLOOR, "warmup_steps": WARMUP} | schedule,
    }
    job = build(CanonJobConfig, values, source="test")
    check_job(job)
    return job


def schedule_of(job: CanonJobConfig) -> tuple[OptimizersContainer, LRSchedulersContainer]:
    model = torch.nn.Linear(2, 2)
    optimizers = OptimizersContainer([model], torch.optim.AdamW, {"lr": job.optimizer.lr})
    return optimizers, build_schedule(optimizers, job.lr_scheduler, job.training.steps)


def rates(job: CanonJobConfig, count: int = STEPS) -> list[float]:
    """The rate of each of the first `count` steps."""
    optimizers, schedule = schedule_of(job)
    return _take(optimizers, schedule, count)


def _take(
    optimizers: OptimizersContainer, schedule: LRSchedulersContainer, count: int
) -> list[float]:
    out = []
    for _ in range(count):
        out.append(schedule.schedulers[0].get_last_lr()[0])
        optimizers.step()
        schedule.step()
    return out


def line(progress: float) -> float:
    return 1 - progress


def cosine(progress: float) -> float:
    return (1 + math.cos(math.pi * progress)) / 2


def one_minus_sqrt(progress: float) -> float:
    return 1 - progress**0.5


def expected(
    begin: int, length: int, shape: Callable[[float], float], floor: float = FLOOR
) -> list[float]:
    """Warm-up over 3 steps, 1 up to step `begin` (from 0), then down within `length` steps."""
    out = []
    for step in range(STEPS):
        progress = min(max(0, step - begin) / length, 1)
        rate = floor + (1 - floor) * shape(progress)
        out.append((step + 1) / WARMUP if step < WARMUP else rate)
    return out


SHAPES = {"linear": line, "cosine": cosine, "sqrt": one_minus_sqrt}


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


def test_a_line_to_zero_and_a_rate_that_stays():
    line_to_0 = rates(job_of(warmup_steps=0, decay_type="linear", min_lr_factor=0))
    assert line_to_0 == pytest.approx([1 - step / STEPS for step in range(STEPS)])
    assert rates(job_of(min_lr_factor=1.0))[WARMUP:] == pytest.approx([1.0] * (STEPS - WARMUP))


def test_a_run_prolonged_at_a_stable_rate_is_the_longer_run():
    """WSD and InfiniteLR do not depend on the run's length there; a cosine over the run does."""
    for schedule, is_same in (
        ({"decay_ratio": 0.25}, True),
        ({"decay_steps": 8}, True),
        ({}, False),
    ):
        long = job_of(**schedule)
        long.training.steps = 40
        assert (rates(long, 15) == rates(job_of(**schedule), 15)) is is_same


def test_infinite_lr_of_seed_000():
    """Warm-up 500, cosine over 50,000 steps from 1e-3 towards 1e-4, and no further."""
    job = parse_job(["--config", str(ROOT / "train_configs/tiny/llama.toml")])
    known = {0: 2e-6, 499: 1e-3, 500: 1e-3, 25_500: 5.5e-4, 50_500: 1e-4, 10**6: 1e-4}
    for step, rate in known.items():
        factor = learning_rate_factor(step, config=job.lr_scheduler)
        assert job.optimizer.lr * factor == pytest.approx(rate)
