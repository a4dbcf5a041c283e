"""The recurrences of GLA, Mamba2 and GatedDeltaNet by the Triton kernels of fla-core.

Custom operators wrap the package's public functions, which torch.compile does not trace. Like the
chunked forms they save their inputs only: backward runs the package's forward again. Mamba2 is its
`simple_gla`, linear attention with a decay per head, of q = C, k = dt B, v = x and log decay dt A.

Shapes: B batch, T tokens, H heads, K key width, V value width, S segments of all rows; Mamba2:
N = K state, P = V head dim.
"""

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.kernels import packages
from canon_pretrain.kernels.packages import PACKAGES, package_problem
from canon_pretrain.kernels.recurrences import CHUNKED, Recurrence

FLA = PACKAGES["fla"]
MIXERS = {
    "gla": FLA._replace(functions="fla.ops.gla", needed=("chunk_gla",)),
    "mamba2": FLA._replace(functions="fla.ops.simple_gla", needed=("chunk_simple_gla",)),
    "gated_deltanet": FLA._replace(
        functions="fla.ops.gated_delta_rule", needed=("chunk_gated_delta_rule",)
    ),
}
MAX_DELTA_KEYS = 256
"""The widest key of the package's delta rule."""
MAX_ERROR = 2**-4
"""Of the startup check, over the largest value: products are in bfloat16 or TF32."""


def fla_problem(mixer: str, key_dim: int) -> str | None:
    """Return why the package can't compute `mixer` here, or None; runs no kernel."""
    if mixer not in MIXERS:
        return f'model.mixer = "{mixer}" has no recurrence'
    if mixer == "gated_deltanet" and key_dim > MAX_DELTA_KEYS:
        return f"fla's delta rule takes keys of at most {MAX_DELTA_KEYS} channels, not {key_dim}"
    return package_problem("fla", MIXERS[mixer])


