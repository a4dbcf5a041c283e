"""softmax(q k^T / sqrt(K) + bias) v over the tokens that each token may attend to.

Three implementations: PyTorch's scaled_dot_product_attention (SDPA), flex attention, the package
flash_attn. The packages of FlashAttention 3 and 4 replace SDPA's flash kernel.

Shapes: B batch, T queries, S keys, H heads, G key-value heads, K head dim.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.model.args import ModelArgs

BACKENDS = ("auto", "sdpa", "cudnn", "flash", "flex", "flash_attn", "fa3", "fa4")
Mask = Tensor | BlockMask | None
MAX_FLASH_HEAD_DIM = 256


class FlashImpl(NamedTuple):
    """A package that replaces SDPA's flash kernel; `majors` of the GPUs that it can train on."""

    name: str
    package: str
    module: str
    version: str
    majors: tuple[int, ...]


_INDEX = " --index-url https://download.pytorch.org/whl/cu130"
FLASH_IMPLS = {
    "fa3": FlashImpl("FA3", "flash-attn-3", "flash_attn_interface", _INDEX, (9,)),
    # what torch 2.13 is tested with; from 4.0.0b19 on its calls return more than torch unpacks
    "fa4": FlashImpl("FA4", "flash-attn-4", "flash_attn.cute", "==4.0.0b17", (9, 10)),
}
_PACKAGES = ("flash_attn", *FLASH_IMPLS)

