"""Initial weights as pure functions: the same bits at any world size, in any order and sharding.

FSDP2's own random initialization writes the same shard on every rank on a CPU, and depends on the
world size elsewhere.
"""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

# drawn by one generator; part of what defines the weights, as a change of it would change them
BLOCK_ELEMENTS = 2**16
TRUNCATE_SIGMAS = 3.0
STEP_RANGE = (1e-3, 1e-1)
"""Of `step`: the initial step sizes dt of a recurrence, for inputs of 0."""
FIRST_SCALAR_TAP = 0.4
"""Of the token before, with one tap for all channels (the Canon paper's footnote 10)."""
UNKNOWN = "unknown"
"""Kind of the value of a parameter that its mixer must declare."""


@dataclass(frozen=True)
class InitialValue:
    """The initial value of one parameter, a function of these fields alone.

    `kind`: `constant` scale; `normal` N(0, scale); `truncated_normal` the same, cut at 3 sigma;
    `uniform` U(-scale, scale); `share` U(0, scale); `log_uniform` log U(0, scale); `log_count`
    log(row + 1); `step`, of which softplus is log-uniform in STEP_RANGE; `last_tap`, a convolution
    that changes nothing; `halving`, taps .., .1, .2, .4 of the tokens before, and scale.
    `parts`: the values of consecutive rows, instead of `kind` and `scale`. A value of kind
    UNKNOWN has no rows.
    """

    name: str
    shape: torch.Size
    seed: int
    kind: str
    scale: float
    parts: tuple["InitialValue", ...] = ()

    @property
    def rows_per_block(self) -> int:
        """The rows that share one generator: about 2^16 elements, at least one row."""
        return max(1, BLOCK_ELEMENTS // math.prod(self.shape[1:]))

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the rows [start, stop) of dim 0, float32 on the CPU."""
        if self.parts:
            return self._rows_of_parts(start, stop)

        # Values that are no random numbers.
        size = (stop - start, *self.shape[1:])
        values = torch.empty(size, device="cpu", dtype=torch.float32)
        if self.kind == "constant":
            return values.fill_(self.scale)
        if self.kind == "log_count":
            return torch.arange(start + 1, stop + 1, device="cpu", dtype=torch.float32).log()
        if self.kind == "halving":
            values[..., -1] = self.scale
            for j in range(1, values.shape[-1]):  # of x_{t-j}
                values[..., -1 - j] = FIRST_SCALAR_TAP * 0.5 ** (j - 1)
            return values
        if self.kind == "last_tap":
            values.zero_()
            values[..., -1] = 1.0
            return values

        # Random values are drawn in whole blocks: a row does not depend on where its shard begins.
        row = start
        while row < stop:
            index, skip = divmod(row, self.rows_per_block)
            count = min(self.rows_per_block - skip, stop - row)
            values[row - start : row - start + count] = self._block(index)[skip : skip + count]
            row += count
        return values

    def _rows_of_parts(self, start: int, stop: int) -> Tensor:
        rows = []
        # The rows that [start, stop) and each part have in common, numbered from the part's first
        # row.
        first = 0  # of the part
        for part in self.parts:
            last = first + part.shape[0]
            low = min(max(start, first), last)
            high = min(max(stop, first), last)
            rows.append(part.rows(low - first, high - first))
            first = last
        return torch.cat(rows)

    def _block(self, index: int) -> Tensor:
        """Return a block of random rows, by a generator of its own."""
        # 63 bits of a digest, which manual_seed takes without wrapping
        digest = hashlib.sha256(f"{self.seed}/{self.name}/{index}".encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)

        # the last block may have fewer rows
        num_rows = min(self.rows_per_block, self.shape[0] - index * self.rows_per_block)
        block = torch.empty((num_rows, *self.shape[1:]), device="cpu", dtype=torch.float32)
        if self.kind == "uniform":
            return block.uniform_(-self.scale, self.scale, generator=generator)
        if self.kind == "share":
            return block.uniform_(0.0, self.scale, generator=generator)
        if self.kind == "normal":
            return block.normal_(0.0, self.scale, generator=generator)
        if self.kind == "log_uniform":
            return block.uniform_(0.0, self.scale, generator=generator).log()
        if self.kind == "step":
            smallest, largest = STEP_RANGE
            logs = block.uniform_(math.log(smallest), math.log(largest), generator=generator)
            # softplus inverted is log(e^s - 1) = s + log(1 - e^-s), exact for small s
            steps = logs.exp()
            return steps + (-torch.expm1(-steps)).log()

        # What is left is truncated_normal.
        bound = TRUNCATE_SIGMAS * self.scale
        return torch.nn.init.trunc_normal_(
            block, 0.0, self.scale, -bound, bound, generator=generator
        )
