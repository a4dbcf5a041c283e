"""softmax(q k^T / sqrt(K) + bias) v over the tokens that each token may attend to.

Three implementations: PyTorch's scaled_dot_product_attention (SDPA), flex attention, the package
flash_attn. The packages of FlashAttention 3 and 4 replace SDPA's flash kernel.

Shapes: B batch, T queries, S keys, H heads, G key-value heads, K head dim, E distances with a
learned bias.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
# the largest head dim of FlashAttention 2's kernels
MAX_FLASH_HEAD_DIM = 256
FLASH_TEST_TOKENS = 128
FLASH_TOLERANCE = 3e-2  # of the largest value; bfloat16's rounding is a tenth of it


class FlashImpl(NamedTuple):
    """A package that replaces SDPA's flash kernel."""

    name: str  # in torch's registry
    package: str
    module: str
    version: str  # what follows the package's name in a pip command
    majors: tuple[int, ...]  # major compute capabilities of the GPUs that it can train on


FLASH_IMPLS = {
    "fa3": FlashImpl(
        name="FA3",
        package="flash-attn-3",
        module="flash_attn_interface",
        version=" --index-url https://download.pytorch.org/whl/cu130",
        majors=(9,),
    ),
    "fa4": FlashImpl(
        name="FA4",
        package="flash-attn-4",
        module="flash_attn.cute",
        # what torch 2.13 is tested with; from 4.0.0b19 on its calls return more than torch unpacks
        version="==4.0.0b17",
        majors=(9, 10),
    ),
}
_PACKAGES = ("flash_attn", *FLASH_IMPLS)

# SDPA's kernels, in the order in which it tries them; not in `Attend`: these can't be pickled.
# cuDNN's is the fastest on Hopper; the others are for shapes and dtypes that it refuses
_CUDNN = SDPBackend.CUDNN_ATTENTION
_FLASH = SDPBackend.FLASH_ATTENTION
_OTHERS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_CUDNN_FIRST = [_CUDNN, _FLASH, *_OTHERS]
_FLASH_FIRST = [_FLASH, _CUDNN, *_OTHERS]
# flash kernels take no bias, and cuDNN's has no gradient of it
_WITH_BIAS = _OTHERS
_SDPA_ORDERS = {
    **dict.fromkeys(BACKENDS, _CUDNN_FIRST),
    **dict.fromkeys(("flash", *FLASH_IMPLS), _FLASH_FIRST),
}

HIDDEN = -1
"""In a mask of distances, that of keys which a query may not attend to."""


