"""Attention with a sigmoid gate after it (Qiu et al., arXiv 2505.06708; Qwen3-Next's attention).

For each head, with the output Y of softmax(q k^T / sqrt(K)) v and the input X (at the
place that the paper calls G1):

    Y' = Y * sigmoid(X W_g)

elementwise, with another gate for each head, and then the output projection. q, k and v are the
product's: grouped heads, QK-norm, Canon-B, positions and `window` are options as with
mixer = "attention". A mixer of one's own has no positions unless `position` is set, such as "rope".

The product has it too: mixer = "attention" with attention_gate = "per_channel".

Left out: the paper's other places and forms (headwise, shared, additive, SiLU).

Shapes: B batch, T tokens, S tokens so far, D hidden, H heads, G key-value heads, K head dim.
"""

from dataclasses import replace

from torch import Tensor, nn

from canon_pretrain.model.attend import Attend
from canon_pretrain.model.attention import Attention, Rope
from canon_pretrain.model.cache import NO_CONTEXT, Context
from canon_pretrain.model.mixers import Mixer, ModelArgs


class GatedAttention(Mixer):
    """y = W_o (attention(x) * sigmoid(W_g x))."""

    reads_mask = True

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()

        # The product's attention, with its projections; "sdpa" fits the masks of reads_mask.
        args = replace(args, mixer="attention")  # which checks its options
        rope = Rope(args) if args.rope_dim else None
        self.attend = Attention(args, rope, Attend(args, "sdpa"))
        self.wg = nn.Linear(args.dim, args.num_heads * args.head_dim, bias=args.bias)

    def forward(self, x_BTD: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        # Queries, keys and values of these tokens: projected, normalized, mixed and rotated.
        heads = self.attend
        q_BTHK, k_BTGK, v_BTGK = heads.heads(
            heads.wq(x_BTD), heads.wk(x_BTD), heads.wv(x_BTD), context, source_BTD=x_BTD
        )

        # Attention to the keys and values of all tokens so far.
        k_BSGK = context.append("keys", k_BTGK)
        v_BSGK = context.append("values", v_BTGK)
        y_BTHK = heads.attend(q_BTHK, k_BSGK, v_BSGK, context.mask)

        # G1: the gate of each head and channel, [B, T, H K], comes before the output projection.
        return heads.wo(y_BTHK.flatten(-2) * self.wg(x_BTD).sigmoid())
