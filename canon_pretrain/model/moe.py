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

        # In training, measure the balance, and drop what exceeds the capacity.
        # (a cache means decoding, which drops nothing)
        is_training = self.training and context.cache is None
        if is_training:
            chosen_BCE = F.one_hot(expert_NK.view(len(x_BTD), -1), self.num_experts)
            balance_B = self._balance(chosen_BCE, score_NE)
            num_dropped = chosen_BCE.new_zeros(1)
            if self.capacity:
                is_kept_NK = self._is_kept(chosen_BCE).view_as(gate_NK)
                gate_NK = gate_NK * is_kept_NK  # computed, but not added
                num_dropped = (~is_kept_NK).sum()[None]

        # The sum of each token's experts, and of the shared ones.
        count_E, y_NKD = self._apply_experts(x_ND, expert_NK)
        y_ND = (gate_NK[..., None] * y_NKD).sum(dim=1).to(x_ND.dtype)
        if self.shared_experts is not None:
            y_ND = y_ND + self.shared_experts(x_ND)
        y_BTD = y_ND.view_as(x_BTD)
        if is_training:
            return Routed(y_BTD, torch.cat((count_E, num_dropped)), balance_B)
        return y_BTD

    def _balance(self, chosen_BCE: Tensor, score_NE: Tensor) -> Tensor:
        """Return the balance of each row, E sum_e f_e P_e (Fedus et al. 2021), [B].

        f_e is the fraction of the row's choices C = T K for expert e, P_e its mean probability. It
        is 1 if all are equal.
        """
        num_rows, num_choices, _ = chosen_BCE.shape
        # per row, as each row's load is evened by itself
        fraction_BE = chosen_BCE.sum(dim=1) / num_choices  # f
        mean_BE = score_NE.view(num_rows, -1, self.num_experts).mean(dim=1)  # P
        return self.num_experts * (fraction_BE * mean_BE).sum(dim=1)

    def _is_kept(self, chosen_BCE: Tensor) -> Tensor:
        """Return which choices are within their expert's capacity, bool [B, C]."""
        top_k = self.router.top_k
        num_tokens = chosen_BCE.shape[1] // top_k

        max_choices = math.ceil(self.capacity * top_k * num_tokens / self.num_experts)
        # the rank of each choice among those of its row for the same expert, from 1 on
        # `chosen` is one-hot: the sum over E leaves the count of the chosen expert
        rank_BC = (chosen_BCE.cumsum(dim=1) * chosen_BCE).sum(dim=2)
        return rank_BC <= max_choices

    def _apply_experts(self, x_ND: Tensor, expert_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens of each expert, int64 [E], and the experts' outputs, [N, K, D]."""
        top_k = self.router.top_k
        # Sort the choices by expert; `inverse` undoes it.
        expert_S = expert_NK.flatten()
        order_S = expert_S.argsort(stable=True)
        inverse_S = order_S.argsort()

        # not bincount: the size of its result depends on data
        count_E = expert_S.new_zeros(self.num_experts)
        count_E = count_E.scatter_add(0, expert_S, torch.ones_like(expert_S))

        # a copy of each token per choice, sorted by expert; back in the order of the choices
        x_SD = x_ND[:, None].expand(-1, top_k, -1).flatten(0, 1)
        # (with expert parallelism, hooks of `experts` exchange rows between ranks)
        y_SD = self.experts(_Permuted.apply(x_SD, order_S, inverse_S), count_E)
        return count_E, _Permuted.apply(y_SD, inverse_S, order_S).unflatten(0, (-1, top_k))


class _Permuted(torch.autograd.Function):
    """x[order], with a gather for backward too: exact in any order of execution."""

    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, order_S: Tensor, inverse_S: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_S)
        return x_SD.index_select(0, order_S)

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None, None]:
        return grad_SD.index_select(0, ctx.saved_tensors[0]), None, None


def grouped_linear(x_SD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """Return x w_e^T [S, F], where group e of the rows ends before ends_e (int32)."""
    is_aligned = not (weight_EFD.shape[1] % ALIGNMENT or weight_EFD.shape[2] % ALIGNMENT)
    if x_SD.is_cuda and x_SD.dtype == torch.bfloat16 and is_aligned:
        return torch._grouped_mm(x_SD, weight_EFD.mT, offs=ends_E)
    return _grouped_linear(x_SD, weight_EFD, ends_E)


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
