"""The chunked recurrences by the name of their mixer: for backends.py and its adapters."""

from collections.abc import Callable, Sequence

from torch import Tensor

from canon_pretrain.kernels.delta import chunked_delta
from canon_pretrain.kernels.gla import chunked_gla
from canon_pretrain.kernels.ssd import chunked_ssd

Recurrence = Callable[..., tuple[Tensor, Tensor]]
MAX_DELTA_KEYS = 256
"""The widest key of the delta rule: a program has all keys of a state."""

CHUNKED: dict[str, Recurrence] = {
    "gla": chunked_gla,
    "mamba2": chunked_ssd,
    "gated_deltanet": chunked_delta,
}


def values_of(mixer: str, heads: Sequence[Tensor]) -> Tensor:
    """Return the values [B, T, H, V] among the inputs of a form: v, and Mamba2's x."""
    return heads[0] if mixer == "mamba2" else heads[2]


def recurrence_problem(mixer: str, key_dim: int) -> str | None:
    """Return why no kernels, ours or fla's, compute `mixer` with keys of this width, or None."""
    if mixer not in CHUNKED:
        return f'model.mixer = "{mixer}" has no recurrence'
    if mixer == "gated_deltanet" and key_dim > MAX_DELTA_KEYS:
        return f"the delta rule takes keys of at most {MAX_DELTA_KEYS} channels, not {key_dim}"
    return None
