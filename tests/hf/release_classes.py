"""The released linear models' own classes, of a clone of PhysicsLM4, on a CPU.

Their code imports Triton kernels (fla, causal_conv1d, mamba_ssm) and exits unless versions of 2024
are installed. `released_classes` imports it with stand-ins: norms and convolutions of a few lines,
and recurrences that are loops over tokens in float64, written from the papers' formulas. All else
runs as released: modules, names, shapes, and the order of norms, gates, Canon layers and residuals.
"""

import contextlib
import importlib
import importlib.metadata
import io
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_VERSIONS = {"flash-linear-attention": "0.3.0", "transformers": "4.47.1"}
"""What the code says it needs."""
_CLASSES = (
    ("modeling_gla_canon", "GLACanonForCausalLM", "model"),
    ("modeling_gated_deltanet_canon", "GatedDeltaNetCanonForCausalLM", "model"),
    ("modeling_mamba2_canon", "Mamba2CanonForCausalLM", "backbone"),
)
"""Modules, classes, and their base models."""


# -- stand-ins, by the names and signatures of fla 0.3.0, causal_conv1d and mamba_ssm -----------


class RMSNorm(nn.Module):
    def __init__(
        self, hidden_size: int, elementwise_affine: bool = True, eps: float = 1e-5
    ) -> None:
        super().__init__()
        assert elementwise_affine
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        if residual is not None:
            x = x + residual
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return (normed, x) if prenorm else normed

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class FusedRMSNormSwishGate(RMSNorm):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        normed = super().forward(x)
        assert isinstance(normed, Tensor)
        return normed * gate * gate.sigmoid()


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """Return the convolution of x [B, C, T] with `weight` [C, taps]."""
    assert seq_idx is None
    num_tokens = x.shape[-1]
    num_taps = weight.shape[-1]
    y = torch.zeros_like(x)
    for tap in range(num_taps):
        shift = num_taps - 1 - tap
        y[..., shift:] += weight[:, tap, None] * x[..., : num_tokens - shift]
    if bias is not None:
        y = y + bias[:, None]
    assert activation in (None, "silu", "swish")
    return y if activation is None else F.silu(y)


def gla(q: Tensor, k: Tensor, v: Tensor, gk: Tensor, **options: Any) -> tuple[Tensor, None]:
    """S_t = diag(exp(gk_t)) S_{t-1} + k_t^T v_t, o_t = K^-1/2 q_t S_t; [B, T, H, K or V]."""
    _assert_whole_sequence(options)
    dtype = q.dtype
    q, k, v, gk = (tensor.double() for tensor in (q, k, v, gk))
    state = q.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1])
    outputs = []
    for t in range(q.shape[1]):
        state = gk[:, t].exp()[..., None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * k.shape[-1] ** -0.5)
    return torch.stack(outputs, dim=1).to(dtype), None


def chunk_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Any) -> tuple[Tensor, None]:
    return gla(q, k, v, g, **options)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """S_t = exp(g_t) (S - beta_t k_t^T (k_t S)) + beta_t k_t^T v_t, with q and k of norm 1."""
    _assert_whole_sequence(options)
    assert options["use_qk_l2norm_in_kernel"]
    dtype = q.dtype
    q, k, v, g, beta = (tensor.double() for tensor in (q, k, v, g, beta))
    q, k = (x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state = q.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1])
    outputs = []
    for t in range(q.shape[1]):
        k_t = k[:, t, :, :, None]
        state = g[:, t, :, None, None].exp() * state
        read = (k_t * state).sum(-2)  # k_t S
        state = state + k_t * (beta[:, t, :, None] * (v[:, t] - read))[..., None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * k.shape[-1] ** -0.5)
    return torch.stack(outputs, dim=1).to(dtype), None


