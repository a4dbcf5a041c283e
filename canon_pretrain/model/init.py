"""Initial weights as pure functions: the same bits at any world size, in any order and sharding.

FSDP2's own random initialization writes the same shard on every rank on a CPU, and depends on the
world size elsewhere.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from canon_pretrain.model.args import ModelArgs

BLOCK_ELEMENTS = 2**16
TRUNCATE_SIGMAS = 3.0
PAPER_STD = 0.02
MAMBA_STD = 0.1
"""Of Mamba2's embedding, `initializer_range` of its config."""
STEP_RANGE = 1e-3, 1e-1
"""Initial step sizes dt of Mamba2 and GatedDeltaNet for inputs of 0."""
LARGEST_RATE = 16.0
MIMETIC_STEP, MIMETIC_RATE = 0.54, 8.0
"""softplus(0.54) = 1; a state decays by exp(-exp(-8)) per token."""
# inserted into a parameter's name by torch.compile and activation checkpointing
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class InitialValue:
    """The initial value of one parameter, a function of these fields alone.

    `kind`: `constant` scale; `normal` N(0, scale); `truncated_normal` the same, cut at 3 sigma;
    `uniform` U(-scale, scale); `log_uniform` log U(0, scale); `log_count` log(row + 1); `step`, of
    which softplus is log-uniform in STEP_RANGE; `last_tap`, a convolution that changes nothing.
    `parts`: values of the rows one after the other; the others' fields are then unused.
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
        size = (stop - start, *self.shape[1:])
        if self.kind == "log_count":
            return torch.arange(start + 1, stop + 1, device="cpu", dtype=torch.float32).log()
        if self.kind in ("constant", "last_tap"):
            fill = self.scale if self.kind == "constant" else 0.0
            values = torch.full(size, fill, device="cpu", dtype=torch.float32)
            if self.kind == "last_tap":
                values[..., -1] = 1.0
            return values
        values = torch.empty(size, device="cpu", dtype=torch.float32)
        first = 0
        for part in self.parts:
            low, high = (min(max(row - first, 0), part.shape[0]) for row in (start, stop))
            values[first + low - start : first + high - start] = part.rows(low, high)
            first += part.shape[0]
        if self.parts:
            return values
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
        if self.kind == "log_uniform":
            return block.uniform_(0.0, self.scale, generator=generator).log()
        if self.kind == "step":
            low, high = (math.log(step) for step in STEP_RANGE)
            steps = block.uniform_(low, high, generator=generator).exp()
            return steps + (-torch.expm1(-steps)).log()  # softplus inverted
        bound = TRUNCATE_SIGMAS * self.scale
        return torch.nn.init.trunc_normal_(
            block, 0.0, self.scale, -bound, bound, generator=generator
        )


def plain_name(name: str) -> str:
    """Return a parameter's name without WRAPPERS."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def initial_value(args: ModelArgs, name: str, shape: torch.Size) -> InitialValue:
    """Return the initial value of the parameter `name` of `Transformer(args)`.

    Canon and Mamba2's conv1d: PyTorch's Conv1d default U(-K^-1/2, K^-1/2), +-1/2 at kernel 4
    (appendix C, "default initialisation"), for any `init`; dynamic filters begin as these
    (canon.py). The conv1d of GLA and GatedDeltaNet: N(0, 0.02) for any `init`, as in
    flash-linear-attention and PhysicsLM4. Biases: 0. Norm gains: 1. Recurrences: as in
    flash-linear-attention and transformers. All others are matrices [.., out, in]: N(0, 0.02) with
    `paper`; with `lingua` std in^-1/2 (D^-1/2, and F^-1/2 for w2) cut at 3 sigma. Mamba2's with
    `paper` are those of transformers 4.47, which the paper's code requires: U(-in^-1/2, in^-1/2),
    and N(0, 0.1) for the embedding. With `output_gate_rank`, both low-rank products have the
    deviation 0.02 of one matrix, as the release's. Raises ValueError for an unknown name.
    """
    name = plain_name(name)
    value = partial(InitialValue, name, torch.Size(shape), args.init_seed)
    module, own = name.rsplit(".", 2)[-2:] if "." in name else ("", name)
    if args.mimetic_init and (found := _mimetic(args, name, shape, value)):
        return found
    if module.startswith("canon_") and own in ("up", "down"):
        return value("constant", 0.0) if own == "up" else value("uniform", shape[-1] ** -0.5)
    if module == "conv1d" and args.mixer != "mamba2":
        return value("normal", PAPER_STD)
    if module.startswith("canon_") or module == "conv1d":
        return value("uniform", args.canon_bound)
    if own == "bias":
        return value("constant", 0.0)
    if module.endswith("norm") or own == "D":
        return value("constant", 1.0)
    if own == "dt_bias":
        return value("step", 0.0)
    if own == "A_log":
        return value("log_count" if args.mixer == "mamba2" else "log_uniform", LARGEST_RATE)
    if len(shape) < 2 or own not in ("weight", "w1", "w2", "w3"):
        raise ValueError(f"no initialization for {name} of shape {tuple(shape)}")
    if args.init == "lingua":
        return value("truncated_normal", shape[-1] ** -0.5)
    if args.mixer == "mamba2":
        is_embedding = module == "tok_embeddings"
        law = ("normal", MAMBA_STD) if is_embedding else ("uniform", shape[-1] ** -0.5)
        return value(*law)
    if args.output_gate_rank and module in ("down", "up"):
        return value("normal", (PAPER_STD * min(shape) ** -0.5) ** 0.5)
    return value("normal", PAPER_STD)


def _mimetic(
    args: ModelArgs, name: str, shape: torch.Size, value: Callable[..., InitialValue]
) -> InitialValue | None:
    """Return Mamba2's mimetic initial value (Trockman et al., arXiv 2410.11135), if it has one.

    With it the recurrence begins as linear attention: decay and step about 1, W_C^T W_B about I
    (both the same rows, of variance 1/S), a convolution that changes nothing. The paper's c = 8 is
    read as A = -exp(-8).
    """
    path, _, own = name.rpartition(".")
    if own == "A_log":
        return value("constant", -MIMETIC_RATE)
    if own == "dt_bias":
        return value("constant", MIMETIC_STEP)
    if path.endswith("conv1d"):
        return value("constant", 0.0) if own == "bias" else value("last_tap", 0.0)
    if not path.endswith("in_proj"):
        return None
    usual = initial_value(replace(args, mimetic_init=False), name, shape)
    rows = {"zx": 4 * args.dim, "bc": args.state_dim, "dt": args.num_heads}
    zx, bc, dt = (
        replace(usual, name=f"{name}/{part}", shape=torch.Size((count, args.dim)))
        for part, count in rows.items()
    )
    bc = replace(bc, kind="normal", scale=args.state_dim**-0.5)
    return value("parts", 0.0, (zx, bc, bc, dt))
