"""Which tokens belong together: one rule for documents and for padding, for attention and Canon.

Every token has the number of its segment; a token is mixed only with earlier ones of its own
segment. Segments are the documents of a row where the model masks documents (else a row is one
segment), and padding is a segment of its own.

Shapes: B rows, T tokens.
"""

import torch
from torch import Tensor

PADDING = -1
NOWHERE = -2  # of a place before the first token: equal to no token's segment


def document_numbers(tokens_BT: Tensor, eos_id: int, first_B: Tensor | None = None) -> Tensor:
    """The number of each token's document in its row, int32 [B, T], counted from `first_B` (or 0).

    EOS belongs to the document that it ends.
    """
    ends_BT = (tokens_BT == eos_id).to(torch.int32)
    numbers_BT = ends_BT.cumsum(dim=1, dtype=torch.int32) - ends_BT
    return numbers_BT if first_B is None else numbers_BT + first_B[:, None]


def documents_after(tokens_BT: Tensor, eos_id: int, first_B: Tensor) -> Tensor:
    """The number of the document that the token after these would belong to, int32 [B]."""
    return first_B + (tokens_BT == eos_id).sum(dim=1, dtype=torch.int32)
