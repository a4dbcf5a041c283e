"""The startup check of kernels for recurrences: they must equal the chunked form in float64.

Shapes: B batch, T tokens, H heads, K key width, V value width; Mamba2: N = K state, P = V head dim.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.kernels.backends import mixer_problem, recurrence
from canon_pretrain.kernels.recurrences import CHUNKED, Recurrence

NUM_ROWS = 2
NUM_TOKENS = 150
"""Two whole chunks and a part of one, or of 128 tokens one and a part."""
NUM_HEADS = 2
MAX_ERROR = 2**-4
"""Over the largest value of a result: products are in bfloat16 or TF32."""


def check_mixer(
    backend: str,
    mixer: str,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """Return why `backend` must not compute `mixer` here, or None.

    Compares values, states and gradients of two heads with the chunked form in float64.
    """
    if problem := mixer_problem(mixer, key_dim, backend):
        return problem

    # Both forms for the same inputs.
    heads, state, starts_BT = _probe_inputs(mixer, key_dim, value_dim, dtype, device)
    exact_heads = [x.double() for x in heads]
    form = recurrence(mixer, backend)
    try:
        results = _values_and_gradients(form, mixer, heads, state, starts_BT)
        exact_results = _values_and_gradients(
            CHUNKED[mixer], mixer, exact_heads, state.double(), starts_BT
        )
    except Exception as error:  # of Triton, its compiler, the driver
        first_line = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {first_line}"

    for number, (result, exact) in enumerate(zip(results, exact_results, strict=True)):
        largest_error = (result.double() - exact).abs().max()
        distance = (largest_error / exact.abs().max()).item()
        if not distance <= MAX_ERROR:  # NaN too
            return f"result {number} is {distance:.2g} away from the chunked form's"
    return None


def _probe_inputs(
    mixer: str, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Draw the heads, the state before the first token, and where documents start."""
    shape = (NUM_ROWS, NUM_TOKENS, NUM_HEADS)
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device="cpu").to(device)

    q = F.normalize(normal(*shape, key_dim), dim=-1).to(dtype)
    k = F.normalize(normal(*shape, key_dim), dim=-1).to(dtype)
    v = normal(*shape, value_dim).to(dtype)
    state = normal(NUM_ROWS, NUM_HEADS, key_dim, value_dim)
    log_decay = F.logsigmoid(normal(*shape, key_dim))
    tokens_T = torch.arange(NUM_TOKENS, device=device)
    starts_BT = tokens_T.expand(NUM_ROWS, -1) == 70

    log_decay_BTH = log_decay[..., 0]
    heads: dict[str, tuple[Tensor, ...]] = {
        "gla": (q, k, v, log_decay),
        # x, dt, A, B, C, D
        "mamba2": (
            v,
            -log_decay_BTH,
            log_decay_BTH[0, 0],
            k[:, :, 0],
            q[:, :, 0],
            log_decay_BTH[0, 1],
        ),
        "gated_deltanet": (q, k, v, log_decay_BTH, log_decay_BTH.exp()),
    }
    return heads[mixer], state, starts_BT


def _values_and_gradients(
    form: Recurrence, mixer: str, heads: Sequence[Tensor], state: Tensor, starts_BT: Tensor
) -> list[Tensor]:
    """Return outputs, the last state, and the gradients of half the sum of their squares."""
    inputs = [x.detach().clone().requires_grad_() for x in (*heads, state)]
    options = {"scale": 0.5} if mixer == "gla" else {}
    outputs = form(*inputs[:-1], state=inputs[-1], starts_BT=starts_BT, **options)
    output_grads = [y.detach() for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, inputs, output_grads)]
