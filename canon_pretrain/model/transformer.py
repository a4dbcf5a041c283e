"""The language model: embedding, blocks, norm, head, and their initialization.

Shapes: B batch, T tokens, S tokens with those before them, D hidden, F ffn dim, V vocabulary,
N = T + Canon's reach (in the head N = B T), M selected tokens.
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
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.attend import Attend, Mask
from canon_pretrain.model.attention import Attention, Rope
from canon_pretrain.model.cache import PADDING, Cache, Memory, document_numbers, window_segments
from canon_pretrain.model.canon import Canon, CanonGate, Stream, make_canon, norm_canon, per_reader
from canon_pretrain.model.init import InitialValue, initial_value
from canon_pretrain.model.mamba2 import Mamba2
from canon_pretrain.model.moe import MoE, Routed
from canon_pretrain.model.recurrent import GLA, GatedDeltaNet

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
        self.w1 = nn.Linear(args.dim, ffn_dim, bias=args.bias)
        self.w2 = nn.Linear(ffn_dim, args.dim, bias=args.bias)
        gated = args.ffn == "gated" or args.moe_gated
        self.w3 = nn.Linear(args.dim, ffn_dim, bias=args.bias) if gated else None
        self.gelu = args.ffn_activation == "gelu"
        self.relu2 = args.ffn_activation == "relu2"
        self.readers = 2 if gated else 1
        self.canon_d = make_canon(CanonGate if gated else Canon, "D", args, canon_backend)

    def forward(
        self, x_BTD: Stream, segments_BN: Tensor | None = None, cache: Memory = None
    ) -> Tensor:
        """Return the addition to the residual stream, [B, T, D]; see `TransformerBlock`."""
        x_gate, *x_up = per_reader(x_BTD, self.readers)
        inner = self.w1(x_gate)
        if self.w3 is not None:
            up_BTF = self.w3(*x_up)
            if self.canon_d is not None:
                return self.w2(self.canon_d((inner, up_BTF), segments_BN, cache, x_gate))
            return self.w2(ffn_activation(inner, self.relu2) * up_BTF)
        if self.canon_d is not None:
            inner = self.canon_d(inner, segments_BN, cache, x_gate)
        if self.gelu:
            return self.w2(F.gelu(inner, approximate="tanh"))
        return self.w2(ffn_activation(inner, self.relu2))


class TransformerBlock(nn.Module):
    """h += Mixer(Canon-A(norm(h))), then h += FeedForward(Canon-C(norm(h))) if there is one."""

    def __init__(
        self,
        args: ModelArgs,
        rope: Rope | None,
        attend: Attend | None,
        canon_backend: str = "auto",
        mixer_backend: str = "auto",
    ) -> None:
        super().__init__()
        self.attention_norm = make_norm(args)
        self.canon_a = make_canon(Canon, "A", args, canon_backend)
        # of any mixer; its name is part of checkpoints
        self.attention = make_mixer(args, rope, attend, canon_backend, mixer_backend)
        has_ffn = args.ffn != "none"
        self.ffn_norm = make_norm(args) if has_ffn else None
        self.canon_c = make_canon(Canon, "C", args, canon_backend)
        self.feed_forward = make_feed_forward(args, canon_backend) if has_ffn else None

    def forward(
        self,
        h_BTD: Tensor,
        mask: Mask = None,
        segments_BN: Tensor | None = None,
        cache: Memory = None,
    ) -> Tensor | Routed:
        """Return the residual stream after this block, [B, T, D]; `mask` is from `Attend.mask`.

        In training mode, experts return their load and balance beside it.
        """
        past = segments_BN, cache
        norm, readers = self.attention_norm, self.attention.readers
        h_BTD, x_BTD = norm_canon(norm, self.canon_a, h_BTD, None, *past, readers=readers)
        y_BTD = self.attention(x_BTD, mask, *past)
        if self.feed_forward is None or self.ffn_norm is None:
            return h_BTD + y_BTD
        norm, readers = self.ffn_norm, self.feed_forward.readers
        h_BTD, x_BTD = norm_canon(norm, self.canon_c, h_BTD, y_BTD, *past, readers=readers)
        y_BTD = self.feed_forward(x_BTD, *past)
        return (h_BTD + y_BTD[0], *y_BTD[1:]) if isinstance(y_BTD, tuple) else h_BTD + y_BTD


def make_feed_forward(args: ModelArgs, canon_backend: str = "auto") -> FeedForward | MoE:
    """Return the feed-forward of `args`; shared experts are one that is as wide as all of them."""
    if args.ffn != "moe":
        return FeedForward(args, canon_backend)
    shared_dim = args.num_shared_experts * args.ffn_dim
    return MoE(args, FeedForward(args, canon_backend, shared_dim) if shared_dim else None)


Mixer = Attention | GLA | Mamba2 | GatedDeltaNet
MIXERS: dict[str, type[Mixer]] = {
    "attention": Attention,
    "gla": GLA,
    "mamba2": Mamba2,
    "gated_deltanet": GatedDeltaNet,
}


def make_mixer(
    args: ModelArgs,
    rope: Rope | None,
    attend: Attend | None,
    canon_backend: str = "auto",
    mixer_backend: str = "auto",
) -> Mixer:
    """Return the mixer of `args`: mixer(x_BTD, mask, segments_BN, cache) is added to the stream.

    It reads x `readers` times; LayerCache holds its keys and values or its state; counts.py has its
    parameters and FLOPs, init.py its initial values.
    """
    if args.mixer == "attention":
        assert attend is not None
        return Attention(args, rope, attend, canon_backend)
    if args.mixer == "mamba2":
        return Mamba2(args, canon_backend, mixer_backend)
    kind = GLA if args.mixer == "gla" else GatedDeltaNet
    return kind(args, canon_backend, mixer_backend)


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
        check_mixer_backend(args.mixer, args.key_dim, mixer_backend)
        self.args, self.canon_backend = args, canon_backend
        # with its weight: torch draws one, which on the meta device imports torch._dynamo first
        weight_VD = torch.empty(args.vocab_size, args.dim)
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim, _weight=weight_VD)
        self.rope = Rope(args) if args.rope_dim else None
        is_attention = args.mixer == "attention"
        self.attend = Attend(args, attention_backend) if is_attention else None
        # a ModuleDict: torchtitan's compile and FSDP helpers go through layers.named_children()
        self.layers = nn.ModuleDict()
        for i in range(args.num_layers):
            self.layers[str(i)] = TransformerBlock(
                args, self.rope, self.attend, canon_backend, mixer_backend
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
        cache: Cache | None = None,
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
        num_tokens = tokens_BT.shape[1]
        start = cache.length if cache is not None else 0
        if start + num_tokens > self.args.max_seq_len:
            raise UserError(
                "model.sequence_too_long",
                f"a sequence of {start + num_tokens} tokens is longer than max_seq_len = "
                f"{self.args.max_seq_len}",
            )
        segments_BS = self._segments(tokens_BT, is_real_BT, cache)
        mask: Mask = None
        if self.attend is not None and cache is not None and cache.position is not None:
            mask = self.attend.step_mask(cache.position, segments_BS, cache.capacity)
        elif self.attend is not None:
            mask = self.attend.mask(num_tokens, segments_BS, start + num_tokens, tokens_BT.device)
        segments_BN = None
        if segments_BS is not None and (reach := self.args.reach):
            if cache is None:
                segments_BN = window_segments(segments_BS, num_tokens, reach)
            else:
                segments_BN = cache.window_segments(num_tokens, reach)
        if cache is not None:
            cache.begin(num_tokens, segments_BN)
        h_BTD = self.tok_embeddings(tokens_BT)
        loads, balances = [], []
        for i, block in enumerate(self.layers.values()):
            memory = () if cache is None else (cache.layers[i],)
            h_BTD = block(h_BTD, mask, segments_BN, *memory)
            if isinstance(h_BTD, tuple):
                h_BTD, load_E, balance_B = h_BTD
                loads.append(load_E)
                balances.append(balance_B)
        if loads and expert_load_LE is not None:
            expert_load_LE += torch.stack(loads)
        if cache is not None:
            cache.end(num_tokens)
        is_all = logits_at_M is None
        h_BTD = h_BTD[:, -logits_to_keep:] if is_all else h_BTD.flatten(0, 1)[logits_at_M]
        h_BTD = self.norm(h_BTD)
        if self.output is None:
            output = head_output(h_BTD, self.tok_embeddings.weight, labels_BT, loss)
        else:  # eval replaces the head by a plain linear layer
            output = self.output(h_BTD, *(() if labels_BT is None else (labels_BT, loss)))
        if labels_BT is None or not balances or self.args.moe_balance != "loss":
            return output
        # the mean over the rows, weighted by their labels, once the sum is divided by all labels
        num_labels_B = (labels_BT >= 0).sum(dim=1)
        balance = (torch.stack(balances).sum(dim=0) * num_labels_B).sum()
        return output[0], output[1] + self.args.moe_balance_rate * balance

    def expert_biases(self) -> list[Tensor]:
        """Return each layer's bias of the experts' scores, [E]; none without moe_balance = bias."""
        return [b for name, b in self.named_buffers() if name.endswith(".expert_bias")]

    @torch.no_grad()
    def balance_experts(self, load_LE: Tensor, scale: Tensor | float = 1.0) -> None:
        """Move the biases by moe_balance_rate * scale towards an even load; their mean stays 0.

        `load_LE` counts the global batch (Wang et al. 2024, as in torchtitan).
        """
        if biases := self.expert_biases():
            sign_LE = (load_LE.mean(dim=1, keepdim=True) - load_LE).sign()
            sign_LE -= sign_LE.mean(dim=1, keepdim=True)
            change_LE = self.args.moe_balance_rate * scale * sign_LE
            torch._foreach_add_(biases, list(change_LE.unbind()))

    def _segments(
        self, tokens_BT: Tensor, is_real_BT: Tensor | None, cache: Cache | None
    ) -> Tensor | None:
        """Return the segments of all tokens so far, int32 [B, S]; None if there is one."""
        segments_BT = None
        if self.args.document_mask:
            eos_id = self.args.eos_id
            if is_real_BT is not None:  # EOS used as padding ends no document
                tokens_BT = tokens_BT.masked_fill(~is_real_BT, eos_id + 1)
            first_B = None if cache is None else cache.next_document
            segments_BT = document_numbers(tokens_BT, eos_id, first_B)
            if cache is not None:
                cache.next_document = segments_BT[:, -1] + (tokens_BT[:, -1] == eos_id).int()
        elif is_real_BT is not None:
            segments_BT = torch.zeros_like(tokens_BT, dtype=torch.int32)
        if segments_BT is not None and is_real_BT is not None:
            segments_BT = segments_BT.masked_fill(~is_real_BT, PADDING)
        return segments_BT if cache is None else cache.append_segments(segments_BT, tokens_BT)

    @torch.no_grad()
    def init_weights(
        self, write: Writer | None = None, buffer_device: torch.device | None = None
    ) -> None:
        """Initialize every parameter by `write`, by default whole; recompute the rotary tables."""
        for name, parameter in self.named_parameters():
            value = initial_value(self.args, name, parameter.shape)
            if write is not None:
                write(parameter, value)
            elif parameter.is_meta:
                raise ValueError(f"{value.name} is on the meta device: call to_empty() first")
            else:
                parameter.copy_(value.rows(0, value.shape[0]))
        for bias in self.expert_biases():
            bias.zero_()
        if self.rope is not None:
            self.rope.reset(buffer_device or self.tok_embeddings.weight.device)
