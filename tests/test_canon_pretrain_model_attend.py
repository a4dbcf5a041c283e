"""Attention's three ways: explicit biases and masks, one another, refusals, what a log says."""

import importlib.machinery
import math
import sys
import types
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask

from canon_pretrain.errors import UserError
from canon_pretrain.model import attend as attend_module
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.attend import Attend
from canon_pretrain.model.documents import PADDING
from canon_pretrain.model.transformer import Transformer
from tests.variants import BASE, build, random_tokens, variant

# torch on itself: what flex attention costs where it is not compiled
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
CPU = torch.device("cpu")
NUM_TOKENS = 9
SEGMENTS = torch.tensor(
    [[0, 0, 0, 1, 1, 1, 1, 2, 2], [PADDING, PADDING, 5, 5, 5, 5, 5, PADDING, PADDING]],
    dtype=torch.int32,
)


def _args(position: str, num_heads: int = 4, kv_heads: int = 0) -> ModelArgs:
    return replace(
        BASE, position=position, dim=8 * num_heads, num_heads=num_heads, num_kv_heads=kv_heads
    )


def _inputs(args: ModelArgs, num_tokens: int = NUM_TOKENS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(2, num_tokens, heads, 8) for heads in (args.num_heads, *[args.kv_heads] * 2)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _read(
    args: ModelArgs, parts: list[torch.Tensor], segments: torch.Tensor | None, backend: str = "sdpa"
) -> torch.Tensor:
    attend = Attend(args, backend)
    num_tokens = parts[0].shape[1]
    with torch.no_grad():
        return attend(*parts, attend.mask(num_tokens, segments, num_tokens, CPU))


def _weights(args: ModelArgs, segments: torch.Tensor | None = None) -> torch.Tensor:
    """What each head's weights are where all scores are alike, [B, T, H, S].

    The values are the unit vectors of the keys' places, so what is read are the weights.
    """
    q = torch.zeros(2, NUM_TOKENS, args.num_heads, NUM_TOKENS)
    v = torch.eye(NUM_TOKENS)[None, :, None].expand(2, -1, args.kv_heads, -1)
    return _read(args, [q, torch.zeros_like(v), v], segments)


def test_alibi_takes_a_power_of_two_off_for_every_token_of_distance():
    for num_heads, exponents in ((4, [2, 4, 6, 8]), (8, [1, 2, 3, 4, 5, 6, 7, 8])):
        weights = _weights(_args("alibi", num_heads))
        for head, exponent in enumerate(exponents):
            for t in range(NUM_TOKENS):
                terms = [math.exp(-(t - s) / 2**exponent) for s in range(t + 1)]
                expected = [term / sum(terms) for term in terms] + [0.0] * (NUM_TOKENS - 1 - t)
                torch.testing.assert_close(weights[0, t, head], torch.tensor(expected))


@pytest.mark.parametrize("kv_heads", [0, 2])
def test_h_alibi_gives_head_h_of_the_first_half_the_nearest_h_tokens(kv_heads):
    weights = _weights(_args("h_alibi", num_heads=8, kv_heads=kv_heads))
    for head in range(8):
        window = head + 1 if head < 4 else NUM_TOKENS
        for t in range(NUM_TOKENS):
            seen = min(window, t + 1)
            expected = torch.zeros(NUM_TOKENS)
            expected[t - seen + 1 : t + 1] = 1 / seen
            torch.testing.assert_close(weights[0, t, head], expected)


@pytest.mark.parametrize("position", ["nope", "alibi", "h_alibi"])
def test_nothing_is_read_from_another_segment_and_padding_reads_without_a_nan(position):
    weights = _weights(_args(position), SEGMENTS)
    assert torch.isfinite(weights).all()
    for row, t, s in torch.cartesian_prod(torch.arange(2), *[torch.arange(NUM_TOKENS)] * 2):
        seen = weights[row, t, :, s] > 0
        own = s <= t and bool(SEGMENTS[row, t] == SEGMENTS[row, s])
        # the last head has no window
        assert bool(seen[-1]) == own and (own or not seen.any())


def test_neighbouring_heads_of_q_share_a_head_of_k_and_v():
    args = _args("nope", num_heads=4, kv_heads=2)
    q, k, v = _inputs(args)
    for backend in ("sdpa", "flex"):
        y = _read(args, [q, k, v], SEGMENTS, backend)
        for head in range(4):
            one = [q[:, :, head : head + 1], *(x[:, :, head // 2 : head // 2 + 1] for x in (k, v))]
            expected = _read(_args("nope", num_heads=1), one, SEGMENTS)
            torch.testing.assert_close(y[:, :, head : head + 1], expected)


@pytest.mark.parametrize("kv_heads", [0, 1, 2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("position", ["nope", "alibi", "h_alibi"])
def test_flex_reads_what_sdpa_reads(position, masked, kv_heads):
    args = _args(position, kv_heads=kv_heads)
    parts, segments = _inputs(args), SEGMENTS if masked else None
    expected = _read(args, parts, segments)
    torch.testing.assert_close(_read(args, parts, segments, "flex"), expected)
    is_flex = isinstance(Attend(args, "flex").mask(9, segments, 9, CPU), BlockMask)
    assert is_flex == (masked or position != "nope")


@pytest.mark.parametrize("name", ["alibi ABCD gqa documents", "h_alibi AC tied documents"])
def test_a_model_reads_the_same_by_flex_over_more_than_one_block(name):
    # flex attention cuts a sequence into blocks of 128 tokens
    args = variant(name)
    tokens = random_tokens(args, rows=2, num_tokens=150)
    with torch.no_grad():
        expected = build(args)(tokens)
        given = build(args, attention_backend="flex")(tokens)
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["sdpa", "cudnn", "flash", "flex"])
@pytest.mark.parametrize("position", ["nope", "alibi", "h_alibi"])
def test_the_last_queries_read_what_they_read_among_all(position, backend):
    args = _args(position, kv_heads=2)
    q, k, v = _inputs(args)
    attend = Attend(args, backend)
    for segments in (None, SEGMENTS):
        whole = _read(args, [q, k, v], segments)
        for last in (1, 2, 8):
            mask = attend.mask(last, segments, NUM_TOKENS, CPU)
            given = attend(q[:, -last:], k, v, mask)
            torch.testing.assert_close(given, whole[:, -last:])


@pytest.mark.parametrize("kv_heads", [0, 2])
def test_alibi_in_bfloat16_keeps_its_distances(kv_heads):
    # 0.25 a token: past 512 tokens bfloat16 could not tell neighbours apart
    args = _args("alibi", kv_heads=kv_heads)
    parts = [part.bfloat16() for part in _inputs(args, num_tokens=700)]
    given = _read(args, parts, None)
    assert given.dtype == torch.bfloat16
    expected = _read(args, [part.float() for part in parts], None)
    torch.testing.assert_close(given, expected.bfloat16(), rtol=2**-7, atol=1e-6)


def _flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """The package's documented contract, query by query: causality at the bottom right corner."""
    assert causal and dropout_p == softcap == 0.0 and window_size == (-1, -1)
    assert alibi_slopes is None or alibi_slopes.dtype == torch.float32
    num_queries, num_heads, num_keys = q.shape[1], q.shape[2], k.shape[1]
    scale = softmax_scale or q.shape[3] ** -0.5
    out = torch.zeros_like(q)
    for head in range(num_heads):
        kv_head = head * k.shape[2] // num_heads
        slope = 0.0 if alibi_slopes is None else alibi_slopes[head]
        for i in range(num_queries):
            place = i + num_keys - num_queries
            j = torch.arange(place + 1)
            scores = (k[:, : place + 1, kv_head] * q[:, i : i + 1, head]).sum(-1) * scale
            scores = scores - slope * (place - j).abs()
            weights = scores.softmax(dim=-1)[..., None]
            out[:, i, head] = (weights * v[:, : place + 1, kv_head]).sum(dim=1)
    return out


@pytest.fixture
def flash_attn(monkeypatch):
    """A package of that name that keeps to the contract of the real one, on a CPU."""
    module = types.ModuleType("flash_attn")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", loader=None)
    module.flash_attn_func = _flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    attend_module._flash_attn_func.cache_clear()
    yield
    attend_module._flash_attn_func.cache_clear()


@pytest.mark.parametrize("kv_heads", [0, 2])
@pytest.mark.parametrize("position", ["nope", "alibi"])
def test_flash_attn_reads_what_sdpa_reads_of_all_and_of_the_last_queries(
    flash_attn, position, kv_heads
):
    args = _args(position, kv_heads=kv_heads)
    q, k, v = _inputs(args)
    whole, attend = _read(args, [q, k, v], None), Attend(args, "flash_attn")
    for last in (NUM_TOKENS, 3, 1):
        mask = attend.mask(last, None, NUM_TOKENS, CPU)
        torch.testing.assert_close(attend(q[:, -last:], k, v, mask), whole[:, -last:])


def test_a_model_gives_the_same_logits_with_flash_attn(flash_attn):
    for name in ("rope ABCD gqa", "alibi AC qk_full", "partial_rope_a"):
        args = variant(name)
        tokens = random_tokens(args, rows=2, num_tokens=NUM_TOKENS)
        given = build(args, attention_backend="flash_attn")(tokens)
        torch.testing.assert_close(given, build(args)(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"document_mask": True}, ['"flash_attn"', "document_mask", '"auto"']),
        ({"position": "h_alibi"}, ['"flash_attn"', '"h_alibi"', '"auto"']),
    ],
    ids=["document_mask", "h_alibi"],
)
def test_flash_attn_refuses_what_it_has_nothing_for(flash_attn, changes, parts):
    with pytest.raises(UserError) as error:
        Transformer(replace(BASE, **changes), attention_backend="flash_attn")
    for part in parts:
        assert part in str(error.value)


def test_flash_attn_refuses_padding(flash_attn):
    model = build(BASE, attention_backend="flash_attn")
    is_real = torch.tensor([[True, True, False]])
    with pytest.raises(UserError, match='"flash_attn".*padding.*"auto"'):
        model(torch.ones(1, 3, dtype=torch.int64), is_real_BT=is_real)


def test_flash_attn_that_is_not_installed_is_refused_with_the_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match='not installed: pip install .*flash-attn.*"auto"'):
        Attend(BASE, "flash_attn")


def test_an_unknown_backend_is_refused_with_the_nearest():
    with pytest.raises(UserError) as error:
        Attend(BASE, "flash_atn")
    for part in (
        'attention_backend = "flash_atn"',
        "auto, sdpa, cudnn, flash, flex",
        "Did you mean",
    ):
        assert part in str(error.value)


def test_the_log_says_where_flex_was_asked_for_and_is_of_no_use():
    assert Attend(variant("rope"), "flex").describe("cpu") == (
        "sdpa (flex is for ALiBi, H-ALiBi and documents)"
    )
    assert Attend(variant("rope"), "flex").describe("cuda").endswith("documents)")
    assert Attend(variant("alibi"), "flex").describe("cuda") == "flex"
    assert Attend(variant("rope"), "auto").describe("cpu") == "sdpa"
    for backend, order in (
        ("auto", "cudnn, flash, efficient, math"),
        ("cudnn", "cudnn, flash, efficient, math"),
        ("flash", "flash, cudnn, efficient, math"),
    ):
        said = Attend(variant("rope"), backend).describe("cuda")
        assert said == f"sdpa (the first that fits of {order})"
        for words in ("alibi", "h_alibi", "rope documents"):  # a mask, which some kernels take
            assert Attend(variant(words), backend).way("cpu", masked=True) == "sdpa"


@pytest.mark.parametrize(
    ("name", "backend", "on_cpu", "on_cuda"),
    [
        ("rope", "auto", "sdpa", "sdpa"),
        ("rope", "flex", "sdpa", "sdpa"),
        ("alibi", "auto", "sdpa", "flex"),
        ("alibi", "sdpa", "sdpa", "sdpa"),
        ("alibi", "flex", "flex", "flex"),
        ("h_alibi", "auto", "sdpa", "flex"),
        ("nope documents", "auto", "sdpa", "flex"),
        ("nope documents", "sdpa", "sdpa", "sdpa"),
        ("nope documents", "flex", "flex", "flex"),
        ("rope", "flash_attn", "flash_attn", "flash_attn"),
        ("alibi", "flash_attn", "flash_attn", "flash_attn"),
    ],
)
def test_the_way_of_a_training_step(flash_attn, name, backend, on_cpu, on_cuda):
    attend = Attend(variant(name), backend)
    assert attend.describe("cpu").split()[0] == on_cpu
    assert attend.describe("cuda").split()[0] == on_cuda
    if on_cuda == "sdpa":  # which kernel is the library's choice: the log says from what
        assert "cudnn" in attend.describe("cuda")


@pytest.mark.parametrize("backend", ["auto", "flash"])
def test_the_order_of_kernels_on_a_gpu_is_traced_without_a_graph_break(backend):
    # the CPU path goes around this context, so the compile tests do not see it
    attend = Attend(BASE, backend)

    @torch.compile(backend="eager", fullgraph=True)
    def read(q):
        with sdpa_kernel(attend_module._SDPA_ORDERS[attend.backend], set_priority=True):
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    q = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(read(q), expected)
    first = {"auto": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    order = attend_module._SDPA_ORDERS[backend]
    assert order[0] == first[backend] and len(order) == len(set(order)) == 4