def gla(
    *heads: Tensor, scale: float, state: Tensor | None = None, starts_BT: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `chunked_gla`."""
    return _recur("gla", scale, heads, state, starts_BT)


def ssd(
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    A_H: Tensor,
    B_BTN: Tensor,
    C_BTN: Tensor,
    D_H: Tensor,
    *,
    state: Tensor | None,
    starts_BT: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute `chunked_ssd`."""
    k_BTHN = dt_BTH[..., None] * B_BTN[:, :, None]
    q_BTHN = C_BTN[:, :, None].expand_as(k_BTHN)
    heads = (q_BTHN, k_BTHN, x_BTHP, dt_BTH * A_H)
    y_BTHP, final_BHNP = _recur("mamba2", 1.0, heads, state, starts_BT)
    d_x_BTHP = D_H[:, None] * x_BTHP
    return y_BTHP + d_x_BTHP.to(y_BTHP.dtype), final_BHNP


def delta(*heads: Tensor, state: Tensor | None, starts_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute `chunked_delta`."""
    key_width = heads[1].shape[3]
    return _recur("gated_deltanet", key_width**-0.5, heads, state, starts_BT)


def _package_or_chunked(mixer: str, *heads: Tensor, **past: Any) -> tuple[Tensor, Tensor]:
    """Compute the chunked form for values that the package does not support, and single tokens."""
    v_BTHV = heads[0] if mixer == "mamba2" else heads[2]
    is_supported = v_BTHV.device.type in packages.DEVICE_TYPES and v_BTHV.dtype in packages.DTYPES
    if is_supported and v_BTHV.shape[1] > 1:
        return _PACKAGE[mixer](*heads, **past)
    return CHUNKED[mixer](*heads, **past)


_PACKAGE: dict[str, Recurrence] = {"gla": gla, "mamba2": ssd, "gated_deltanet": delta}
FORMS: dict[str, Recurrence] = {mixer: partial(_package_or_chunked, mixer) for mixer in _PACKAGE}


def _recur(
    mixer: str,
    scale: float,
    heads: tuple[Tensor, ...],
    state: Tensor | None,
    starts_BT: Tensor | None,
) -> tuple[Tensor, Tensor]:
    q, k, v, log_decay, *beta = heads
    # one dtype for the products; decays and states are float32
    cast_heads = [
        q.to(v.dtype),
        k.to(v.dtype),
        v,
        log_decay.float(),
        *beta,
    ]
    return fla_forward(cast_heads, state, starts_BT, mixer, scale)


@torch.library.custom_op("canon_pretrain::fla_mixer", mutates_args=())
def fla_forward(
    heads: list[Tensor], state: Tensor | None, starts: Tensor | None, mixer: str, scale: float
) -> tuple[Tensor, Tensor]:
    """Return o [B, T, H, V] in the dtype of v, and the state after the last token, float32.

    `heads`: q, k, v, the log decay and, of the delta rule, beta.
    """
    o, final = _call(heads, state, starts, mixer, scale)
    return o.contiguous(), final.contiguous()


@torch.library.custom_op("canon_pretrain::fla_mixer_backward", mutates_args=())
def fla_backward(
    do: Tensor,
    dfinal: Tensor,
    heads: list[Tensor],
    state: Tensor | None,
    starts: Tensor | None,
    mixer: str,
    scale: float,
) -> list[Tensor]:
    """Return the gradients of `heads` and, unless it is None, of `state`."""
    # The dispatcher disables autograd inside an operator: enable it to run the forward again.
    keys = torch._C.DispatchKey
    with torch._C._PreserveDispatchKeyGuard(), torch.enable_grad():
        for key in (keys.AutogradFunctionality, keys.ADInplaceOrView):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        inputs = [x.detach().requires_grad_() for x in _present(heads, state)]
        leaf_state = None if state is None else inputs[-1]
        outputs = _call(inputs[: len(heads)], leaf_state, starts, mixer, scale)
        output_grads = (do.contiguous(), dfinal.contiguous())
        grads = torch.autograd.grad(outputs, inputs, output_grads)
    return [grad.contiguous() for grad in grads]


def _present(heads: list[Tensor], state: Tensor | None) -> list[Tensor]:
    return heads if state is None else [*heads, state]


def _call(
    heads: list[Tensor],
    state: Tensor | None,
    starts_BT: Tensor | None,
    mixer: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Call the package; the segments of all rows are sequences of one row (`cu_seqlens`)."""
    package = MIXERS[mixer]
    function = getattr(importlib.import_module(package.functions), package.needed[0])
    forward = partial(function, scale=scale, output_final_state=True)
    names = ("q", "k", "v", "g", "beta")[: len(heads)]
    if starts_BT is None:
        return forward(**dict(zip(names, heads, strict=True)), initial_state=state)

    # The number of each token's sequence, and the tokens, of all rows, where sequences begin.
    begins_BT = starts_BT.clone()
    begins_BT[:, 0] = True
    is_begin = begins_BT.flatten()
    sequence_BT = is_begin.cumsum(0).view_as(begins_BT) - 1
    begins_S = is_begin.nonzero().flatten()

    # A row's state is that of its first sequence, unless the row starts with a start.
    initial_states = None
    if state is not None:
        row_states = state * ~starts_BT[:, :1, None, None]
        no_states = state.new_zeros(len(begins_S), *state.shape[1:])
        initial_states = no_states.index_copy(0, sequence_BT[:, 0], row_states)

    flat_heads = [x.flatten(0, 1)[None] for x in heads]
    o, final_states = forward(
        **dict(zip(names, flat_heads, strict=True)),
        initial_state=initial_states,
        cu_seqlens=F.pad(begins_S, (0, 1), value=begins_BT.numel()),
    )
    v_BTHV = heads[2]
    last_sequences = sequence_BT[:, -1]
    return o.view_as(v_BTHV), final_states[last_sequences]


@fla_forward.register_fake
def _(heads: list[Tensor], *_: Any) -> tuple[Tensor, Tensor]:
    k, v = heads[1:3]
    num_rows, _num_tokens, num_heads, value_width = v.shape
    state_shape = (num_rows, num_heads, k.shape[3], value_width)
    return v.new_empty(v.shape), v.new_empty(state_shape, dtype=torch.float32)


@fla_backward.register_fake
def _(
    do: Tensor, dfinal: Tensor, heads: list[Tensor], state: Tensor | None, *_: Any
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in _present(heads, state)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    heads, state, starts, mixer, scale = inputs
    ctx.save_for_backward(state, starts, *heads)
    ctx.mixer = mixer
    ctx.scale = scale


def _backward(ctx: Any, do: Tensor, dfinal: Tensor) -> tuple[Any, ...]:
    state, starts, *heads = ctx.saved_tensors
    grads = fla_backward(do, dfinal, heads, state, starts, ctx.mixer, ctx.scale)
    dstate = None if state is None else grads[-1]
    return grads[: len(heads)], dstate, None, None, None


fla_forward.register_autograd(_backward, setup_context=_save)


def check_mixer(
    mixer: str, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return why the package must not compute `mixer` here, or None.

    Compares values, states and gradients of two heads with the chunked form in float32.
    """
    if problem := fla_problem(mixer, key_dim):
        return problem

    # Both forms for the same inputs.
    heads, state, starts_BT = _probe_inputs(mixer, key_dim, value_dim, dtype, device)
    exact_heads = [x.float() for x in heads]
    try:
        results = _values_and_gradients(FORMS[mixer], mixer, heads, state, starts_BT)
        exact_results = _values_and_gradients(CHUNKED[mixer], mixer, exact_heads, state, starts_BT)
    except Exception as error:  # of Triton, its compiler, the driver
        first_line = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {first_line}"

    for number, (result, exact) in enumerate(zip(results, exact_results, strict=True)):
        largest_error = (result.float() - exact).abs().max()
        distance = (largest_error / exact.abs().max()).item()
        if not distance <= MAX_ERROR:  # NaN too
            return f"result {number} is {distance:.2g} away from the chunked form's"
    return None


def _probe_inputs(
    mixer: str, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Draw the heads, the state and the starts of two rows of 150 tokens with two heads."""
    num_rows = 2
    num_tokens = 150
    num_heads = 2
    shape = (num_rows, num_tokens, num_heads)
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device="cpu").to(device)

    q = F.normalize(normal(*shape, key_dim), dim=-1).to(dtype)
    k = F.normalize(normal(*shape, key_dim), dim=-1).to(dtype)
    v = normal(*shape, value_dim).to(dtype)
    state = normal(num_rows, num_heads, key_dim, value_dim)
    log_decay = F.logsigmoid(normal(*shape, key_dim))
    tokens_T = torch.arange(num_tokens, device=device)
    starts_BT = tokens_T.expand(num_rows, -1) == 70

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