class Attend(nn.Module):
    """The attention of one model, without parameters; `backend` is one of BACKENDS.

    `auto`: SDPA, but flex on a GPU for ALiBi, H-ALiBi, learned biases, windows and segments;
    `flex`: also on a CPU, forward only. `cudnn` and `flash`: SDPA with that kernel first (`auto`:
    cuDNN's), unless biases are learned; `fa3` and `fa4`: `flash` by that package, process-wide.
    With a cache SDPA replaces flex. Raises UserError for a backend that can't compute this model.
    """

    def __init__(self, args: ModelArgs, backend: str = "auto") -> None:
        super().__init__()
        check_backend(args, backend)
        self.args = args
        self.backend = backend
        self.num_windowed = args.num_windowed
        self.is_relative = args.position == "relative"

    def implementation(self, device_type: str, *, masked: bool) -> str:
        """Return "sdpa", "flex" or a package; `masked`: the batch has segments."""
        if self.backend in _PACKAGES:
            return self.backend
        # SDPA's fast kernels compute causal attention only
        has_bias = self.args.position in ("alibi", "h_alibi", "relative")
        has_mask = has_bias or self.args.window
        needs_mask = masked or has_mask
        wants_flex = self.backend == "flex" or (self.backend == "auto" and device_type == "cuda")
        return "flex" if needs_mask and wants_flex else "sdpa"

    def describe(self, device_type: str) -> str:
        """Return the implementation of a training step, for a log."""
        name = self.implementation(device_type, masked=self.args.document_mask)
        if name != "sdpa" or device_type != "cuda":
            return name
        kernels = ", ".join(kernel.name.lower() for kernel in self._sdpa_order)
        return f"sdpa (the first that fits of {kernels})"

    @property
    def _sdpa_order(self) -> list[SDPBackend]:
        """SDPA's kernels on a GPU, in the order of preference."""
        return _WITH_BIAS if self.is_relative else _SDPA_ORDERS[self.backend]

    def mask(
        self, num_queries: int, segments_BS: Tensor | None, num_keys: int, device: torch.device
    ) -> Mask:
        """Return the mask of the last `num_queries` of `num_keys` tokens; None if plain causal.

        A BlockMask for flex attention, else bool [B or 1, H or 1, T, S]. With learned biases, the
        distances of the keys in int64, or HIDDEN.
        """
        offset = num_keys - num_queries
        name = self.implementation(device.type, masked=segments_BS is not None)
        if name == "flash_attn":
            if segments_BS is not None:
                raise _unsupported(name, "padding")
            return None

        # Flex attention for whole sequences; where tokens continue a cache, SDPA replaces it.
        if name == "flex" and offset == 0:
            return self._block_mask(segments_BS, num_keys, device)

        # SDPA has its own causal mask for a whole sequence, and a single query sees all keys: of a
        # window, the cache has no others.
        window = self.args.window
        is_causal_only = segments_BS is None and not self.num_windowed and not self.is_relative
        if is_causal_only and offset == 0 and (not window or num_keys <= window):
            return None
        is_alibi_ring = window and offset and self.args.position == "alibi"
        if is_causal_only and num_queries == 1 and not is_alibi_ring:
            return None

        # The keys, or those that a cache with a window returns.
        queries_T1 = torch.arange(offset, num_keys, device=device)[:, None]
        if window and offset:
            keys_S = ring_positions(offset, num_queries, window, device)
        else:
            keys_S = torch.arange(num_keys, device=device)
        is_visible = self._visible_keys(queries_T1[None, None], keys_S, segments_BS)
        if self.is_relative:
            return torch.where(is_visible, queries_T1 - keys_S, HIDDEN)

        # ALiBi's bias knows the positions of a ring's keys by their order only: it is added here.
        if is_alibi_ring:
            return self._alibi_bias(queries_T1 - keys_S, is_visible)
        return is_visible

    def _block_mask(
        self, segments_BS: Tensor | None, num_tokens: int, device: torch.device
    ) -> BlockMask:
        """Return the mask of a whole sequence for flex attention."""
        # flex attention traces `mask_mod`: without a module
        num_windowed = self.num_windowed
        window = self.args.window

        def mask_mod(b: Any, h: Any, q: Any, s: Any) -> Any:
            """Return whether the query at q of head h may attend to key s in row b."""
            return _is_visible(b, h, q, s, segments_BS, num_windowed, window)

        create = create_block_mask if device.type == "cpu" else _compiled(create_block_mask)
        return create(
            mask_mod,
            B=None if segments_BS is None else segments_BS.shape[0],  # None: one mask for all rows
            H=self.args.num_heads if num_windowed else None,
            Q_LEN=num_tokens,
            KV_LEN=num_tokens,
            device=device.type,
        )

    def step_mask(self, position: Tensor, segments_BS: Tensor | None, num_keys: int) -> Tensor:
        """Return the mask of the token at `position` among keys that are not all read yet.

        `position`: [1], or of each row's token, [B, 1]. bool [B or 1, H or 1, 1, S]; of ALiBi, the
        bias in float32; with learned biases, distances as in `mask`. With a window, the keys are
        the slots of its ring.
        """
        query_B111 = position.view(-1, 1, 1, 1)
        window = self.args.window
        if window:
            # The latest position up to this one that each slot can hold; below 0, the slot is not
            # written yet.
            slots_S = torch.arange(window, device=position.device)
            keys = query_B111 - (query_B111 - slots_S) % window  # [B or 1, 1, 1, S]
            is_read = keys >= 0
            # clamped, because positions are indices into the segments; `is_read` hides these keys
            is_visible = self._visible_keys(query_B111, keys.clamp(min=0), segments_BS)
            is_visible = is_visible & is_read
        else:
            keys = torch.arange(num_keys, device=position.device)
            is_visible = self._visible_keys(query_B111, keys, segments_BS)
        if self.is_relative:
            return torch.where(is_visible, query_B111 - keys, HIDDEN)
        if self.args.position == "alibi":
            return self._alibi_bias(query_B111 - keys, is_visible)
        return is_visible

    def _visible_keys(self, queries: Tensor, keys: Tensor, segments_BS: Tensor | None) -> Tensor:
        """Return whether queries at these positions may attend to keys, [B or 1, H or 1, T, S].

        `queries`: [B or 1, 1, T, 1]; `keys`: [S], or of each row, [B, 1, 1, S].
        """
        # an index that is not needed would be a launch per token
        rows_B111 = None
        heads_H11 = None
        if segments_BS is not None:
            rows_B = torch.arange(segments_BS.shape[0], device=keys.device)
            rows_B111 = rows_B[:, None, None, None]
        if self.num_windowed:
            heads_H = torch.arange(self.args.num_heads, device=keys.device)
            heads_H11 = heads_H[:, None, None]

        return _is_visible(
            rows_B111,
            heads_H11,
            queries,
            keys,
            segments_BS,
            self.num_windowed,
            self.args.window,
        )

    def forward(
        self,
        q_BTHK: Tensor,
        k_BSGK: Tensor,
        v_BSGK: Tensor,
        mask: Mask,
        biases_BTHE: Tensor | None = None,
    ) -> Tensor:
        """Return the output of each head, [B, T, H, K]; `mask` is from `mask()`.

        `biases_BTHE`: the learned bias of each query's score at each distance, 0 beyond them.
        """
        if self.backend == "flash_attn" and mask is None:
            slopes_H = None
            if self.args.position == "alibi":
                slopes_H = alibi_slopes(self.args.num_heads, q_BTHK.device)
            options: dict[str, Any] = {"causal": True, "alibi_slopes": slopes_H}
            # numbers of keys before and after the query; a single one sees all of a ring
            if self.args.window and q_BTHK.shape[1] > 1:
                options["window_size"] = (self.args.window - 1, 0)
            return _flash_attn_func()(q_BTHK, k_BSGK, v_BSGK, **options)

        # SDPA and flex attention expect the heads before the tokens.
        q_BHTK = q_BTHK.transpose(1, 2)
        k_BGSK = k_BSGK.transpose(1, 2)
        v_BGSK = v_BSGK.transpose(1, 2)
        if isinstance(mask, BlockMask):
            return self._flex(q_BHTK, k_BGSK, v_BGSK, mask, biases_BTHE).transpose(1, 2)
        if biases_BTHE is not None:
            assert mask is not None  # distances
            mask = _biases_of_scores(biases_BTHE, mask)
        return self._sdpa(q_BHTK, k_BGSK, v_BGSK, mask).transpose(1, 2)

    def weights(
        self, q_BTHK: Tensor, k_BSGK: Tensor, mask: Mask, biases_BTHE: Tensor | None = None
    ) -> Tensor:
        """Return what `forward` weighs the values with, [B, H, T, S], for a mask of SDPA."""
        assert not isinstance(mask, BlockMask)
        dtype = torch.promote_types(q_BTHK.dtype, torch.float32)
        num_queries = q_BTHK.shape[1]
        num_keys = k_BSGK.shape[1]
        q_BHTK = q_BTHK.transpose(1, 2).to(dtype)
        k_BHSK = self._of_all_heads(k_BSGK).to(dtype)
        score_BHTS = q_BHTK @ k_BHSK.mT * q_BTHK.shape[3] ** -0.5

        if biases_BTHE is not None:
            assert mask is not None  # distances
            mask = _biases_of_scores(biases_BTHE, mask)
        elif self.args.position == "alibi":
            mask = self._mask_with_alibi(mask, num_queries, num_keys, q_BTHK.device, dtype)
        if mask is None and num_queries > 1:
            ones_TS = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q_BTHK.device)
            mask = ones_TS.tril()
        if mask is not None and mask.dtype == torch.bool:
            score_BHTS = score_BHTS.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            score_BHTS = score_BHTS + mask
        return score_BHTS.softmax(dim=-1).to(q_BTHK.dtype)

    def weighted(self, weights_BHTS: Tensor, v_BSGK: Tensor) -> Tensor:
        """Return the output of each head, [B, T, H, K], for the weights of `weights`."""
        return (weights_BHTS @ self._of_all_heads(v_BSGK)).transpose(1, 2)

    def _of_all_heads(self, x_BSGK: Tensor) -> Tensor:
        """Return keys or values once per query head, [B, H, S, K]."""
        repeats = self.args.num_heads // x_BSGK.shape[2]
        return x_BSGK.transpose(1, 2).repeat_interleave(repeats, dim=1)

    def _sdpa(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Any) -> Tensor:
        """Return the output of each head, [B, H, T, K]; `mask` is bool, a bias, or None."""
        dtype = q_BHTK.dtype
        num_queries = q_BHTK.shape[2]
        num_keys = k_BGSK.shape[2]
        if self.args.position == "alibi":
            # bfloat16 can't represent large distances: the bias is added to float32 scores
            score_dtype = torch.promote_types(dtype, torch.float32)
            q_BHTK = q_BHTK.to(score_dtype)
            k_BGSK = k_BGSK.to(score_dtype)
            v_BGSK = v_BGSK.to(score_dtype)
            mask = self._mask_with_alibi(mask, num_queries, num_keys, q_BHTK.device, score_dtype)

        # in the order of preference; on a CPU there is no choice
        kernels: AbstractContextManager[None] = nullcontext()
        if q_BHTK.is_cuda:
            kernels = sdpa_kernel(self._sdpa_order, set_priority=True)
        with kernels:
            y_BHTK = F.scaled_dot_product_attention(
                q_BHTK,
                k_BGSK,
                v_BGSK,
                attn_mask=mask,
                is_causal=mask is None and num_queries > 1,
                enable_gqa=self.args.kv_heads != self.args.num_heads,
            )
        return y_BHTK.to(dtype)

    def _mask_with_alibi(
        self,
        mask: Any,
        num_queries: int,
        num_keys: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return ALiBi's bias with what `mask` hides; the mask of a step already is one."""
        if mask is None or mask.dtype == torch.bool:
            keys_S = torch.arange(num_keys, device=device)
            # the queries are the last of the keys' tokens
            distance_TS = keys_S[num_keys - num_queries :, None] - keys_S
            is_visible = distance_TS >= 0 if mask is None else mask
            mask = self._alibi_bias(distance_TS, is_visible, dtype)
        return mask.to(dtype)

    def _alibi_bias(
        self, distance: Tensor, is_visible: Tensor, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return ALiBi's bias of the scores by head, [.., H, T, S]; -inf where not visible."""
        slopes_H11 = alibi_slopes(self.args.num_heads, distance.device)[:, None, None].to(dtype)
        return (-slopes_H11 * distance).masked_fill(~is_visible, -torch.inf)

    def _flex(
        self,
        q_BHTK: Tensor,
        k_BGSK: Tensor,
        v_BGSK: Tensor,
        mask: Any,
        biases_BTHE: Tensor | None,
    ) -> Tensor:
        num_heads = self.args.num_heads

        def add_alibi(score: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
            # as in `alibi_slopes`, with heads from 0 on; s - t is the negative distance
            slope = torch.exp2(-8.0 * (h + 1) / num_heads)
            return score + slope * (s - t)

        score_mod = add_alibi if self.args.position == "alibi" else None
        if biases_BTHE is not None:
            score_mod = _adding(biases_BTHE)

        # within a compiled block it is compiled anyway; on a CPU it is not compiled
        flex: Any = flex_attention
        if not torch.compiler.is_compiling() and q_BHTK.device.type != "cpu":
            flex = _compiled(flex_attention)
        return flex(
            q_BHTK,
            k_BGSK,
            v_BGSK,
            score_mod=score_mod,
            block_mask=mask,
            enable_gqa=self.args.kv_heads != num_heads,
        )


def _adding(biases_BTHE: Tensor) -> Callable[..., Tensor]:
    """Return the function by which flex attention adds the bias of a score."""
    num_distances = biases_BTHE.shape[-1]

    def add_learned(score: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        # keys past the token, which the mask hides, have no bias either: any will do
        distance = t - s
        near = biases_BTHE[b, t, h, distance.clamp(0, num_distances - 1)]
        return score + torch.where(distance < num_distances, near, 0.0)

    return add_learned


def _biases_of_scores(biases_BTHE: Tensor, distance: Tensor) -> Tensor:
    """Return the bias of each score, [B, H, T, S]; -inf of keys that are HIDDEN.

    `distance`: of the keys, int64 [B or 1, 1, T, S].
    """
    # beyond the last distance the bias is 0
    padded_BHTX = F.pad(biases_BTHE, (0, 1)).transpose(1, 2)
    num_rows, _, num_heads, beyond = biases_BTHE.shape
    index_BHTS = distance.clamp(0, beyond).expand(num_rows, num_heads, -1, -1)
    bias_BHTS = padded_BHTX.gather(-1, index_BHTS)
    return bias_BHTS.masked_fill(distance == HIDDEN, -torch.inf)


def _is_visible(
    row: Any,
    head: Any,
    query: Any,
    key: Any,
    segments_BS: Tensor | None,
    num_windowed: int,
    window: int,
) -> Any:
    """Return whether the query of a row and head may attend to the key; arguments broadcast.

    `query` and `key` are positions. A query sees the last `window` tokens, 0: all. The first
    `num_windowed` heads have their own window: head h sees the token itself and the h before it.
    """
    distance = query - key
    # Conditions without effect are left out: each one would be a launch, or code in flex's kernel.
    is_visible = distance >= 0
    if window:
        is_visible = is_visible & (distance < window)
    if num_windowed:
        is_visible = is_visible & ((head >= num_windowed) | (distance <= head))
    if segments_BS is not None:
        is_visible = is_visible & (segments_BS[row, query] == segments_BS[row, key])
    return is_visible


def ring_positions(
    start: int, num_tokens: int, window: int, device: torch.device | None = None
) -> Tensor:
    """Return the positions of the keys that `LayerCache.append_tokens` returns with a window.

    Those that tokens start, start + 1, .. may see; of a single token in the order of the ring.
    """
    if num_tokens > 1:
        return torch.arange(max(0, start - window + 1), start + num_tokens, device=device)
    slots = torch.arange(min(start + 1, window), device=device)
    # the latest position in each slot; before the ring is full, the slots are the positions
    return start - (start - slots) % window


def check_backend(args: ModelArgs, backend: str) -> None:
    """Activate `backend`; raise UserError unless it supports `args` on this machine."""
    check_backend_fits(args, backend)

    # what this machine lacks
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
    if args.pattern:
        for kind in args.kinds.values():
            check_backend_fits(kind, backend)
        return
    if args.mixer != "attention":
        return

    # FlashAttention 2 computes ALiBi and windows itself
    if args.window and (backend in FLASH_IMPLS or args.position == "alibi"):
        raise _unsupported(backend, "window")

    has_no_kernel = args.position in ("h_alibi", "relative")
    if has_no_kernel or (args.position == "alibi" and backend in FLASH_IMPLS):
        raise _unsupported(backend, args.position)
    if args.document_mask:
        raise _unsupported(backend, "document_mask")
    if args.head_dim > MAX_FLASH_HEAD_DIM:
        head_dim = f"a head dim of {args.head_dim} (dim / num_heads), above {MAX_FLASH_HEAD_DIM}"
        raise _unsupported(backend, head_dim)


def _unsupported(backend: str, feature: str) -> UserError:
    return UserError(
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
    except (ImportError, AttributeError, OSError) as error:
        # such as an AttributeError where only flash-attn-4 is installed: its folder has that name
        return f"the package flash-attn can't be used here ({error}): {install}"
    return None


def activate_flash(backend: str) -> str | None:
    """Make `fa3` or `fa4` this process's flash kernel; return why it is unavailable, or None."""
    # Does this torch know it? No import at the top: an export also loads under older versions.
    impl = FLASH_IMPLS[backend]
    registry: Any = torch.nn.attention
    if impl.name not in getattr(registry, "list_flash_attention_impls", list)():
        return f"torch {torch.__version__} has no {impl.name}: install torch 2.11 or later"

    # Do the GPU and the package fit? A missing package is named before a missing GPU.
    gpus = " or ".join(f"sm_{major}0" for major in impl.majors)
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        major, minor = torch.cuda.get_device_capability()
        if major not in impl.majors:
            return f"this GPU is sm_{major}{minor}: use one of {gpus}"

    install = f"pip install {impl.package}{impl.version}"
    if not _is_installed(impl.module):
        return f"the package {impl.package} is not installed: {install}"
    if not has_gpu:
        return f"there is no GPU: use one of {gpus}"

    # Replace the kernel, for the whole process.
    if registry.current_flash_attention_impl() != impl.name:
        try:
            registry.activate_flash_attention_impl(impl.name)
        except (ImportError, AttributeError, OSError, RuntimeError) as error:
            return f"the package {impl.package} can't be used here ({error}): {install}"
    return None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of the package that contains it
        return False


def flash_problem(args: ModelArgs, device: torch.device) -> str | None:
    """Return how SDPA's flash kernel fails for this model's heads, or None."""
    # drawn on the CPU: the random state of the device stays as it is
    generator = torch.Generator().manual_seed(0)

    is_grouped = args.kv_heads != args.num_heads
    qkv = []
    for num_heads in (args.num_heads, args.kv_heads, args.kv_heads):
        shape = (1, num_heads, FLASH_TEST_TOKENS, args.head_dim)
        qkv.append(torch.randn(shape, generator=generator, device="cpu").bfloat16())

    def values_and_gradients(kernel: SDPBackend, dtype: torch.dtype) -> list[Tensor]:
        q, k, v = (part.to(device, dtype).requires_grad_() for part in qkv)
        # the gradient of sum(y^2): one that depends on all outputs
        with torch.enable_grad(), sdpa_kernel(kernel):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
            return [y, *torch.autograd.grad(y.float().square().sum(), (q, k, v))]

    try:
        expected = values_and_gradients(SDPBackend.MATH, torch.float32)
        computed = values_and_gradients(_FLASH, torch.bfloat16)
    except Exception as error:
        return f"its kernels fail on {args.num_heads} heads of {args.head_dim} dims ({error})"

    # Each is compared with float32, relative to its largest value.
    names = ("values", "dq", "dk", "dv")
    for name, x, exact in zip(names, computed, expected, strict=True):
        error_size = (x.float() - exact).abs().max() / exact.abs().max()
        if not error_size <= FLASH_TOLERANCE:  # NaN too
            return f"its {name} are {error_size:.2g} away from softmax(q k^T) v"
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
    return module.flash_attn_func
