"""The recurrences by our Triton kernels, by the name of their mixer: for kernels/backends.py."""

from canon_pretrain.kernels.recurrences import Recurrence
from canon_pretrain.kernels.triton.recurrence.delta_operator import delta
from canon_pretrain.kernels.triton.recurrence.operators import gla, ssd
from canon_pretrain.kernels.triton.recurrence.step import step_delta, step_gla, step_ssd

FORMS: dict[str, Recurrence] = {"gla": gla, "mamba2": ssd, "gated_deltanet": delta}
STEPS: dict[str, Recurrence] = {
    "gla": step_gla,
    "mamba2": step_ssd,
    "gated_deltanet": step_delta,
}
"""Of a single token, with its state in place."""
MAX_DELTA_KEYS = 256
"""The widest key of the delta rule: a program has all keys of a state."""


def recurrence_problem(mixer: str, key_dim: int) -> str | None:
    """Return why the kernels can't compute `mixer` with keys of this width, or None."""
    if mixer not in FORMS:
        return f'model.mixer = "{mixer}" has no recurrence'
    if mixer == "gated_deltanet" and key_dim > MAX_DELTA_KEYS:
        return f"the delta rule takes keys of at most {MAX_DELTA_KEYS} channels, not {key_dim}"
    return None
