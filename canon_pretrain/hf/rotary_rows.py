"""The order of rows by which Llama's code and ours rotate: the layouts HUGGINGFACE and LINGUA.

A file of its own, since a server needs nothing else of reading a folder.
"""

import functools

import torch
from torch import Tensor

from canon_pretrain.model.args import ModelArgs


def interleave_orders(args: ModelArgs) -> dict[str, Tensor]:
    """Return by parameter name the order of rows that turns HUGGINGFACE's layout into LINGUA's.

    Llama's code rotates dim i of a head with dim i + R/2, ours dim 2i with 2i + 1.
    """
    orders = {}
    for i, layer in enumerate(args.layer_args):
        if layer.mixer == "attention" and layer.rope_dim:
            for name, order in _orders_of_layer(layer).items():
                orders[f"layers.{i}.attention.{name}.weight"] = order
    return orders


@functools.cache
def _orders_of_layer(args: ModelArgs) -> dict[str, Tensor]:
    """Return `interleave_orders` of a layer with these arguments, by the names of modules."""
    # Of one head: 0, R/2, 1, R/2 + 1, ...; dims from R on have no position and stay.
    half = args.rope_dim // 2
    rotated = torch.arange(args.rope_dim).view(2, half).T.flatten()
    head_order = torch.cat((rotated, torch.arange(args.rope_dim, args.head_dim)))

    # Of all heads, each of which has head_dim rows. A norm per head has the gains of one head.
    q_dim, k_dim, v_dim = args.qkv_dims
    q_order = (torch.arange(0, q_dim, args.head_dim)[:, None] + head_order).flatten()
    k_order = (torch.arange(0, k_dim, args.head_dim)[:, None] + head_order).flatten()
    orders = {"wq": q_order, "wk": k_order}
    if args.qk_norm == "full":
        orders |= {"q_norm": q_order, "k_norm": k_order}
    if args.qk_norm == "per_head":
        orders |= {"q_norm": head_order, "k_norm": head_order}

    # Canon-B has the channels of Q, K and V, in this order.
    if "B" in args.canon_set:
        v_order = q_dim + k_dim + torch.arange(v_dim)
        orders["canon_b"] = torch.cat((q_order, q_dim + k_order, v_order))
    return orders
