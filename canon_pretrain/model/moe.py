"""A mixture of experts: a router sends each token to some of E feed-forwards.

The parameters have the layout of torchtitan's models/moe, so that its ExpertParallel can shard
`experts`, whose inputs are sorted by expert. No shape depends on the routing: a block stays one
graph.

Shapes: B rows, T tokens, N = B T, D hidden, F width of an expert, E experts, K experts per token,
C = T K choices of a row, S = N K tokens, one per choice.
"""

import itertools
import math
import re
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canon_pretrain.kernels.backends import ffn_activation
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.cache import NO_CONTEXT, Context
from canon_pretrain.model.canon import Stream, per_reader

# by module: registering a name again frees the operator that an exported copy, or the package, uses
OPERATORS = "canon_pretrain::" + re.sub(r"\W", "_", __name__, flags=re.ASCII)
ALIGNMENT = 8
"""CUDA's grouped product reads rows at multiples of 16 bytes: 8 values in bfloat16."""


class Routed(NamedTuple):
    """What experts, and a block with experts, return in training."""

    y_BTD: Tensor
    # int64 [E + 1]: the tokens of each expert, and the number of choices that are dropped
    load_E: Tensor
    balance_B: Tensor  # how unevenly the experts of each row are chosen; see `MoE`


class Gate(nn.Linear):
    """The router's linear layer, in float32."""

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return a score per expert, float32 [N, E]."""
        return F.linear(x_ND.float(), self.weight.float())


class Router(nn.Module):
    """Choose each token's K experts: those of the largest probability plus bias, in float32."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.gate = Gate(args.dim, args.num_experts, bias=False)
        self.top_k = args.experts_per_token
        self.expert_bias: Tensor | None
        bias_E = torch.zeros(args.num_experts) if args.moe_balance == "bias" else None
        self.register_buffer("expert_bias", bias_E)

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the probabilities [N, E], those of the chosen [N, K], and the chosen experts.

        As in tutel, several experts' probabilities are divided by their sum.
        """
        score_NE = self.gate(x_ND).softmax(dim=1)

        # the bias changes which experts are chosen, but not their weights
        biased_NE = score_NE
        if self.expert_bias is not None:
            biased_NE = score_NE + self.expert_bias

        expert_NK = biased_NE.topk(self.top_k, dim=1).indices
        gate_NK = score_NE.gather(1, expert_NK)
        if self.top_k > 1:
            gate_NK = gate_NK / gate_NK.sum(dim=1, keepdim=True)
        return score_NE, gate_NK, expert_NK


class GroupedExperts(nn.Module):
    """E feed-forwards without biases; standard w2(act(w1 x)), or gated w2(act(w1 x) * w3 x)."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        shape = (args.num_experts, args.ffn_dim, args.dim)
        self.w1 = nn.Parameter(torch.empty(shape))
        self.w2 = nn.Parameter(torch.empty(args.num_experts, args.dim, args.ffn_dim))
        self.w3 = nn.Parameter(torch.empty(shape)) if args.moe_gated else None
        self.activation = args.ffn_activation

    def forward(self, x_SD: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Return y [S, D] of tokens that are sorted by expert."""
        ends_E = num_tokens_per_expert.cumsum(dim=0, dtype=torch.int32)
        inner_SF = grouped_linear(x_SD, _local(self.w1), ends_E)
        inner_SF = ffn_activation(inner_SF, self.activation)
        if self.w3 is not None:
            inner_SF = inner_SF * grouped_linear(x_SD, _local(self.w3), ends_E)
        return grouped_linear(inner_SF, _local(self.w2), ends_E)


def _local(weight: Tensor) -> Tensor:
    """Return this rank's experts of a weight that is sharded by expert."""
    # a DTensor after ExpertParallel has sharded it
    return weight.to_local() if hasattr(weight, "to_local") else weight


class MoE(nn.Module):
    """The sum of a token's experts, each times its probability, and of the shared experts.

    `moe_capacity` c: in training, an expert takes the first ceil(c K T / E) choices of each row, in
    the order of the tokens; the others are dropped. Neither ranks nor micro-batches change that.
    Evaluation drops none: decoding equals a full pass, and no token depends on padding.
    """

    readers = 1

    def __init__(self, args: ModelArgs, shared_experts: nn.Module | None = None) -> None:
        super().__init__()
        self.router = Router(args)
        self.experts = GroupedExperts(args)
        self.shared_experts = shared_experts
        self.num_experts = args.num_experts
        self.capacity = args.moe_capacity

    def forward(self, x_BTD: Stream, context: Context = NO_CONTEXT) -> Tensor | Routed:
        """Return y_BTD, which is added to the residual stream; in training mode, `Routed`."""
        (x_BTD,) = per_reader(x_BTD, self.readers)
        x_ND = x_BTD.flatten(0, 1)
        score_NE, gate_NK, expert_NK = self.router(x_ND)
        expert_BC = expert_NK.view(len(x_BTD), -1)
        choices = sort_choices(expert_BC, self.num_experts)

        # In training, measure the balance, and drop what exceeds the capacity: computed, but not
        # added.
        # (a cache means decoding, which drops nothing)
        is_training = self.training and context.cache is None
        if is_training:
            balance_B = self._balance(choices.count_BE, score_NE)
            num_dropped = choices.count_BE.new_zeros(1)
            if self.capacity:
                is_kept_NK = self._is_kept(choices, expert_BC).view_as(gate_NK)
                gate_NK = gate_NK * is_kept_NK
                num_dropped = (~is_kept_NK).sum()[None]

        # The sum of each token's experts, and of the shared ones.
        # (with expert parallelism, hooks of `experts` exchange rows between ranks)
        count_E = choices.count_BE.sum(dim=0)
        place_NK = choices.place_S.view_as(expert_NK)
        x_SD = _Dispatch.apply(x_ND, choices.order_S, place_NK)
        y_SD = self.experts(x_SD, count_E)
        y_ND = _Combine.apply(y_SD, gate_NK, choices.order_S, place_NK).to(x_ND.dtype)
        if self.shared_experts is not None:
            y_ND = y_ND + self.shared_experts(x_ND)
        y_BTD = y_ND.view_as(x_BTD)
        if is_training:
            return Routed(y_BTD, torch.cat((count_E, num_dropped)), balance_B)
        return y_BTD

    def _balance(self, count_BE: Tensor, score_NE: Tensor) -> Tensor:
        """Return the balance of each row, E sum_e f_e P_e (Fedus et al. 2021), [B].

        f_e is the fraction of the row's choices C = T K for expert e, P_e its mean probability. It
        is 1 if all are equal.
        """
        num_rows = len(count_BE)
        num_choices = len(score_NE) // num_rows * self.router.top_k
        # per row, as each row's load is evened by itself
        fraction_BE = count_BE / num_choices  # f
        mean_BE = score_NE.view(num_rows, -1, self.num_experts).mean(dim=1)  # P
        return self.num_experts * (fraction_BE * mean_BE).sum(dim=1)

    def _is_kept(self, choices: "Choices", expert_BC: Tensor) -> Tensor:
        """Return which choices are within their expert's capacity, bool [B, C]."""
        top_k = self.router.top_k
        num_tokens = expert_BC.shape[1] // top_k
        max_choices = math.ceil(self.capacity * top_k * num_tokens / self.num_experts)

        # The first place of each expert's choices of each row: rows follow each other.
        count_EB = choices.count_BE.T
        end_EB = count_EB.flatten().cumsum(dim=0).view_as(count_EB)
        first_BE = (end_EB - count_EB).T

        # the number of earlier choices of the row for the same expert
        rank_BC = choices.place_S.view_as(expert_BC) - first_BE.gather(1, expert_BC)
        return rank_BC < max_choices


class Choices(NamedTuple):
    """The choices of all tokens, sorted by expert; an expert's are in the order of the tokens."""

    order_S: Tensor
    """int64: the choice in each place."""
    place_S: Tensor
    """int64: the place of each choice; the inverse."""
    count_BE: Tensor
    """int64: the choices of each row for each expert."""


def sort_choices(expert_BC: Tensor, num_experts: int) -> Choices:
    """Sort the choices of all rows by expert, in one sort."""
    expert_S = expert_BC.flatten()
    # 2 bytes of a key instead of 8: a radix sort reads all keys once per byte
    order_S = expert_S.to(torch.int16).argsort(stable=True)
    # counted, not arange: costs.py traces a GPU's branches on tensors of a CPU
    places_S = torch.ones_like(order_S).cumsum(dim=0) - 1
    place_S = torch.empty_like(order_S).scatter(0, order_S, places_S)

    # not bincount: the size of its result depends on data
    count_BE = expert_BC.new_zeros(len(expert_BC), num_experts)
    count_BE = count_BE.scatter_add(1, expert_BC, torch.ones_like(expert_BC))
    return Choices(order_S, place_S, count_BE)


class _Dispatch(torch.autograd.Function):
    """A copy of each token per choice, in the order of the places.

    Backward gathers too, as that of `_Combine`: it is exact in any order of execution.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_S: Tensor, place_NK: Tensor) -> Tensor:
        ctx.save_for_backward(place_NK)
        return x_ND.index_select(0, order_S // place_NK.shape[1])

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None, None]:
        (place_NK,) = ctx.saved_tensors
        return _of_tokens(grad_SD, place_NK).sum(dim=1), None, None


class _Combine(torch.autograd.Function):
    """The sum of each token's rows, each times its gate, [N, D] in the gate's dtype."""

    @staticmethod
    def forward(
        ctx: Any, y_SD: Tensor, gate_NK: Tensor, order_S: Tensor, place_NK: Tensor
    ) -> Tensor:
        ctx.save_for_backward(y_SD, gate_NK, order_S, place_NK)
        return (gate_NK[..., None] * _of_tokens(y_SD, place_NK)).sum(dim=1)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y_SD, gate_NK, order_S, place_NK = ctx.saved_tensors
        grad_SD = grad_ND.index_select(0, order_S // place_NK.shape[1])
        gate_S = gate_NK.flatten().index_select(0, order_S)
        dy_SD = gate_S[:, None] * grad_SD
        dgate_S = (y_SD * grad_SD).sum(dim=1)
        return dy_SD.to(y_SD.dtype), dgate_S[place_NK], None, None


def _of_tokens(y_SD: Tensor, place_NK: Tensor) -> Tensor:
    """Return the rows of each token, [N, K, D]."""
    return y_SD.index_select(0, place_NK.flatten()).unflatten(0, place_NK.shape)


def grouped_linear(x_SD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """Return x w_e^T [S, F], where group e of the rows ends before ends_e (int32)."""
    if not x_SD.is_cuda or loop_reason(x_SD.dtype, *weight_EFD.shape[1:]):
        return _grouped_linear(x_SD, weight_EFD, ends_E)
    return torch._grouped_mm(x_SD, weight_EFD.mT, offs=ends_E)


def loop_reason(dtype: torch.dtype, *widths: int) -> str | None:
    """Return why a GPU needs a loop over experts of these widths; None: one grouped product."""
    if dtype != torch.bfloat16:
        return f"{dtype} is not torch.bfloat16"
    for width in widths:
        if width % ALIGNMENT:
            return f"the width {width} is not a multiple of {ALIGNMENT}"
    return None


@torch.library.custom_op(f"{OPERATORS}_grouped_linear", mutates_args=())
def _grouped_linear(x_SD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """A loop over the experts; an operator, because its bounds are data.

    In torch 2.13, a graph accepts torch._grouped_mm in bfloat16 only.
    """
    y_SF = x_SD.new_zeros(len(x_SD), weight_EFD.shape[1])
    for e, rows in enumerate(_rows_by_expert(ends_E)):
        torch.mm(x_SD[rows], weight_EFD[e].T, out=y_SF[rows])
    return y_SF


@torch.library.custom_op(f"{OPERATORS}_grouped_linear_backward", mutates_args=())
def _grouped_linear_backward(
    grad_SF: Tensor, x_SD: Tensor, weight_EFD: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor]:
    dx_SD = torch.zeros_like(x_SD)
    dweight_EFD = torch.empty_like(weight_EFD)
    for e, rows in enumerate(_rows_by_expert(ends_E)):
        torch.mm(grad_SF[rows], weight_EFD[e], out=dx_SD[rows])
        torch.mm(grad_SF[rows].T, x_SD[rows], out=dweight_EFD[e])  # 0 for no token
    return dx_SD, dweight_EFD


def _rows_by_expert(ends_E: Tensor) -> list[slice]:
    return [slice(start, end) for start, end in itertools.pairwise([0, *ends_E.tolist()])]


@_grouped_linear.register_fake
def _(x_SD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    return x_SD.new_empty(x_SD.shape[0], weight_EFD.shape[1])


@_grouped_linear_backward.register_fake
def _(grad_SF: Tensor, x_SD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_SD), torch.empty_like(weight_EFD)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad_SF: Tensor) -> tuple[Tensor, Tensor, None]:
    dx_SD, dweight_EFD = _grouped_linear_backward(grad_SF, *ctx.saved_tensors)
    return dx_SD, dweight_EFD, None


_grouped_linear.register_autograd(_differentiate, setup_context=_save)
