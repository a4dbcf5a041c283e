"""Attention implementations against SDPA (test_transformer.py has the reference), and refusals."""

import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import BlockMask

from canon_pretrain.model import attend as attend_module
from canon_pretrain.model.attend import FLASH_IMPLS, Attend
from canon_pretrain.model.cache import PADDING
from canon_pretrain.model.transformer import Transformer
from tests.flash_packages import flash_attn_package, flash_impl
from tests.support import refused
from tests.variants import BASE, build, random_tokens, variant

# flex attention without torch.compile
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
CPU = torch.device("cpu")
NUM_TOKENS = 9
SEGMENTS = torch.tensor(
    [[0, 0, 0, 1, 1, 1, 1, 2, 2], [PADDING, PADDING, 5, 5, 5, 5, 5, PADDING, PADDING]],
    dtype=torch.int32,
)


def _args(position, kv_heads=0):
    """Return the args of a position, such as "h_alibi 3": with windows in 3 heads."""
    name, _, windows = position.partition(" ")
    return replace(BASE, position=name, num_kv_heads=kv_heads, h_alibi_heads=int(windows or 0))


def _inputs(args, num_tokens=NUM_TOKENS):
    """Return random q, k and v [2, T, H, 8]."""
    generator = torch.Generator().manual_seed(num_tokens)
    return [
        torch.randn((2, num_tokens, heads, 8), generator=generator)
        for heads in (args.num_heads, args.kv_heads, args.kv_heads)
    ]


@torch.no_grad()
def _attend(args, q, k, v, segments, backend="sdpa"):
    """Attend from all tokens to all."""
    attend = Attend(args, backend)
    num_tokens = q.shape[1]
    return attend(q, k, v, attend.mask(num_tokens, segments, num_tokens, CPU))


@pytest.fixture
def flash_attn():
    with flash_attn_package():
        yield