def mamba_chunk_scan_combined(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """S_t = exp(dt_t A) S_{t-1} + dt_t x_t^T B_t, y_t = S_t C_t + D x_t; one group."""
    assert options["dt_softplus"] and options["z"] is None and options["seq_idx"] is None
    assert options.get("dt_limit", (0.0, math.inf)) == (0.0, math.inf)
    dtype = x.dtype
    x, dt, A, B, C, D = (tensor.double() for tensor in (x, dt, A, B, C, D))
    dt = F.softplus(dt + options["dt_bias"].double())
    B, C = B.squeeze(2), C.squeeze(2)
    state = x.new_zeros(*x.shape[:1], *x.shape[2:], B.shape[-1])
    outputs = []
    for t in range(x.shape[1]):
        added = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, None, None, :]
        state = (dt[:, t] * A).exp()[..., None, None] * state + added
        outputs.append((state * C[:, t, None, None, :]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(outputs, dim=1).to(dtype), None


def _assert_whole_sequence(options: dict[str, Any]) -> None:
    assert options["initial_state"] is None and options["cu_seqlens"] is None


def _unused(*_arguments: Any, **_options: Any) -> Any:
    """Stand in for what a pass over a whole sequence does not call."""
    raise NotImplementedError


def _namespace(content: Any) -> Any:
    """Return dicts as objects with attributes, as `OmegaConf.create` does."""
    if not isinstance(content, dict):
        return content
    return SimpleNamespace(**{name: _namespace(value) for name, value in content.items()})


# -- the clone's modules ------------------------------------------------------------------------


def _modules() -> dict[str, ModuleType]:
    """Return the modules that the code imports and that are not here, by name."""
    contents: dict[str, dict[str, Any]] = {
        "causal_conv1d": {"causal_conv1d_fn": causal_conv1d_fn, "causal_conv1d_update": _unused},
        "fla": {"__version__": _VERSIONS["flash-linear-attention"]},
        "fla.layers": {},
        "fla.layers.attn": {"Attention": None},
        "fla.models": {},
        "fla.models.utils": {"Cache": SimpleNamespace},
        "fla.modules": {
            "RMSNorm": RMSNorm,
            "FusedRMSNormSwishGate": FusedRMSNormSwishGate,
            "ShortConvolution": None,
            "FusedCrossEntropyLoss": None,
            "FusedLinearCrossEntropyLoss": None,
        },
        "fla.modules.activations": {
            "ACT2FN": {"swish": F.silu},
            "swiglu": lambda x, y: F.silu(x) * y,
            "swiglu_linear": lambda x, y, weight, bias: F.linear(F.silu(x) * y, weight, bias),
        },
        "fla.ops": {},
        "fla.ops.utils": {"prepare_position_ids": _unused, "prepare_sequence_ids": _unused},
        "fla.ops.gla": {
            "chunk_gla": chunk_gla,
            "fused_chunk_gla": _unused,
            "fused_recurrent_gla": gla,
        },
        "fla.ops.gated_delta_rule": {
            "chunk_gated_delta_rule": gated_delta_rule,
            "fused_recurrent_gated_delta_rule": gated_delta_rule,
        },
        "omegaconf": {"OmegaConf": SimpleNamespace(create=_namespace)},
        "xformers": {},
        "xformers.ops": {"fmha": None, "AttentionBias": None},
    }
    modules = {}
    for name, content in contents.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(content)
    return modules


@contextmanager
def released_classes(clone: Path) -> Iterator[ModuleType]:
    """Import apps/gla/transformer.py of the clone, with `LMTransformer` and `LMTransformerArgs`.

    Its modules and the stand-ins are removed from sys.modules at the end, and nothing else.
    """
    stand_ins = _modules()
    roots = ("apps", "lingua", "huggingface", *{name.split(".")[0] for name in stand_ins})
    before = {name: module for name, module in sys.modules.items() if _root(name) in roots}
    for name in before:
        del sys.modules[name]
    sys.modules.update(stand_ins)
    real_version = importlib.metadata.version

    def version(name: str) -> str:
        return _VERSIONS.get(name) or real_version(name)

    try:
        with (
            mock.patch.object(sys, "path", [str(clone / "lingua_modified"), *sys.path]),
            mock.patch.object(importlib.metadata, "version", version),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            transformer = importlib.import_module("apps.gla.transformer")
            # `LMTransformer` imports it when it makes a model
            importlib.import_module("huggingface.modeling_gated_deltanet_canon")

        # Mamba2 has a path for CUDA and one for others, which asserts that it isn't used.
        mamba2: Any = sys.modules["huggingface.modeling_mamba2_canon"]
        mamba2.causal_conv1d_fn = causal_conv1d_fn
        mamba2.mamba_chunk_scan_combined = mamba_chunk_scan_combined
        mamba2.Mamba2CanonMixer.forward = mamba2.Mamba2CanonMixer.cuda_kernels_forward

        # transformers 5 ties what this dict says, 4.47 embedding and head.
        for module, name, base in _CLASSES:
            released_class: Any = getattr(sys.modules[f"huggingface.{module}"], name)
            released_class._tied_weights_keys = {"lm_head.weight": f"{base}.embeddings.weight"}
        yield transformer
    finally:
        for name in [name for name in sys.modules if _root(name) in roots]:
            del sys.modules[name]
        sys.modules.update(before)


def _root(name: str) -> str:
    return name.split(".")[0]
