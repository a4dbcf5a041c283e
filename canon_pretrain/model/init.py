"""Initial weights as pure functions: the same bits at any world size, in any order and sharding.

FSDP2's own random initialization writes the same shard on every rank on a CPU, and depends on the
world size elsewhere.
"""

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.mixers import mixer_class

# drawn by one generator; part of what defines the weights, as a change of it would change them
BLOCK_ELEMENTS = 2**16
TRUNCATE_SIGMAS = 3.0
PAPER_STD = 0.02
MAMBA_STD = 0.1
"""Of Mamba2's embedding, `initializer_range` of its config."""
STEP_RANGE = (1e-3, 1e-1)
"""Initial step sizes dt of Mamba2 and GatedDeltaNet for inputs of 0."""
LARGEST_RATE = 16.0  # of GatedDeltaNet's decays
FIRST_SCALAR_TAP = 0.4
"""Of the token before, with one tap for all channels (the Canon paper's footnote 10)."""
MIMETIC_STEP = 0.54  # softplus(0.54) = 1
# name of a parameter -> kind and scale of its value
VECTORS = {"bias": ("constant", 0.0), "D": ("constant", 1.0), "dt_bias": ("step", 0.0)}
OWN_KINDS = ("constant", "normal", "uniform", "log_uniform", "log_count", "step")
"""Of values that a mixer of the user's own sets (`Mixer.init`)."""
# inserted into a parameter's name by torch.compile and activation checkpointing
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class InitialValue:
    """The initial value of one parameter, a function of these fields alone.

    `kind`: `constant` scale; `normal` N(0, scale); `truncated_normal` the same, cut at 3 sigma;
    `uniform` U(-scale, scale); `share` U(0, scale); `log_uniform` log U(0, scale); `log_count`
    log(row + 1); `step`, of which softplus is log-uniform in STEP_RANGE; `last_tap`, a convolution
    that changes nothing; `halving`, taps .., .1, .2, .4 of the tokens before, and scale.
    `parts`: the values of consecutive rows, instead of `kind` and `scale`.
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
            return steps + (-torch.expm1(-steps)).log()  # softplus inverted

        # What is left is truncated_normal.
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
    (canon.py), scalar taps with 1, .4, .2, .1, and the shares of a shift with U(0, 1), for RWKV's
    powers of channel / C. The smear gate: 0. The conv1d of GLA and GatedDeltaNet: N(0, 0.02) for
    any `init`, as in flash-linear-attention and PhysicsLM4. Biases: 0. Norm gains: 1. Recurrences:
    as in flash-linear-attention and transformers. All others are matrices [.., out, in]: N(0, 0.02)
    with `paper`; with `lingua` std in^-1/2 (D^-1/2, and F^-1/2 for w2) cut at 3 sigma. Mamba2's
    with `paper` are those of transformers 4.47, which the paper's code requires: U(-in^-1/2,
    in^-1/2), and N(0, 0.1) for the embedding. With `output_gate_rank`, both low-rank products have
    the deviation 0.02 of one matrix, as the release's. Raises ValueError for an unknown name.
    """
    name = plain_name(name)
    # The arguments are those of the parameter's layer.
    if in_layer := re.match(r"layers\.(\d+)\.", name):
        args = args.layer_args[int(in_layer[1])]
    elif args.pattern:  # the embedding, the last norm and the head, by the first layer
        args = args.layer_args[0]
    value = partial(InitialValue, name, torch.Size(shape), args.init_seed)
    # the leading dot: a parameter of the model itself has the module ""
    *_, module, own_name = f".{name}".split(".")

    # Special values, before those that follow from the kind of parameter.
    if name.startswith("smear."):  # at first the model is the same as without
        return value("constant", 0.0)
    if args.mimetic_init:
        mimetic = _mimetic_value(args, name, shape, value)
        if mimetic is not None:
            return mimetic

    if args.is_own_mixer and (own := name.partition(".attention.")[2]):
        if own in (values := mixer_class(args.mixer).init):
            kind, scale = values[own]
            check_choice(f'{args.mixer}: init["{own}"]', kind, OWN_KINDS)
            return value(kind, scale)

    # convolutions
    if module.startswith("canon_"):
        if own_name in ("up", "per_head"):
            return value("constant", 0.0)
        if own_name == "down":
            return value("uniform", shape[-1] ** -0.5)
        if args.canon_filter == "scalar":  # the 1 of the current token is the residual
            return value("halving", 0.0 if args.canon_residual else 1.0)
        if args.canon_filter == "shift":
            return value("share", 1.0)
        return value("uniform", args.canon_bound)
    if module == "conv1d":
        if args.mixer == "mamba2":
            return value("uniform", args.canon_bound)
        return value("normal", PAPER_STD)

    # vectors
    if args.is_own_mixer and own_name not in ("bias", "weight"):
        raise UserError(
            "mixer.init",
            f"{args.mixer}: the class has no initial value for {name}. Add it to `init`",
            name=name,
        )
    if own_name in VECTORS:
        return value(*VECTORS[own_name])
    if module.endswith("norm"):
        return value("constant", 1.0)
    if own_name == "A_log":
        # `log_count` has no scale
        kind = "log_count" if args.mixer == "mamba2" else "log_uniform"
        return value(kind, LARGEST_RATE)

    # matrices
    if len(shape) < 2 or own_name not in ("weight", "w1", "w2", "w3"):
        raise ValueError(f"no initialization for {name} of shape {tuple(shape)}")
    if args.init == "lingua":
        return value("truncated_normal", shape[-1] ** -0.5)
    if args.mixer == "mamba2":
        if module == "tok_embeddings":
            return value("normal", MAMBA_STD)
        return value("uniform", shape[-1] ** -0.5)

    if args.output_gate_rank and module in ("down", "up"):
        # the product of rank r has the deviation sqrt(r) std^2 = PAPER_STD
        return value("normal", (PAPER_STD * min(shape) ** -0.5) ** 0.5)
    return value("normal", PAPER_STD)


def _mimetic_value(
    args: ModelArgs, name: str, shape: torch.Size, value: Callable[..., InitialValue]
) -> InitialValue | None:
    """Return Mamba2's mimetic initial value (Trockman et al., arXiv 2410.11135), if it has one.

    With it the recurrence begins as linear attention: decay and step about 1, W_C^T W_B about I
    (both the same rows, of variance 1/S), a convolution that changes nothing. The paper's c is
    read as A = -exp(-c).
    """
    if name.endswith(".A_log"):
        return value("constant", -args.mimetic_rate)
    if name.endswith(".dt_bias"):
        return value("constant", MIMETIC_STEP)
    if name.endswith("conv1d.bias"):
        return value("constant", 0.0)
    if name.endswith("conv1d.weight"):
        return value("last_tap", 0.0)
    if not name.endswith("in_proj.weight"):
        return None

    # the rows of in_proj are those of z and x, B, C and dt
    without = replace(args, mimetic_init=False, mimetic_rate=ModelArgs.mimetic_rate)
    usual = initial_value(without, name, shape)

    def part(suffix: str, num_rows: int) -> InitialValue:
        part_shape = torch.Size((num_rows, args.dim))
        return replace(usual, name=f"{name}/{suffix}", shape=part_shape)

    # `bc` twice: values follow from the name, so the rows of B and C are equal
    bc = replace(part("bc", args.state_dim), kind="normal", scale=args.state_dim**-0.5)
    return value("parts", 0.0, (part("zx", 4 * args.dim), bc, bc, part("dt", args.num_heads)))
