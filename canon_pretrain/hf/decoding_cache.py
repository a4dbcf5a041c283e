"""What an exported model remembers between calls, as transformers' `generate` wants it.

A thin coat over `Cache`, which holds Canon's last inputs beside keys and values. It can be handed
back by a caller (a prompt in parts) and reordered (beam search). It can't forget tokens again, so
assisted generation is refused. A copy travels with every export.
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache as HFCache

from canon_pretrain.model.cache import Cache


class DecodingCache(HFCache):
    """`memory` is what the model reads and writes; everything else is transformers' names."""

    is_compileable = False
    is_croppable = False
    is_initialized = True

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[])
        self.num_layers = num_layers
        self.memory = Cache(num_layers)
        self.rows = 0
        """Rows of the batch; 0 before the first tokens."""

    def __len__(self) -> int:
        return self.num_layers

    def __repr__(self) -> str:
        return f"DecodingCache({self.rows} rows, {self.memory.length} tokens)"

    def get_seq_length(self, *args: object, **kwargs: object) -> int:
        return self.memory.length

    def get_max_cache_shape(self, *args: object, **kwargs: object) -> int:
        return -1

    def get_max_length(self, *args: object, **kwargs: object) -> int:
        return -1

    def reset(self) -> None:
        self.memory, self.rows = Cache(self.num_layers), 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows of these indices, in this order."""
        self.memory.take(indices)
        self.rows = len(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, side by side."""
        self.batch_select_indices(torch.arange(self.rows).repeat_interleave(repeats))

    def crop(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(
            "this model's cache can't be cropped: what Canon remembers of its last inputs can't be "
            "computed from those before. Assisted and contrastive decoding need that; use greedy "
            "decoding, sampling or beam search"
        )

    def activate_past_recording(self) -> None:
        self.crop()

    def update(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("only the model that made this cache writes into it")
