"""The learning rate over a run: torchtitan's schedules, and a decay whose length is its own.

After the warm-up: a cosine, a line or 1 - sqrt down to `min_lr_factor` at the run's end; with
`decay_ratio` (WSD) a stable rate first and the decay in that last share of the run; with
`decay_steps` (InfiniteLR, seed 000) a decay that does not depend on `training.steps`, and then the
minimum. Where the rate is stable, or has its own length, a prolonged run is the longer one.
"""

import functools
import math

from torchtitan.components.lr_scheduler import LRSchedulersContainer, build_lr_schedulers
from torchtitan.components.optimizer import OptimizersContainer

from canon_pretrain.titan.job_config import LRScheduler


def learning_rate_factor(
    step: int, *, warmup_steps: int, decay_steps: int, decay_type: str, min_lr_factor: float
) -> float:
    """What the peak rate is multiplied with at `step` (0 is the first).

    (step + 1) / warmup_steps in warm-up, 1 at its end, then from 1 to `min_lr_factor` within
    `decay_steps` steps (linear, sqrt or cosine as in torchtitan), and `min_lr_factor` from there.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / decay_steps)
    left = {
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }[decay_type]
    return min_lr_factor + (1 - min_lr_factor) * left


def build_schedule(
    optimizers: OptimizersContainer, config: LRScheduler, training_steps: int
) -> LRSchedulersContainer:
    """The TrainSpec's builder: ours where `decay_steps` is set, torchtitan's elsewhere."""
    if config.decay_steps is None:
        return build_lr_schedulers(optimizers, config, training_steps)
    factor = functools.partial(
        learning_rate_factor,
        warmup_steps=config.warmup_steps,
        decay_steps=config.decay_steps,
        decay_type=config.decay_type,
        min_lr_factor=config.min_lr_factor,
    )
    return LRSchedulersContainer(optimizers, factor)
