"""The recurrences of GLA, Mamba2 and GatedDeltaNet by the Triton kernels of fla-core.

Custom operators wrap the package's public functions, which torch.compile does not trace. Like the
chunked forms they save their inputs only: backward runs the package's forward again. Mamba2 is its
`simple_gla`, linear attention with a decay per head, of q = C, k = dt B, v = x and log decay dt A.

Shapes: B batch, T tokens, H heads, K key width, V value width, S segments of all rows; Mamba2:
N = K state, P = V head dim.
"""

import importlib
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
WORST_ERROR = 2**-4
"""Of the startup check, over the largest value: products are in bfloat16 or TF32."""
Given = Tensor | None


def fla_problem(mixer: str, key_dim: int) -> str | None:
    """Return why the package can't compute `mixer` here, or None; runs no kernel."""
    if mixer not in MIXERS:
        return f'model.mixer = "{mixer}" has no recurrence'
    if mixer == "gated_deltanet" and key_dim > MAX_DELTA_KEYS:
        return f"fla's delta rule takes keys of at most {MAX_DELTA_KEYS} channels, not {key_dim}"
    return package_problem("fla", MIXERS[mixer])


def fits(v_BTHV: Tensor) -> bool:
    """Return whether the package computes such values; a single token needs no chunks."""
    here = v_BTHV.device.type in packages.DEVICE_TYPES and v_BTHV.dtype in packages.DTYPES
    return here and v_BTHV.shape[1] > 1


def gla(
    *heads: Tensor, scale: float, state: Given = None, starts_BT: Given = None
) -> tuple[Tensor, Tensor]:
    """Compute `chunked_gla`."""
    if not fits(heads[2]):
        return CHUNKED["gla"](*heads, scale=scale, state=state, starts_BT=starts_BT)
    return _recur("gla", scale, heads, state, starts_BT)


def ssd(
    x_BTHP: Tensor, dt_BTH: Tensor, A_H: Tensor, *b_c_d: Tensor, state: Given, starts_BT: Given
) -> tuple[Tensor, Tensor]:
    """Compute `chunked_ssd`."""
    if not fits(x_BTHP):
        return CHUNKED["mamba2"](x_BTHP, dt_BTH, A_H, *b_c_d, state=state, starts_BT=starts_BT)
    B_BTN, C_BTN, D_H = b_c_d
    k_BTHN = dt_BTH[..., None] * B_BTN[:, :, None]
    heads = C_BTN[:, :, None].expand_as(k_BTHN), k_BTHN, x_BTHP, dt_BTH * A_H
    y_BTHP, final_BHNP = _recur("mamba2", 1.0, heads, state, starts_BT)
    return y_BTHP + (D_H[:, None] * x_BTHP).to(y_BTHP.dtype), final_BHNP


def delta(*heads: Tensor, state: Given, starts_BT: Given) -> tuple[Tensor, Tensor]:
    """Compute `chunked_delta`."""
    if not fits(heads[2]):
        return CHUNKED["gated_deltanet"](*heads, state=state, starts_BT=starts_BT)
    return _recur("gated_deltanet", heads[1].shape[3] ** -0.5, heads, state, starts_BT)


FORMS: dict[str, Recurrence] = {"gla": gla, "mamba2": ssd, "gated_deltanet": delta}


def _recur(
    mixer: str, scale: float, heads: tuple[Tensor, ...], state: Given, starts_BT: Given
) -> tuple[Tensor, Tensor]:
    q, k, v, log_decay, *beta = heads
    # one dtype for the products; decays and states are float32
    cast = [q.to(v.dtype), k.to(v.dtype), v, log_decay.float(), *beta]
    found: tuple[Tensor, Tensor] = fla_forward(cast, state, starts_BT, mixer, scale)
    return found


@torch.library.custom_op("canon_pretrain::fla_mixer", mutates_args=())
def fla_forward(
    heads: list[Tensor], state: Given, starts: Given, mixer: str, scale: float
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
    state: Given,
    starts: Given,
    mixer: str,
    scale: float,
) -> list[Tensor]:
    """Return the gradients of `heads` and, if given, of `state`."""
    key = torch._C.DispatchKey
    # the dispatcher disables autograd inside an operator
    with torch._C._PreserveDispatchKeyGuard(), torch.enable_grad():
        for each in (key.AutogradFunctionality, key.ADInplaceOrView):
            torch._C._dispatch_tls_set_dispatch_key_excluded(each, False)
        wanted = [x.detach().requires_grad_() for x in _present(heads, state)]
        first = None if state is None else wanted[-1]
        found = _call(wanted[: len(heads)], first, starts, mixer, scale)
        grads = torch.autograd.grad(found, wanted, (do.contiguous(), dfinal.contiguous()))
    return [grad.contiguous() for grad in grads]


