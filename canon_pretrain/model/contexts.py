"""What each layer may depend on in a call of the model: masks, segments, and its cache.

Shapes: B batch, T tokens, S tokens with those before them, N = T + Canon's reach.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from canon_pretrain.core.errors import UserError
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.attend import Attend, Mask
from canon_pretrain.model.cache import (
    PADDING,
    Context,
    TokenCache,
    document_numbers,
    window_segments,
)


def layer_contexts(
    args: ModelArgs,
    attends: Mapping[str, Attend],
    tokens_BT: Tensor,
    is_real_BT: Tensor | None,
    cache: TokenCache | None,
) -> list[Context]:
    """Return the context of each layer; begin to read into the cache.

    `attends`: the attention of each kind of layer that has one, by the kind's name.
    Raises UserError past max_seq_len tokens.
    """
    num_tokens = tokens_BT.shape[1]
    num_so_far = num_tokens
    if cache is not None:
        num_so_far += cache.length
    if num_so_far > args.max_seq_len:
        raise UserError(
            "model.sequence_too_long",
            f"a sequence of {num_so_far} tokens is longer than max_seq_len = {args.max_seq_len}",
        )

    # The masks are of attention only.
    segments_BS = _segments(args, tokens_BT, is_real_BT, cache)
    masks: dict[str, Mask] = {}
    for name, attend in attends.items():
        if cache is not None and cache.position is not None:
            masks[name] = attend.step_mask(cache.position, segments_BS, cache.capacity)
        else:
            masks[name] = attend.mask(num_tokens, segments_BS, num_so_far, tokens_BT.device)

    # The segments are of convolutions and states: of the tokens, and as many before them as the
    # kind of layer reaches.
    segments_BN: Tensor | None = None
    reach = args.reach
    if segments_BS is not None and reach and cache is not None:
        segments_BN = cache.window_segments(num_tokens, reach)
    elif segments_BS is not None and reach:
        segments_BN = window_segments(segments_BS, num_tokens, reach)
    if cache is not None:
        cache.begin(num_tokens, segments_BN)

    kind_segments: dict[str, Tensor | None] = {}
    for name, kind in args.kinds.items():
        kind_segments[name] = None
        if segments_BN is not None and kind.reach:
            # without those that only other kinds of layers reach
            kind_segments[name] = segments_BN[:, reach - kind.reach :]

    # Each layer has its own cache.
    contexts = []
    for i, name in enumerate(args.layer_names):
        layer_cache = None if cache is None else cache.layers[i]
        contexts.append(Context(masks.get(name), kind_segments[name], layer_cache))
    return contexts


def _segments(
    args: ModelArgs, tokens_BT: Tensor, is_real_BT: Tensor | None, cache: TokenCache | None
) -> Tensor | None:
    """Return the segments of all tokens so far, int32 [B, S]; None if there is one."""
    segments_BT = None
    # Numbers of documents, or 0 for the whole row; padding is a segment of its own.
    if args.document_mask:
        segments_BT = _documents(args.eos_id, tokens_BT, is_real_BT, cache)
    elif is_real_BT is not None:
        segments_BT = torch.zeros_like(tokens_BT, dtype=torch.int32)

    if segments_BT is not None and is_real_BT is not None:
        segments_BT = segments_BT.masked_fill(~is_real_BT, PADDING)

    if cache is None:
        return segments_BT
    return cache.append_segments(segments_BT, tokens_BT)


def _documents(
    eos_id: int, tokens_BT: Tensor, is_real_BT: Tensor | None, cache: TokenCache | None
) -> Tensor:
    """Return each token's document, int32 [B, T], counted on from the tokens in the cache."""
    if is_real_BT is not None:  # EOS used as padding ends no document: replace it
        tokens_BT = tokens_BT.masked_fill(~is_real_BT, eos_id + 1)
    if cache is None:
        return document_numbers(tokens_BT, eos_id)

    # an EOS at the end ends its document: the next token is in another one
    segments_BT = document_numbers(tokens_BT, eos_id, cache.next_document)
    cache.next_document = segments_BT[:, -1] + (tokens_BT[:, -1] == eos_id).int()
    return segments_BT
