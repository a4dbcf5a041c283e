"""The language model: embedding, blocks, norm, head, and their initialization.

Shapes: B batch, T tokens, S tokens with those before them, D hidden, F ffn dim, V vocabulary,
N = T + Canon's reach (in the head N = B T), M selected tokens, L layers, E experts.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canon_pretrain.core.errors import UserError
from canon_pretrain.kernels.backends import (
    check_canon_backend,
    check_mixer_backend,
    ffn_activation,
)
from canon_pretrain.model.args import MIXER_SITES, ModelArgs, without_positions
from canon_pretrain.model.attend import Attend
from canon_pretrain.model.attention import Attention, Rope
from canon_pretrain.model.cache import NO_CONTEXT, Context, TokenCache
from canon_pretrain.model.canon import (
    Canon,
    Stream,
    add_norm_canon,
    canon_or_same,
    make_canon,
    per_reader,
)
from canon_pretrain.model.contexts import layer_contexts
from canon_pretrain.model.init import initial_value
from canon_pretrain.model.initial_value import InitialValue
from canon_pretrain.model.mixers import Mixer, mixer_class
from canon_pretrain.model.moe import MoE, Routed

Writer = Callable[[nn.Parameter, InitialValue], None]
HeadLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(h_ND, weight_VD, labels_N) -> (nats_N of each token, detached; the sum that is minimized)."""


class FeedForward(nn.Module):
    """w2(act(gate) * up) with [gate|up] = Canon-D([w1 x | w3 x]), paper section 4.

    The standard MLP ("GPT2(RoPE)", Figure 20) has no up: w2(act(Canon-D(w1 x))). act is silu, relu
    squared (R2) or, in the standard MLP, GPT2's gelu.
    """

    def __init__(self, args: ModelArgs, canon_backend: str = "auto", ffn_dim: int = 0) -> None:
        super().__init__()
        ffn_dim = ffn_dim or args.ffn_dim
        is_gated = args.ffn == "gated" or args.moe_gated
        self.w1 = nn.Linear(args.dim, ffn_dim, bias=args.bias)
        self.w2 = nn.Linear(ffn_dim, args.dim, bias=args.bias)
        self.w3 = nn.Linear(args.dim, ffn_dim, bias=args.bias) if is_gated else None
        self.activation = args.ffn_activation
        self.readers = 2 if is_gated else 1
        self.canon_d = make_canon("D", args, canon_backend)

    def forward(self, x_BTD: Stream, context: Context = NO_CONTEXT) -> Tensor:
        """Return what is added to the residual stream, [B, T, D]."""
        if self.w3 is None:
            # Standard: w1 reads x alone.
            (x_BTD,) = per_reader(x_BTD, self.readers)
            inner_BTF = self.w1(x_BTD)
            if self.canon_d is not None:
                (inner_BTF,) = self.canon_d((inner_BTF,), context, x_BTD)
            return self.w2(ffn_activation(inner_BTF, self.activation))

        # Gated: w1 and w3 read x, each its own copy if the norm's kernel made two.
        x_gate_BTD, x_up_BTD = per_reader(x_BTD, self.readers)
        gate_BTF = self.w1(x_gate_BTD)
        up_BTF = self.w3(x_up_BTD)
        if self.canon_d is None:
            inner_BTF = ffn_activation(gate_BTF, self.activation) * up_BTF
        else:  # a CanonGate, which also applies the gate
            (inner_BTF,) = self.canon_d((gate_BTF, up_BTF), context, x_gate_BTD)
        return self.w2(inner_BTF)