def _present(heads: list[Tensor], state: Given) -> list[Tensor]:
    return heads if state is None else [*heads, state]


def _call(
    heads: list[Tensor], state: Given, starts_BT: Given, mixer: str, scale: float
) -> tuple[Tensor, Tensor]:
    """Call the package; the segments of all rows are sequences of one row (`cu_seqlens`)."""
    package = MIXERS[mixer]
    run = getattr(importlib.import_module(package.functions), package.needed[0])
    names = ("q", "k", "v", "g", "beta")
    options: dict[str, Any] = {"scale": scale, "initial_state": state, "output_final_state": True}
    if starts_BT is None:
        found: tuple[Tensor, Tensor] = run(**dict(zip(names, heads, strict=False)), **options)
        return found
    begins_BT = starts_BT.clone()
    begins_BT[:, 0] = True
    sequence_BT = begins_BT.flatten().cumsum(0).view_as(begins_BT) - 1
    begins_S = begins_BT.flatten().nonzero().flatten()
    options["cu_seqlens"] = F.pad(begins_S, (0, 1), value=begins_BT.numel())
    if state is not None:  # of a row's first sequence, unless the row starts with a start
        before = state * ~starts_BT[:, :1, None, None]
        states = state.new_zeros(len(begins_S), *state.shape[1:])
        options["initial_state"] = states.index_copy(0, sequence_BT[:, 0], before)
    flat = (x.flatten(0, 1)[None] for x in heads)
    o, finals = run(**dict(zip(names, flat, strict=False)), **options)
    return o.view_as(heads[2]), finals[sequence_BT[:, -1]]


@fla_forward.register_fake
def _(heads: list[Tensor], *_: Any) -> tuple[Tensor, Tensor]:
    k, v = heads[1:3]
    state_shape = v.shape[0], v.shape[2], k.shape[3], v.shape[3]
    return v.new_empty(v.shape), v.new_empty(state_shape, dtype=torch.float32)


@fla_backward.register_fake
def _(do: Tensor, dfinal: Tensor, heads: list[Tensor], state: Given, *_: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in _present(heads, state)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    heads, state, starts, mixer, scale = inputs
    ctx.save_for_backward(state, starts, *heads)
    ctx.how = mixer, scale


def _backward(ctx: Any, do: Tensor, dfinal: Tensor) -> tuple[Any, ...]:
    state, starts, *heads = ctx.saved_tensors
    grads = fla_backward(do, dfinal, heads, state, starts, *ctx.how)
    return grads[: len(heads)], None if state is None else grads[-1], None, None, None


fla_forward.register_autograd(_backward, setup_context=_save)


def check_mixer(
    mixer: str, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return why the package must not compute `mixer` here, or None.

    Compares values, states and gradients of two heads with the chunked form in float32.
    """
    if problem := fla_problem(mixer, key_dim):
        return problem
    generator, shape = torch.Generator().manual_seed(0), (2, 150, 2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(device)

    q, k = (F.normalize(normal(*shape, key_dim), dim=-1).to(dtype) for _ in range(2))
    v, state = normal(*shape, value_dim).to(dtype), normal(2, 2, key_dim, value_dim)
    log = F.logsigmoid(normal(*shape, key_dim))
    gate = log[..., 0]
    starts_BT = torch.arange(shape[1], device=device).expand(shape[:2]) == 70
    heads = {
        "gla": (q, k, v, log),
        "mamba2": (v, -gate, gate[0, 0], k[:, :, 0], q[:, :, 0], gate[0, 1]),
        "gated_deltanet": (q, k, v, gate, gate.exp()),
    }[mixer]
    options = {"scale": 0.5} if mixer == "gla" else {}
    results: list[list[Tensor]] = []
    try:
        for form, cast in ((FORMS[mixer], False), (CHUNKED[mixer], True)):
            given = [x.float() if cast else x for x in (*heads, state)]
            given = [x.detach().clone().requires_grad_() for x in given]
            found = form(*given[:-1], state=given[-1], starts_BT=starts_BT, **options)
            grads = [y.detach() for y in found]
            results.append([*found, *torch.autograd.grad(found, given, grads)])
    except Exception as why:  # of Triton, its compiler, the driver
        return f"{type(why).__name__}: {next(iter(str(why).strip().splitlines()), '')}"
    for number, (ours, true) in enumerate(zip(*results, strict=True)):
        error = ((ours.float() - true).abs().max() / true.abs().max()).item()
        if not error <= WORST_ERROR:  # NaN too
            return f"result {number} is {error:.2g} away from the chunked form's"
    return None
