"""Which steps leave the weights as they are: judged on the device, read by the host later.

After `max_bad_steps` in a row the verdict latches until the host, two steps behind, has seen it.
"""

from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from canon_pretrain.run.config import Guards

SKIPPED, OUTLIERS, IN_A_ROW, HALTED, SEEN = range(5)
"""In `StepGuards.counters`: bad steps and outliers, outliers, bad in a row, end, norms seen."""
MAX_WINDOW = 1024
"""The most norms that are remembered, and always are: a run may be told to change its window."""


class StepGuards(Stateful):
    """Counts and judges steps; its state is on `device` and in every checkpoint.

    `counters`, float64 [5]: see SKIPPED ... SEEN; `norms`, float32 [MAX_WINDOW]: a ring.
    """

    def __init__(self, config: Guards, device: torch.device) -> None:
        self.config = config
        self.counters = torch.zeros(5, dtype=torch.float64, device=device)
        self.norms = torch.zeros(MAX_WINDOW, dtype=torch.float32, device=device)

    @torch.no_grad()
    def judge(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Return 1 if this step must be skipped, else 0, as a float32 scalar on the device."""
        count = self.counters
        bad = ~(torch.isfinite(loss) & torch.isfinite(grad_norm))
        halted = was_halted = count[HALTED] > 0
        in_a_row = torch.where(bad, count[IN_A_ROW] + 1, torch.zeros_like(count[IN_A_ROW]))
        in_a_row = torch.where(halted, count[IN_A_ROW], in_a_row)
        halted = halted | (in_a_row >= self.config.max_bad_steps)
        outlier = self._is_outlier(grad_norm, ~bad & ~halted)
        # after the verdict nothing is counted: the state stays that of the streak's end
        count[SKIPPED] += (bad | outlier) & ~was_halted
        count[OUTLIERS] += outlier
        count[IN_A_ROW] = in_a_row
        count[HALTED] = halted
        return (bad | outlier | halted).float()

    def _is_outlier(self, grad_norm: Tensor, counts: Tensor) -> Tensor:
        """Return whether a norm stands out from the window, which it enters if it `counts`.

        An outlier enters too: a lasting change of scale is normal before long.
        """
        window = self.config.outlier_window
        if self.config.outlier_sigma is None:
            return torch.zeros_like(counts)
        seen = self.counters[SEEN].clone()
        age = (seen - 1 - torch.arange(MAX_WINDOW, device=self.norms.device)) % MAX_WINDOW
        known = age < seen.clamp(max=window)
        number = known.sum().clamp(min=1)
        mean = (self.norms * known).sum() / number
        variance = (((self.norms - mean) * known) ** 2).sum() / number
        limit = mean + self.config.outlier_sigma * variance.sqrt()
        outlier = counts & (seen >= window / 2) & (grad_norm > limit)
        place = (seen % MAX_WINDOW).long()[None]
        self.norms.scatter_(0, place, torch.where(counts, grad_norm, self.norms[place][0])[None])
        self.counters[SEEN] += counts
        return outlier

    def before_the_streak(self) -> Tensor:
        """Return the counters as they were before the bad steps that end the run."""
        counters = self.counters.clone()
        counters[SKIPPED] -= counters[IN_A_ROW]
        counters[IN_A_ROW] = counters[HALTED] = 0
        return counters

    def state_dict(self) -> dict[str, Any]:
        return {"counters": self.counters, "norms": self.norms}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counters.copy_(state_dict["counters"])
        # a new launch judges anew: the next good step ends the streak, the next bad one the run
        self.counters[HALTED] = 0
        self.norms.copy_(state_dict["norms"])


class Readback:
    """Small tensors on their way to the host, so that reading one waits for no running step."""

    LAG = 2

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._queue: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def push(self, step: int, values: Tensor) -> None:
        """Start to copy the 1-D float tensor `values` of `step`."""
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=self._pinned)
        host.copy_(values, non_blocking=True)
        event = None
        if self._pinned:
            event = torch.cuda.Event()
            event.record()
        self._queue.append((step, host, event))

    def pop(self, *, last: bool = False) -> list[tuple[int, list[float]]]:
        """Return (step, values) pushed at least LAG pushes ago, or all, oldest first."""
        ready = []
        while self._queue and (last or len(self._queue) >= self.LAG):
            step, host, event = self._queue.popleft()
            if event is not None:
                event.synchronize()
            ready.append((step, host.tolist()))
        return ready
