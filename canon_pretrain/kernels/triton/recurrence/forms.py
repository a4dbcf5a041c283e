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
