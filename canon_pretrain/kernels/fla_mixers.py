"""The recurrences of GLA, Mamba2 and GatedDeltaNet by the Triton kernels of fla-core.

Custom operators wrap the package's public functions, which torch.compile does not trace. Like the
chunked forms they save their inputs only: backward runs the package's forward again. Mamba2 is its
`simple_gla`, linear attention with a decay per head, of q = C, k = dt B, v = x and log decay dt A.

Shapes: B batch, T tokens, H heads, K key width, V value width, S segments of all rows; Mamba2:
N = K state, P = V head dim.
"""

import importlib
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.kernels import packages
from canon_pretrain.kernels.packages import PACKAGES, package_problem
from canon_pretrain.kernels.recurrences import Recurrence

FLA = PACKAGES["fla"]
MIXERS = {
    "gla": FLA._replace(functions="fla.ops.gla", needed=("chunk_gla",)),
    "mamba2": FLA._replace(functions="fla.ops.simple_gla", needed=("chunk_simple_gla",)),
    "gated_deltanet": FLA._replace(
        functions="fla.ops.gated_delta_rule", needed=("chunk_gated_delta_rule",)
    ),
}


def fla_problem(mixer: str) -> str | None:
    """Return why the package can't compute `mixer` here, or None; runs no kernel."""
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


FORMS: dict[str, Recurrence] = {"gla": gla, "mamba2": ssd, "gated_deltanet": delta}


def supports(v_BTHV: Tensor) -> bool:
    """Return whether the package computes tensors like v."""
    return v_BTHV.device.type in packages.DEVICE_TYPES and v_BTHV.dtype in packages.DTYPES


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
