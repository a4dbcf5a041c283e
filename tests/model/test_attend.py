"""Attention's ways against one another (test_variants.py has the truth), refusals, the log."""

import sys
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import BlockMask

from canon_pretrain.core.errors import UserError
from canon_pretrain.model import attend as attend_module
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.attend import FLASH_IMPLS, Attend
from canon_pretrain.model.cache import PADDING
from canon_pretrain.model.transformer import Transformer
from tests.flash_packages import flash_attn_package, flash_impl
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


@pytest.mark.parametrize("kv_heads", [0, 2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("position", ["nope", "alibi", "h_alibi"])
def test_flex_and_parts_read_what_sdpa_reads(position, masked, kv_heads):
    args = _args(position, kv_heads=kv_heads)
    parts, segments = _inputs(args), SEGMENTS if masked else None
    expected = _read(args, parts, segments)
    torch.testing.assert_close(_read(args, parts, segments, "flex"), expected)
    q, k, v = parts
    for backend in ("cudnn", "flex"):
        attend = Attend(args, backend)
        is_block = isinstance(attend.mask(9, segments, 9, CPU), BlockMask)
        assert is_block == (backend == "flex" and (masked or position != "nope"))
        for last in (1, 2, 8):  # the last queries, as among all
            given = attend(q[:, -last:], k, v, attend.mask(last, segments, NUM_TOKENS, CPU))
            torch.testing.assert_close(given, expected[:, -last:])


def test_alibi_in_bfloat16_keeps_its_distances():
    # 0.25 a token: past 512 tokens bfloat16 could not tell neighbours apart
    args = _args("alibi", kv_heads=2)
    parts = [part.bfloat16() for part in _inputs(args, num_tokens=700)]
    given = _read(args, parts, None)
    assert given.dtype == torch.bfloat16
    expected = _read(args, [part.float() for part in parts], None)
    torch.testing.assert_close(given, expected.bfloat16(), rtol=2**-7, atol=1e-6)


# -- the packages of FlashAttention -------------------------------------------------------------


@pytest.fixture
def flash_attn():
    with flash_attn_package():
        yield


UNFIT = [
    ({"document_mask": True}, "document_mask"),
    ({"position": "alibi"}, '"alibi"'),
    ({"position": "h_alibi"}, '"h_alibi"'),
    ({"dim": 1056}, "264"),
]


@pytest.mark.parametrize("backend", ["flash_attn", *FLASH_IMPLS])
def test_a_package_refuses_what_it_has_nothing_for(backend):
    for changes, part in UNFIT[:1] + UNFIT[2:] if backend == "flash_attn" else UNFIT:
        with pytest.raises(UserError, match=f'"{backend}".*{part}.*"auto"'):
            attend_module.check_backend_fits(replace(BASE, **changes), backend)
    attend_module.check_backend_fits(BASE, backend)  # a plan for a machine that has it


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


def test_a_model_reads_by_flash_attn_and_refuses_padding(flash_attn):
    args = variant("rope ABCD gqa")
    tokens = random_tokens(args, rows=2, num_tokens=NUM_TOKENS)
    model = build(args, attention_backend="flash_attn")
    torch.testing.assert_close(model(tokens), build(args)(tokens), rtol=1e-4, atol=1e-5)
    is_real = torch.tensor([[True, True, False]])
    with pytest.raises(UserError, match='"flash_attn".*padding.*"auto"'):
        model(torch.ones(1, 3, dtype=torch.int64), is_real_BT=is_real)


def _has_replaced_kernel() -> bool:
    name = "aten::_scaled_dot_product_flash_attention"
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")


@pytest.mark.parametrize(("backend", "kv_heads"), [("fa3", 2), ("fa4", 0)])
def test_a_package_is_sdpas_flash_kernel_from_the_model_on(backend, kv_heads):
    args = replace(BASE, num_kv_heads=kv_heads)
    assert not _has_replaced_kernel()
    with flash_impl(backend):
        for _ in range(2):  # a second model of this process
            with torch.device("meta"):
                attend = Transformer(args, attention_backend=backend).attend
            assert torch.nn.attention.current_flash_attention_impl() == backend.upper()
            assert _has_replaced_kernel()
    assert attend.describe("cuda") == backend
    assert attend_module._SDPA_ORDERS[backend][0] == SDPBackend.FLASH_ATTENTION
    assert attend_module._SDPA_ORDERS["auto"][0] == SDPBackend.CUDNN_ATTENTION
    q, k, v = _inputs(args)
    padded = attend.mask(NUM_TOKENS, SEGMENTS, NUM_TOKENS, CPU)  # evaluation's batches
    torch.testing.assert_close(attend(q, k, v, padded), _read(args, [q, k, v], SEGMENTS))


def _refuse(backend: str, match: str) -> None:
    with pytest.raises(UserError, match=f"{match}.*auto"):
        Attend(BASE, backend)


def test_what_can_not_be_had_is_refused_with_the_way_out(monkeypatch):
    _refuse("flash_atn", "attention_backend")
    with flash_attn_package(function=None):  # flash-attn-4 leaves a folder of that name
        _refuse("flash_attn", "pip install")
    with flash_impl("fa4"):
        torch.nn.attention._fa4._fa4_import_module.cache_clear()
        del sys.modules["flash_attn.cute.interface"]._flash_attn_bwd
        _refuse("fa4", "does not expose")
    for backend, capability in (("fa3", (10, 0)), ("fa4", (12, 0))):
        _refuse(backend, f"{FLASH_IMPLS[backend].package} is not installed: pip install")
        with flash_impl(backend, capability):
            _refuse(backend, "sm_90")
        with flash_impl(backend), monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: False)
            _refuse(backend, "no GPU")
            patch.undo()
            patch.setattr(torch.nn.attention, "list_flash_attention_impls", list)
            _refuse(backend, "torch 2.11 or later")
    assert torch.nn.attention.current_flash_attention_impl() is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    _refuse("flash_attn", "not installed: pip install .*flash-attn")


@pytest.mark.parametrize("fault", ["values", "gradients", "crash"])
def test_a_package_whose_kernels_are_wrong_is_refused(monkeypatch, fault):
    right = torch.nn.functional.scaled_dot_product_attention

    def wrong(q, k, v, **options):
        y = right(q, k, v, **options)
        if q.dtype == torch.float32:
            return y
        if fault == "crash":
            raise ValueError("too many values to unpack (expected 2)")
        return y * 1.1 if fault == "values" else y + 0.2 * (k.detach() - k)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", wrong)
    expected = {"values": "its values are", "gradients": "its dk are", "crash": "too many values"}
    with flash_impl("fa4"), pytest.raises(UserError, match=expected[fault]):
        Attend(BASE, "fa4")


METHODS = [  # on a CPU, on a GPU
    ("rope", "auto", "sdpa", "sdpa"),
    ("rope", "flex", "sdpa", "sdpa"),
    ("alibi", "auto", "sdpa", "flex"),
    ("alibi", "sdpa", "sdpa", "sdpa"),
    ("nope documents", "auto", "sdpa", "flex"),
    ("nope documents", "flex", "flex", "flex"),
    ("alibi", "flash_attn", "flash_attn", "flash_attn"),
]


def test_the_way_of_a_training_step(flash_attn):
    for name, backend, *expected in METHODS:
        attend = Attend(variant(name), backend)
        found = [attend.describe(device) for device in ("cpu", "cuda")]
        assert [way.split()[0] for way in found] == expected
        # which kernel is the library's choice: the log says from what
        assert expected[1] != "sdpa" or "cudnn" in found[1]