class Smear(nn.Module):
    """e_t + scale sigmoid(w . e_t[:12]) e_{t-1} of embeddings e, as modded-nanogpt's smear gate.

    Nothing is added to the first token of a segment. w and scale start at 0.
    """

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.gate = nn.Linear(args.smear_dim, 1, bias=False)
        self.scale = nn.Parameter(torch.empty(1))

    def forward(self, e_BTD: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        """Return the smeared embeddings, [B, T, D]; `context` is of the first layer."""
        # The embeddings of the tokens before, the first of which is in the cache or 0.
        before_B1D = context.recall("smear")
        if before_B1D is None:
            before_B1D = torch.zeros_like(e_BTD[:, :1])
        before_BTD = torch.cat((before_B1D, e_BTD), dim=1)[:, :-1]
        context.keep("smear", e_BTD[:, -1:])

        # A segment's first token has nothing before it.
        starts_BT = context.starts(e_BTD.shape[1])
        if starts_BT is not None:
            before_BTD = before_BTD.masked_fill(starts_BT[..., None], 0.0)

        gate_BT1 = self.gate(e_BTD[..., : self.gate.in_features]).sigmoid()
        return e_BTD + self.scale * gate_BT1 * before_BTD


def input_of_blocks(
    e_BTD: Tensor, norm: nn.Module | None, smear: nn.Module | None, context: Context
) -> Tensor:
    """Return what the first block reads, [B, T, D], of embeddings; `context` is that block's."""
    if norm is not None:
        e_BTD = norm(e_BTD)
    if smear is not None:  # its memory of the last embedding is with the first block's
        e_BTD = smear(e_BTD, context)
    return e_BTD


class TransformerBlock(nn.Module):
    """h += Mixer(Canon-A(norm(h))), then h += FeedForward(Canon-C(norm(h))) if there is one.

    What is added may be mixed before, by Canon-O and Canon-F.

    With norm_place = "output" it is h += norm(Mixer(Canon-A(h))), then h += norm(FeedForward(
    Canon-C(h))), the reordered norm of OLMo 2 (arXiv 2501.00656; `Olmo2DecoderLayer` of
    transformers). Canon-A and C then mix the residual stream itself, Canon-O and F the outputs
    before their norm, which comes last: it bounds what is added, OLMo 2's reason for it.

    `args`: of this layer (`ModelArgs.layer_args`).
    """

    def __init__(
        self,
        args: ModelArgs,
        rope: Rope | None,
        attend: Attend | None,
        canon_backend: str = "auto",
        mixer_backend: str = "auto",
    ) -> None:
        super().__init__()
        self.norms_output = args.norm_place == "output"
        self.attention_norm = make_norm(args)
        self.canon_a = make_canon("A", args, canon_backend)
        # of any mixer; its name is part of checkpoints
        self.attention = make_mixer(args, rope, attend, canon_backend, mixer_backend)

        self.canon_o = make_canon("O", args, canon_backend)

        # The feed-forward and its Canon layers, if the block has one.
        has_ffn = args.ffn != "none"
        self.ffn_norm = make_norm(args) if has_ffn else None
        self.canon_c = make_canon("C", args, canon_backend)
        self.feed_forward = make_feed_forward(args, canon_backend) if has_ffn else None
        self.canon_f = make_canon("F", args, canon_backend)

    def forward(self, h_BTD: Tensor, context: Context = NO_CONTEXT) -> Tensor | Routed:
        """Return the residual stream after this block, [B, T, D]; with experts in training, Routed.

        `context`: what the tokens may depend on, and the cache to which they are added.
        """
        # h += Canon-O(Mixer(Canon-A(norm(h))))
        h_BTD, x_BTD = self._mixer_input(h_BTD, context)
        y_BTD = self._mixer_output(self.attention(x_BTD, context), context)
        if self.feed_forward is None:
            return h_BTD + y_BTD

        # h += Canon-F(FeedForward(Canon-C(norm(h)))); the norm's kernel adds up h before
        h_BTD, x_BTD = self._ffn_input(h_BTD, y_BTD, context)
        y_BTD = self.feed_forward(x_BTD, context)
        if isinstance(y_BTD, Routed):
            y_BTD, load_E, balance_B = y_BTD
            h_BTD = h_BTD + self._ffn_output(y_BTD, context)
            return Routed(h_BTD, load_E, balance_B)
        return h_BTD + self._ffn_output(y_BTD, context)

    def _mixer_input(self, h_BTD: Tensor, context: Context) -> tuple[Tensor, Stream]:
        """Return h and Canon-A(norm(h)), or Canon-A(h) if outputs are normalized."""
        return add_norm_canon(
            h_BTD,
            None,
            None if self.norms_output else self.attention_norm,
            self.canon_a,
            context,
            readers=self.attention.readers,
        )

    def _mixer_output(self, y_BTD: Tensor, context: Context) -> Tensor:
        """Return Canon-O(y), or norm(Canon-O(y)) if outputs are normalized."""
        y_BTD = canon_or_same(self.canon_o, y_BTD, context)
        return self.attention_norm(y_BTD) if self.norms_output else y_BTD

    def _ffn_input(self, h_BTD: Tensor, y_BTD: Tensor, context: Context) -> tuple[Tensor, Stream]:
        """Return h = h + y and Canon-C(norm(h)), or Canon-C(h) if outputs are normalized."""
        assert self.ffn_norm is not None and self.feed_forward is not None
        return add_norm_canon(
            h_BTD,
            y_BTD,
            None if self.norms_output else self.ffn_norm,
            self.canon_c,
            context,
            readers=self.feed_forward.readers,
        )

    def _ffn_output(self, y_BTD: Tensor, context: Context) -> Tensor:
        """Return Canon-F(y), or norm(Canon-F(y)) if outputs are normalized."""
        assert self.ffn_norm is not None
        y_BTD = canon_or_same(self.canon_f, y_BTD, context)
        return self.ffn_norm(y_BTD) if self.norms_output else y_BTD


def make_feed_forward(args: ModelArgs, canon_backend: str = "auto") -> FeedForward | MoE:
    """Return the feed-forward of `args`; shared experts are one that is as wide as all of them."""
    if args.ffn != "moe":
        return FeedForward(args, canon_backend)
    shared_dim = args.num_shared_experts * args.ffn_dim
    return MoE(args, FeedForward(args, canon_backend, shared_dim) if shared_dim else None)


def make_mixer(
    args: ModelArgs,
    rope: Rope | None,
    attend: Attend | None,
    canon_backend: str = "auto",
    mixer_backend: str = "auto",
) -> Attention | Mixer:
    """Return the mixer of a layer: mixer(x_BTD, context) is added to the residual stream.

    `readers` linear layers read its x. LayerCache holds its keys and values or its state. Raises
    UserError for a mixer without a Canon layer that `args` have.
    """
    if args.mixer == "attention":
        assert attend is not None
        return Attention(args, rope, attend, canon_backend)
    backends = () if args.is_own_mixer else (canon_backend, mixer_backend)
    mixer = mixer_class(args.mixer)(args, *backends)

    # A mixer must make the Canon layers inside it itself: check that it has.
    sites = {module.site for module in mixer.modules() if isinstance(module, Canon)}
    for site in MIXER_SITES:
        if site in args.canon_set and site not in sites:
            raise UserError(
                "mixer.no_canon_b",
                f'canon_set = "{args.canon_set}", but {args.mixer} has no Canon-{site}: choose '
                f'other sites, or let it mix its projections by make_canon("{site}", args, '
                "widths=...)",
                given=args.canon_set,
            )
    return mixer


def make_attend(args: ModelArgs, backend: str) -> Attend | None:
    """Return the attention of a layer, or the masks that its mixer reads; None if it has neither.

    Raises UserError for a backend that can't compute it.
    """
    if args.mixer == "attention":
        return Attend(args, backend)
    if mixer_class(args.mixer).reads_mask:
        # whose masks are tensors, or None for causal attention; distances are of our biases only
        return Attend(without_positions(args) if args.bias_extent else args, "sdpa")
    return None


def make_norm(args: ModelArgs) -> nn.RMSNorm | nn.LayerNorm:
    """Return a norm over D, as in the blocks and before the head."""
    if args.norm == "layernorm":
        return nn.LayerNorm(args.dim, eps=args.norm_eps, bias=args.bias)
    return nn.RMSNorm(args.dim, eps=args.norm_eps)


class Head(nn.Linear):
    """A linear layer that also computes the loss: inside its forward FSDP2 gathers the weight."""

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size, bias=False)

    def forward(
        self, h_BTD: Tensor, labels_BT: Tensor | None = None, loss: HeadLoss | None = None
    ) -> Any:
        """Return `head_output` with this head's weight."""
        return head_output(h_BTD, self.weight, labels_BT, loss)


