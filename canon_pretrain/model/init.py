"""Initial weights as pure functions: the same bits at any world size, in any order and sharding.

FSDP2's own random initialization writes the same shard on every rank on a CPU, and depends on the
world size elsewhere.
"""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from canon_pretrain.model.args import ModelArgs

BLOCK_ELEMENTS = 2**16
TRUNCATE_SIGMAS = 3.0
PAPER_STD = 0.02
# inserted into a parameter's name by torch.compile and activation checkpointing
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class InitialValue:
    """The initial value of one parameter, a function of these fields alone.

    `kind`: `ones`, `zeros`; `normal` N(0, scale); `truncated_normal` the same, cut at 3 sigma;
    `uniform` U(-scale, scale).
    """

    name: str
    shape: torch.Size
    seed: int
    kind: str
    scale: float

    @property
    def rows_per_block(self) -> int:
        """The rows that share one generator: about 2^16 elements, at least one row."""
        return max(1, BLOCK_ELEMENTS // math.prod(self.shape[1:]))

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the rows [start, stop) of dim 0, float32 on the CPU."""
        size = (stop - start, *self.shape[1:])
        if self.kind in ("ones", "zeros"):
            return torch.full(size, float(self.kind == "ones"), device="cpu", dtype=torch.float32)
        values = torch.empty(size, device="cpu", dtype=torch.float32)
        row = start
        while row < stop:
            index, skip = divmod(row, self.rows_per_block)
            count = min(self.rows_per_block - skip, stop - row)
            values[row - start : row - start + count] = self._block(index)[skip : skip + count]
            row += count
        return values

    def _block(self, index: int) -> Tensor:
        rows = min(self.rows_per_block, self.shape[0] - index * self.rows_per_block)
        block = torch.empty((rows, *self.shape[1:]), device="cpu", dtype=torch.float32)
        digest = hashlib.sha256(f"{self.seed}/{self.name}/{index}".encode()).digest()
        # 63 bits, which manual_seed takes without wrapping
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        if self.kind == "uniform":
            return block.uniform_(-self.scale, self.scale, generator=generator)
        if self.kind == "normal":
            return block.normal_(0.0, self.scale, generator=generator)
        bound = TRUNCATE_SIGMAS * self.scale
        law = 0.0, self.scale, -bound, bound
        return torch.nn.init.trunc_normal_(block, *law, generator=generator)


def plain_name(name: str) -> str:
    """Return a parameter's name without WRAPPERS."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def initial_value(args: ModelArgs, name: str, shape: torch.Size) -> InitialValue:
    """Return the initial value of the parameter `name` of `Transformer(args)`.

    Canon: PyTorch's Conv1d default U(-K^-1/2, K^-1/2), +-1/2 at kernel 4 (appendix C, "default
    initialisation"), for any `init`. Biases: 0. Norm gains: 1. All others are matrices [out, in]:
    N(0, 0.02) with `paper`; with `lingua` std in^-1/2 (D^-1/2, and F^-1/2 for w2) cut at 3 sigma.
    Raises ValueError for an unknown name.
    """
    name = plain_name(name)
    module = name.split(".")[-2] if "." in name else ""
    if name.endswith(".bias"):
        law = "zeros", 0.0
    elif module.startswith("canon_"):
        law = "uniform", args.canon_bound
    elif module.endswith("norm"):
        law = "ones", 0.0
    elif len(shape) != 2:
        raise ValueError(f"no initialization for {name} of shape {tuple(shape)}")
    elif args.init == "lingua":
        law = "truncated_normal", shape[1] ** -0.5
    else:
        law = "normal", PAPER_STD
    return InitialValue(name, torch.Size(shape), args.init_seed, *law)