# cuDNN's kernel is the fastest on Hopper; the others are for shapes and dtypes that it refuses
_CUDNN, _FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
_SDPA_KERNELS = [_CUDNN, _FLASH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# by backend, in the order in which SDPA tries them; not in `Attend`: these can't be pickled
_SDPA_ORDERS = dict.fromkeys(BACKENDS, _SDPA_KERNELS)
_SDPA_ORDERS |= dict.fromkeys(("flash", *FLASH_IMPLS), [_FLASH, _CUDNN, *_SDPA_KERNELS[2:]])


class Attend(nn.Module):
    """The attention of one model, without parameters; `backend` is one of BACKENDS.

    `auto`: SDPA, but flex on a GPU for ALiBi, H-ALiBi and segments; `flex`: also on a CPU, forward
    only. `cudnn` and `flash`: SDPA with that kernel first (`auto`: cuDNN's); `fa3` and `fa4`:
    `flash` by that package, process-wide. With a cache SDPA replaces flex. Raises UserError for a
    backend that can't compute this model.
    """

    def __init__(self, args: ModelArgs, backend: str = "auto") -> None:
        super().__init__()
        check_backend(args, backend)
        self.args, self.backend = args, backend

    def implementation(self, device_type: str, *, masked: bool) -> str:
        """Return "sdpa", "flex" or a package; `masked`: the batch has segments."""
        if self.backend in _PACKAGES:
            return self.backend
        special = masked or self.args.position in ("alibi", "h_alibi")
        wants_flex = self.backend == "flex" or (self.backend == "auto" and device_type == "cuda")
        return "flex" if special and wants_flex else "sdpa"

    def describe(self, device_type: str) -> str:
        """Return the implementation of a training step, for a log."""
        name = self.implementation(device_type, masked=self.args.document_mask)
        if name != "sdpa" or device_type != "cuda":
            return name
        kernels = ", ".join(kernel.name.lower() for kernel in _SDPA_ORDERS[self.backend])
        return f"sdpa (the first that fits of {kernels})"

    def mask(
        self, num_queries: int, segments_BS: Tensor | None, num_keys: int, device: torch.device
    ) -> Mask:
        """Return the mask of the last `num_queries` of `num_keys` tokens; None if plain causal."""
        whole, offset = num_queries == num_keys, num_keys - num_queries
        num_heads, windowed = self.args.num_heads, self.args.position == "h_alibi"
        name = self.implementation(device.type, masked=segments_BS is not None)
        if name == "flash_attn":
            if segments_BS is not None:
                raise UserError(
                    "attention.unsupported",
                    f'attention_backend = "{name}" supports no padding; choose "auto"',
                    backend=name,
                    feature="padding",
                )
            return None

        def mask_mod(b: Any, h: Any, q: Any, s: Any) -> Any:
            """Return whether query q + `offset` of head h may attend to key s in row b."""
            distance = q + offset - s
            seen = distance >= 0
            if windowed:  # head h of the first half: the token itself and the h before it
                seen = seen & ((h >= num_heads // 2) | (distance <= h))
            if segments_BS is not None:
                seen = seen & (segments_BS[b, q + offset] == segments_BS[b, s])
            return seen

        rows = None if segments_BS is None else segments_BS.shape[0]
        if name == "flex" and whole:
            heads = num_heads if windowed else None
            on_cpu = device.type == "cpu"
            create = create_block_mask if on_cpu else _compiled(create_block_mask)
            block_mask: BlockMask = create(
                mask_mod, rows, heads, num_queries, num_keys, device=device.type
            )
            return block_mask
        if segments_BS is None and not windowed and (whole or num_queries == 1):
            return None
        places = [
            torch.arange(n, device=device).view([-1 if i == dim else 1 for i in range(4)])
            for dim, n in enumerate((rows or 1, num_heads, num_queries, num_keys))
        ]
        dense: Tensor = mask_mod(*places)
        return dense

    def step_mask(self, position_1: Tensor, segments_BS: Tensor | None, num_keys: int) -> Tensor:
        """Return the mask of the token at `position_1` among keys that are not all read yet.

        bool [B or 1, H or 1, 1, S]; of ALiBi, the bias in float32.
        """
        distance_S = position_1 - torch.arange(num_keys, device=position_1.device)
        seen = (distance_S >= 0)[None, None, None]
        if self.args.position == "h_alibi":
            heads_H11 = torch.arange(self.args.num_heads, device=position_1.device)[:, None, None]
            seen = seen & ((heads_H11 >= self.args.num_heads // 2) | (distance_S <= heads_H11))
        if segments_BS is not None:
            own_B1 = segments_BS.index_select(1, position_1)
            seen = seen & (segments_BS == own_B1)[:, None, None]
        if self.args.position == "alibi":
            slopes_H11 = alibi_slopes(self.args.num_heads, position_1.device)[:, None, None]
            return (-slopes_H11 * distance_S).masked_fill(~seen, -torch.inf)
        return seen

    def forward(self, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, mask: Mask) -> Tensor:
        """Return the output of each head, [B, T, H, K]; `mask` is from `mask()`."""
        if self.backend == "flash_attn" and mask is None:
            is_alibi = self.args.position == "alibi"
            slopes_H = alibi_slopes(self.args.num_heads, q_BTHK.device) if is_alibi else None
            return _flash_attn_func()(q_BTHK, k_BSGK, v_BSGK, causal=True, alibi_slopes=slopes_H)
        q, k, v = (part.transpose(1, 2) for part in (q_BTHK, k_BSGK, v_BSGK))
        attend = self._flex if isinstance(mask, BlockMask) else self._sdpa
        return attend(q, k, v, mask).transpose(1, 2)

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        num_heads, dtype = self.args.num_heads, q.dtype
        num_queries, num_keys = q.shape[2], k.shape[2]
        is_causal = mask is None and num_queries > 1
        if self.args.position == "alibi":
            # bfloat16 can't represent large distances: the bias is added to float32 scores
            q, k, v = (part.to(torch.promote_types(dtype, torch.float32)) for part in (q, k, v))
        if self.args.position == "alibi" and (mask is None or mask.dtype == torch.bool):
            keys_S = torch.arange(num_keys, device=q.device)
            distance_TS = keys_S[num_keys - num_queries :, None] - keys_S
            bias_HTS = -alibi_slopes(num_heads, q.device)[:, None, None].to(q.dtype) * distance_TS
            hidden = distance_TS < 0 if mask is None else ~mask
            mask, is_causal = bias_HTS.masked_fill(hidden, -torch.inf), False
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
        options: dict[str, Any] = {"attn_mask": mask, "is_causal": is_causal}
        if self.args.kv_heads != num_heads:
            options["enable_gqa"] = True
        order = _SDPA_ORDERS[self.backend]
        with sdpa_kernel(order, set_priority=True) if q.is_cuda else nullcontext():
            return F.scaled_dot_product_attention(q, k, v, **options).to(dtype)

    def _flex(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        num_heads = self.args.num_heads

        def alibi(score: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
            return score + torch.exp2(-8.0 * (h + 1) / num_heads) * (s - t)

        options: dict[str, Any] = {"enable_gqa": self.args.kv_heads != num_heads}
        if self.args.position == "alibi":
            options["score_mod"] = alibi
        is_plain = torch.compiler.is_compiling() or q.device.type == "cpu"
        flex: Any = flex_attention if is_plain else _compiled(flex_attention)
        y: Tensor = flex(q, k, v, block_mask=mask, **options)
        return y


def check_backend(args: ModelArgs, backend: str) -> None:
    """Activate `backend`; raise UserError unless it supports `args` on this machine."""
    check_backend_fits(args, backend)
    problem = None
    if backend == "flash_attn":
        problem = _flash_attn_problem()
    elif backend in FLASH_IMPLS:
        problem = activate_flash(backend) or flash_problem(args, torch.device("cuda"))
    if problem:
        raise UserError(
            "attention.unavailable",
            f'attention_backend = "{backend}", but {problem}, or choose "auto"',
            backend=backend,
            reason=problem,
        )


def check_backend_fits(args: ModelArgs, backend: str) -> None:
    """Raise UserError unless `backend` supports `args`, on whatever machine."""
    check_choice("attention_backend", backend, BACKENDS)
    if backend not in _PACKAGES:
        return
    feature = None
    if args.head_dim > MAX_FLASH_HEAD_DIM:
        feature = f"a head dim of {args.head_dim} (dim / num_heads), above {MAX_FLASH_HEAD_DIM}"
    if args.document_mask:
        feature = "document_mask"
    if args.position == "h_alibi" or (args.position == "alibi" and backend in FLASH_IMPLS):
        feature = args.position
    if feature:
        raise UserError(
            "attention.unsupported",
            f'attention_backend = "{backend}" does not support {feature}; choose "auto"',
            backend=backend,
            feature=feature,
        )


def _flash_attn_problem() -> str | None:
    install = "pip install --no-build-isolation flash-attn"
    if importlib.util.find_spec("flash_attn") is None:
        return f"the package flash-attn is not installed: {install}"
    try:
        _flash_attn_func()
    except (ImportError, AttributeError, OSError) as why:  # flash-attn-4 has a folder of that name
        return f"the package flash-attn can't be used here ({why}): {install}"
    return None


def activate_flash(backend: str) -> str | None:
    """Make `fa3` or `fa4` this process's flash kernel; return why it is unavailable, or None."""
    impl = FLASH_IMPLS[backend]
    # no import at the top: an export also loads under older versions of torch
    registry: Any = torch.nn.attention
    if impl.name not in getattr(registry, "list_flash_attention_impls", list)():
        return f"torch {torch.__version__} has no {impl.name}: install torch 2.11 or later"
    needed = " or ".join(f"sm_{major}0" for major in impl.majors)
    has_gpu = torch.cuda.is_available()
    if has_gpu and (found := torch.cuda.get_device_capability())[0] not in impl.majors:
        return f"this GPU is sm_{found[0]}{found[1]}: use one of {needed}"
    try:
        missing = importlib.util.find_spec(impl.module) is None
    except ImportError:  # of the folder around it
        missing = True
    install = f"pip install {impl.package}{impl.version}"
    if missing:
        return f"the package {impl.package} is not installed: {install}"
    if not has_gpu:
        return f"there is no GPU: use one of {needed}"
    if registry.current_flash_attention_impl() != impl.name:
        try:
            registry.activate_flash_attention_impl(impl.name)
        except (ImportError, AttributeError, OSError, RuntimeError) as why:
            return f"the package {impl.package} can't be used here ({why}): {install}"
    return None


def flash_problem(args: ModelArgs, device: torch.device) -> str | None:
    """Return how SDPA's flash kernel fails for this model's heads, or None."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, 128, args.head_dim) for heads in (args.num_heads, *[args.kv_heads] * 2)]
    parts = [torch.randn(shape, generator=generator, device="cpu").bfloat16() for shape in shapes]
    gqa: dict[str, Any] = {"enable_gqa": True} if args.kv_heads != args.num_heads else {}
    found = []
    try:
        for kernel, dtype in ((SDPBackend.MATH, torch.float32), (_FLASH, torch.bfloat16)):
            with torch.enable_grad(), sdpa_kernel(kernel):
                q, k, v = (part.to(device, dtype).requires_grad_() for part in parts)
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True, **gqa)
                found.append([y, *torch.autograd.grad(y.float().square().sum(), (q, k, v))])
    except Exception as why:
        return f"its kernels fail on {args.num_heads} heads of {args.head_dim} dims ({why})"
    for name, true, given in zip(("values", "dq", "dk", "dv"), *found, strict=True):
        error = (given.float() - true).abs().max() / true.abs().max()
        if not error <= 3e-2:  # bfloat16's rounding is a tenth of it
            return f"its {name} are {error:.2g} away from softmax(q k^T) v"
    return None


def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """Return 2^(-8h/H) for the heads h = 1 .. H, float32 [H] (Press et al. 2022, section 3)."""
    heads_H = torch.arange(1, num_heads + 1, device=device, dtype=torch.float32)
    return torch.exp2(-8.0 * heads_H / num_heads)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # without compilation, flex attention and create_block_mask materialize all scores
    return torch.compile(function)


def _flash_attn_func() -> Callable[..., Tensor]:
    # torch.compile can trace sys.modules, but not an import
    module = sys.modules.get("flash_attn") or importlib.import_module("flash_attn")
    function: Callable[..., Tensor] = module.flash_attn_func
    return function