def head_output(
    h_BTD: Tensor, weight_VD: Tensor, labels_BT: Tensor | None, loss: HeadLoss | None
) -> Tensor | tuple[Tensor, Tensor]:
    """Return logits_BTV, or with labels (nats_BT, the sum that is minimized) by `loss`."""
    if labels_BT is None:
        return F.linear(h_BTD, weight_VD)
    if loss is None:
        raise ValueError("labels_BT needs a loss")
    nats_N, objective = loss(h_BTD.flatten(0, 1), weight_VD, labels_BT.flatten())
    return nats_N.view(labels_BT.shape), objective


class Transformer(nn.Module):
    """The model of `args`, not usable before `init_weights` or a loaded checkpoint."""

    def __init__(
        self,
        args: ModelArgs,
        *,
        attention_backend: str = "auto",
        canon_backend: str = "auto",
        mixer_backend: str = "auto",
    ) -> None:
        super().__init__()
        check_canon_backend(canon_backend)
        # Only recurrences have a use for mixer_backend: in a model of others it is a mistake, next
        # to recurrences it is not.
        kinds = list(args.kinds.values())
        recurrent_kinds = [kind for kind in kinds if kind.recurrent is not None]
        for kind in recurrent_kinds or kinds:
            check_mixer_backend(kind.mixer, kind.key_dim, mixer_backend)
        self.args = args
        self.canon_backend = canon_backend

        # else the embedding draws one, which on the meta device imports torch._dynamo first
        weight_VD = torch.empty(args.vocab_size, args.dim)
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim, _weight=weight_VD)

        self.embed_norm = make_norm(args) if args.embed_norm else None
        self.smear = Smear(args) if args.smear else None

        # Layers of one kind share their attention and its masks; layers with equal rotations, the
        # tables. An own mixer makes its tables itself.
        self.attends: dict[str, Attend] = {}
        ropes: dict[str, Rope] = {}
        tables: dict[tuple[str, int, float], Rope] = {}
        for name, kind in args.kinds.items():
            attend = make_attend(kind, attention_backend)
            if attend is not None:
                self.attends[name] = attend
            if kind.mixer == "attention" and kind.rope_dim:
                # all that a table depends on besides max_seq_len, which the layers share
                rotation = (kind.position, kind.rope_dim, kind.rope_theta)
                ropes[name] = tables.setdefault(rotation, Rope(kind))

        # a ModuleDict: torchtitan's compile and FSDP helpers go through layers.named_children()
        self.layers = nn.ModuleDict()
        for i, name in enumerate(args.layer_names):
            self.layers[str(i)] = TransformerBlock(
                args.kinds[name],
                ropes.get(name),
                self.attends.get(name),
                canon_backend,
                mixer_backend,
            )

        self.norm = make_norm(args)
        self.output: nn.Linear | None = None
        if not args.tie_embeddings:
            self.output = Head(args.dim, args.vocab_size)

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        is_real_BT: Tensor | None = None,
        cache: TokenCache | None = None,
        logits_to_keep: int = 0,
        logits_at_M: Tensor | None = None,
        labels_BT: Tensor | None = None,
        loss: HeadLoss | None = None,
        expert_load_LE: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits_BTV for int64 token ids; with `labels_BT` and `loss`, (nats_BT, objective).

        `is_real_BT` (bool): false for padding, at either end of a row only.
        `cache`: the tokens before these; updated.
        `logits_to_keep`: return that many last tokens, 0 for all. `logits_at_M` (int64): return
        logits_MV of the tokens with these flat indices into B * T.
        `expert_load_LE` (int64 [L, E + 1]): the experts' tokens, and those dropped, are added here.
        Raises UserError past max_seq_len tokens.
        """
        contexts = layer_contexts(self.args, self.attends, tokens_BT, is_real_BT, cache)
        h_BTD = self.tok_embeddings(tokens_BT)
        h_BTD = input_of_blocks(h_BTD, self.embed_norm, self.smear, contexts[0])

        # In training, experts also return their load and balance.
        loads, balances = [], []
        for block, context in zip(self.layers.values(), contexts, strict=True):
            h_BTD = block(h_BTD, context)
            if isinstance(h_BTD, tuple):
                h_BTD, load_E, balance_B = h_BTD
                loads.append(load_E)
                balances.append(balance_B)

        if loads and expert_load_LE is not None:
            expert_load_LE += torch.stack(loads)
        if cache is not None:
            cache.end(tokens_BT.shape[1])

        # The norm and the head, of the selected tokens only.
        if logits_at_M is not None:
            h_BTD = h_BTD.flatten(0, 1)[logits_at_M]
        else:
            h_BTD = h_BTD[:, -logits_to_keep:]  # all, if 0
        h_BTD = self.norm(h_BTD)  # its input is freed before the loss needs memory
        output = self._head(h_BTD, labels_BT, loss)
        if labels_BT is None or not balances or self.args.moe_balance != "loss":
            return output

        # The balance loss: a mean over the rows, weighted by their labels, once the objective is
        # divided by the number of all labels.
        nats_BT, objective = output
        num_labels_B = (labels_BT >= 0).sum(dim=1)
        balance = (torch.stack(balances).sum(dim=0) * num_labels_B).sum()
        return nats_BT, objective + self.args.moe_balance_rate * balance

    def _head(
        self, h_BTD: Tensor, labels_BT: Tensor | None, loss: HeadLoss | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return `head_output` of the output matrix, which may be the embedding."""
        if self.output is None:
            return head_output(h_BTD, self.tok_embeddings.weight, labels_BT, loss)
        if labels_BT is None:  # one argument: eval replaces the head by a plain linear layer
            return self.output(h_BTD)
        return self.output(h_BTD, labels_BT, loss)

    def expert_biases(self) -> list[Tensor]:
        """Return each layer's bias of the experts' scores, [E]; none without moe_balance = bias."""
        return [buffer for name, buffer in self.named_buffers() if name.endswith(".expert_bias")]

    @torch.no_grad()
    def balance_experts(self, load_LE: Tensor, scale: Tensor | float = 1.0) -> None:
        """Move the biases by moe_balance_rate * scale towards an even load; their mean stays 0.

        `load_LE` counts the global batch (Wang et al. 2024, as in torchtitan).
        """
        biases = self.expert_biases()
        if not biases:
            return

        # The sign of what an expert lacks. Without its mean, the sum of the biases does not move.
        sign_LE = (load_LE.mean(dim=1, keepdim=True) - load_LE).sign()
        sign_LE -= sign_LE.mean(dim=1, keepdim=True)
        change_LE = self.args.moe_balance_rate * scale * sign_LE
        torch._foreach_add_(biases, list(change_LE.unbind()))

    @torch.no_grad()
    def init_weights(
        self, write: Writer | None = None, buffer_device: torch.device | None = None
    ) -> None:
        """Initialize every parameter by `write`, by default whole, and the buffers."""
        for name, parameter in self.named_parameters():
            value = initial_value(self.args, name, parameter.shape)
            if write is not None:
                write(parameter, value)
            elif parameter.is_meta:
                raise ValueError(f"{value.name} is on the meta device: call to_empty() first")
            else:
                parameter.copy_(value.rows(0, value.shape[0]))

        # Buffers: the experts' biases, and the rotary tables.
        for bias in self.expert_biases():
            bias.zero_()
        self.reset_ropes(buffer_device or self.tok_embeddings.weight.device)

    def reset_ropes(self, device: torch.device) -> None:
        """Compute the rotary tables, which are no weights, on `device`."""
        for module in self.modules():
            if isinstance(module, Rope):
                module.reset(device)
