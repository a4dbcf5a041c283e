"""What kernels cost, in numbers that need no torch."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Work:
    """Kernels and what they move and multiply."""

    launches: float = 0
    bytes_moved: float = 0
    """Read and written outside matrix products and attention."""
    product_bytes: float = 0
    flops: Counter[str] = field(default_factory=Counter)
    """By kind: bfloat16, float32, grouped (experts), attention (of the whole square)."""

    def add(self, other: "Work") -> None:
        self.launches += other.launches
        self.bytes_moved += other.bytes_moved
        self.product_bytes += other.product_bytes
        self.flops.update(other.flops)

    def repeated(self, times: float) -> "Work":
        """Return this work done `times` times."""
        work = self.for_tokens(times)
        work.launches *= times
        return work

    def for_tokens(self, times: float) -> "Work":
        """Return the same kernels for `times` as many tokens."""
        flops = {kind: times * count for kind, count in self.flops.items()}
        return Work(
            launches=self.launches,
            bytes_moved=times * self.bytes_moved,
            product_bytes=times * self.product_bytes,
            flops=Counter(flops),
        )
