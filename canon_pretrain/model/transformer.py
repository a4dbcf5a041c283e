"""The language model: embedding, blocks, norm, head; and how its weights get their first values.

The top of `model/`. `titan/` builds it on the meta device, shards it, materialises it with
`to_empty` and calls `init_weights`; `eval/` loads a checkpoint into it.

Shapes: B batch, T tokens, D hidden, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from canon_pretrain.errors import UserError
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.attention import Attention
from canon_pretrain.model.canon import canon_at
from canon_pretrain.model.feed_forward import FeedForward
from canon_pretrain.model.init import InitialValue, initial_value
from canon_pretrain.model.positions import Rope

Writer = Callable[[nn.Parameter, InitialValue], None]


class TransformerBlock(nn.Module):
    """h += Attention(Canon-A(RMSNorm(h))), then h += FeedForward(Canon-C(RMSNorm(h))).

    `rope` is the model's one `Rope`, or None for nope.
    """

    def __init__(self, args: ModelArgs, rope: Rope | None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.canon_a = canon_at("A", args, channels=args.dim)
        self.attention = Attention(args, rope)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.canon_c = canon_at("C", args, channels=args.dim)
        self.feed_forward = FeedForward(args)

    def forward(self, h_BTD: Tensor) -> Tensor:
        """Return the residual stream after this block, [B, T, D]."""
        x_BTD = self.attention_norm(h_BTD)
        if self.canon_a is not None:
            x_BTD = self.canon_a(x_BTD)
        h_BTD = h_BTD + self.attention(x_BTD)
        x_BTD = self.ffn_norm(h_BTD)
        if self.canon_c is not None:
            x_BTD = self.canon_c(x_BTD)
        return h_BTD + self.feed_forward(x_BTD)


class Transformer(nn.Module):
    """A Llama with any of Canon, NoPE, partial RoPE and QK-norm; embedding and head untied.

    Not usable before `init_weights` (or a loaded checkpoint).
    """

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.rope = Rope(args) if args.rope_dim else None
        # a ModuleDict: torchtitan's compile and FSDP helpers go through layers.named_children()
        self.layers = nn.ModuleDict(
            {str(i): TransformerBlock(args, self.rope) for i in range(args.num_layers)}
        )
        self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return logits_BTV for int64 token ids; UserError where T is above max_seq_len."""
        num_tokens = tokens_BT.shape[1]
        if num_tokens > self.args.max_seq_len:
            raise UserError(
                f"a sequence of {num_tokens} tokens is longer than max_seq_len = "
                f"{self.args.max_seq_len}; shorten the sequence or raise max_seq_len."
            )
        h_BTD = self.tok_embeddings(tokens_BT)
        for block in self.layers.values():
            h_BTD = block(h_BTD)
        return self.output(self.norm(h_BTD))

    @torch.no_grad()
    def init_weights(
        self, write: Writer | None = None, buffer_device: torch.device | None = None
    ) -> None:
        """Give every parameter its initial value, and compute the rotary tables anew.

        `write(parameter, initial_value)` is called once a parameter, in the model's order, and
        stores what this process holds of it; by default the whole value. The values depend on
        `args` alone. `buffer_device`: where the tables go; by default where the parameters are.
        Raises ValueError (default writer) where a parameter is still on the meta device.
        """
        write = write or _write_all_rows
        for name, parameter in self.named_parameters():
            write(parameter, initial_value(self.args, name, parameter.shape))
        if self.rope is not None:
            self.rope.reset(buffer_device or self.tok_embeddings.weight.device)


def _write_all_rows(parameter: nn.Parameter, value: InitialValue) -> None:
    """Copy the whole value into a plain tensor, cast to its dtype."""
    if parameter.is_meta:
        raise ValueError(
            f"{value.name} is on the meta device and holds nothing; "
            "call model.to_empty(device=...) before init_weights()."
        )
    parameter.copy_(value.rows(0, value.shape[0]))