@pytest.mark.parametrize("kv_heads", [0, 2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("position", ["nope", "alibi", "h_alibi", "h_alibi 1", "h_alibi 4"])
def test_other_backends_and_chunks_equal_sdpa(flash_attn, position, masked, kv_heads):
    args = _args(position, kv_heads)
    segments = SEGMENTS if masked else None
    q, k, v = _inputs(args)
    expected = _attend(args, q, k, v, segments)

    torch.testing.assert_close(_attend(args, q, k, v, segments, "flex"), expected)

    backends = ["cudnn", "flex"]
    if not masked and not args.num_windowed:
        backends.append("flash_attn")
    for backend in backends:
        attend = Attend(args, backend)
        is_block = isinstance(attend.mask(NUM_TOKENS, segments, NUM_TOKENS, CPU), BlockMask)
        assert is_block == (backend == "flex" and (masked or position != "nope"))

        for num_queries in (1, 2, 8, NUM_TOKENS):  # the last ones
            mask = attend.mask(num_queries, segments, NUM_TOKENS, CPU)
            y = attend(q[:, -num_queries:], k, v, mask)
            torch.testing.assert_close(y, expected[:, -num_queries:])


@pytest.mark.parametrize(("h_alibi_heads", "expected"), [(0, 2), (1, 1), (3, 3), (4, 4)])
def test_windows_of_h_alibi_are_in_the_first_heads(h_alibi_heads, expected):
    """A query far behind a spike of the values sees it in heads without a window only."""
    args = replace(BASE, position="h_alibi", h_alibi_heads=h_alibi_heads)
    q, k, v = _inputs(args)
    v = torch.zeros_like(v)
    v[:, 2] = 1.0

    y = _attend(args, q, k, v, None)

    # token 2 + d sees token 2 in head h = 1 .. of those with a window if d < h
    for head in range(args.num_heads):
        window = head + 1 if head < expected else NUM_TOKENS
        sees = y[:, :, head].ne(0).all(dim=-1).tolist()
        assert sees == [[0 <= t - 2 < window for t in range(NUM_TOKENS)]] * 2


def test_alibi_keeps_distances_in_bfloat16():
    # 0.25 per token: past 512 tokens bfloat16 can't distinguish neighbors
    args = _args("alibi", kv_heads=2)
    q, k, v = (part.bfloat16() for part in _inputs(args, num_tokens=700))
    expected = _attend(args, q.float(), k.float(), v.float(), None)

    y = _attend(args, q, k, v, None)

    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected.bfloat16(), rtol=2**-7, atol=1e-6)


# -- the packages of FlashAttention


@pytest.mark.parametrize("backend", ["flash_attn", *FLASH_IMPLS])
def test_packages_refuse_unsupported_models(backend):
    unsupported = [
        ({"position": "h_alibi"}, {"feature": "h_alibi"}),
        ({"position": "relative"}, {"feature": "relative"}),
        ({"document_mask": True}, {"feature": "document_mask"}),
        ({"dim": 1056}, {}),  # a head dim of 264
    ]
    if backend != "flash_attn":
        unsupported.append(({"position": "alibi"}, {"feature": "alibi"}))
    for changes, fields in unsupported:
        with refused("attention.unsupported", backend=backend, **fields):
            attend_module.check_backend_fits(replace(BASE, **changes), backend)

    attend_module.check_backend_fits(BASE, backend)  # without the package


def test_a_model_with_flash_attn_refuses_padding(flash_attn):
    args = variant("rope ABCD gqa")
    tokens = random_tokens(args, rows=2, num_tokens=NUM_TOKENS)
    model = build(args, attention_backend="flash_attn")
    torch.testing.assert_close(model(tokens), build(args)(tokens), rtol=1e-4, atol=1e-5)
    with refused("attention.unsupported", backend="flash_attn", feature="padding"):
        model(torch.ones(1, 2, dtype=torch.int64), is_real_BT=torch.tensor([[True, False]]))


def _flash_kernels():
    """Return where SDPA's flash kernels for CUDA were registered: none in a torch for CPUs."""
    dump = torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention")
    return [line for line in dump.splitlines() if line.startswith("CUDA")]


@pytest.mark.parametrize(("backend", "kv_heads"), [("fa3", 2), ("fa4", 0)])
def test_a_model_activates_its_flash_package(backend, kv_heads):
    args = replace(BASE, num_kv_heads=kv_heads)
    kernels_before = _flash_kernels()

    with flash_impl(backend):
        for _ in range(2):  # a second model of this process
            with torch.device("meta"):
                attend = Transformer(args, attention_backend=backend).attends["layer"]
            assert torch.nn.attention.current_flash_attention_impl() == backend.upper()
            assert _flash_kernels() not in ([], kernels_before)

    assert attend.describe("cuda") == backend
    assert attend_module._SDPA_ORDERS[backend][0] == SDPBackend.FLASH_ATTENTION
    assert attend_module._SDPA_ORDERS["auto"][0] == SDPBackend.CUDNN_ATTENTION
    q, k, v = _inputs(args)
    padded = attend.mask(NUM_TOKENS, SEGMENTS, NUM_TOKENS, CPU)  # as in evaluation
    torch.testing.assert_close(attend(q, k, v, padded), _attend(args, q, k, v, SEGMENTS))


def _assert_unavailable(backend, reason):
    with refused("attention.unavailable", backend=backend) as caught:
        Attend(BASE, backend)
    assert reason in str(caught.value.fields["reason"])


def test_unavailable_backends_are_refused(monkeypatch):
    with refused("config.unknown_choice", name="attention_backend"):
        Attend(BASE, "flash_atn")
    with flash_attn_package(function=None):  # flash-attn-4 leaves a folder of that name
        _assert_unavailable("flash_attn", "flash_attn_func")
    with flash_impl("fa4"):
        torch.nn.attention._fa4._fa4_import_module.cache_clear()
        del sys.modules["flash_attn.cute.interface"]._flash_attn_bwd
        _assert_unavailable("fa4", "does not expose")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    _assert_unavailable("flash_attn", "pip install")


@pytest.mark.parametrize(
    ("backend", "other_capability"), [("fa3", (10, 0)), ("fa4", (12, 0))], ids=["fa3", "fa4"]
)
def test_flash_packages_without_what_they_need_are_refused(backend, other_capability, monkeypatch):
    _assert_unavailable(backend, f"pip install {FLASH_IMPLS[backend].package}")

    with flash_impl(backend, other_capability):
        _assert_unavailable(backend, "sm_90")

    with flash_impl(backend):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: False)
            _assert_unavailable(backend, "no GPU")
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.attention, "list_flash_attention_impls", list)
            _assert_unavailable(backend, "torch 2.11")
    assert torch.nn.attention.current_flash_attention_impl() is None


@pytest.mark.parametrize("fault", ["values", "dk", "crash"])
def test_a_package_with_wrong_kernels_is_refused(monkeypatch, fault):
    right = F.scaled_dot_product_attention

    def wrong(q, k, v, **options):
        y = right(q, k, v, **options)
        if q.dtype == torch.float32:
            return y
        if fault == "crash":
            raise ValueError("crash")
        return y * 1.1 if fault == "values" else y + 0.2 * (k.detach() - k)

    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)
    with flash_impl("fa4"):
        _assert_unavailable("fa4", fault)


@pytest.mark.parametrize(
    ("name", "backend", "on_cpu", "on_gpu"),
    [
        ("rope", "auto", "sdpa", "sdpa"),
        ("rope", "flex", "sdpa", "sdpa"),
        ("alibi", "auto", "sdpa", "flex"),
        ("alibi", "sdpa", "sdpa", "sdpa"),
        ("relative", "auto", "sdpa", "flex"),
        ("relative", "sdpa", "sdpa", "sdpa"),
        ("nope documents", "auto", "sdpa", "flex"),
        ("nope documents", "flex", "flex", "flex"),
        ("alibi", "flash_attn", "flash_attn", "flash_attn"),
    ],
)
def test_the_implementation_of_a_training_step(flash_attn, name, backend, on_cpu, on_gpu):
    attend = Attend(variant(name), backend)

    assert attend.describe("cpu") == on_cpu
    assert attend.describe("cuda").split()[0] == on_gpu
