"""What Canon is allowed to cost, and whether a figure meets it; a bench only says so."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """Three bounds, the easiest first; upper ones, or lower ones where more is `better`."""

    must: float
    goal: float
    stretch: float
    more_is_better: bool = False

    def verdict(self, value: float) -> str:
        """The hardest bound that `value` meets, or that it misses all."""
        for name in ("stretch", "goal", "must"):
            bound = getattr(self, name)
            if value >= bound if self.more_is_better else value <= bound:
                return f"{name} met"
        return "MISSED"

    def percents(self) -> str:
        """The bounds in words."""
        return "/".join(f"{100 * b:g}" for b in (self.must, self.goal, self.stretch)) + " %"

    def numbers(self) -> str:
        """The bounds in words, where they are no shares."""
        return "/".join(f"{b:g}" for b in (self.must, self.goal, self.stretch))


STEP = {"ABCD": Target(0.08, 0.05, 0.03), "AC": Target(0.025, 0.015, 0.01)}
"""Forward and backward of the 1.3B model over the same without Canon, on a GPU, by Canon set."""
CPU_BLOCK = {"ABCD": Target(0.15, 0.10, 0.05)}
"""Compiled block of 8L512D, forward and backward, float32, on a CPU."""
GENERATION = {"ABCD": Target(0.10, 0.05, 0.03)}
"""Decoding over the same without Canon."""
MFU = Target(0.50, 0.55, 0.60, more_is_better=True)
"""1.3B NoPE with ABCD on one H200."""
SAVED_BYTES = Target(4.0, 2.0, 2.0)
"""Kept for backward by ABCD, per token, site and channel, in bfloat16."""
TRAINER = 0.03
"""The most that the trainer's step may take beyond a bare loop's."""


def show(target: Target | None, value: float) -> str:
    """A cell of a table: the bounds and the verdict; empty where nothing is asked."""
    return "" if target is None else f"{target.percents()}: {target.verdict(value)}"
