"""On a GPU: variants and attention backends in bfloat16 against the float32 reference."""

from dataclasses import replace

import pytest
import torch

from canon_pretrain.core.errors import UserError
from canon_pretrain.kernels.backends import compile_options
from canon_pretrain.model import attend as attend_module
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.attend import check_backend
from canon_pretrain.model.cache import Cache
from canon_pretrain.model.transformer import Transformer
from tests.reference_model import reference_logits
from tests.variants import build, every_variant, random_tokens, variant

DEVICE = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# more than one block of flex attention, and no multiple of it
NUM_TOKENS = 200


@pytest.fixture(autouse=True)
def _fresh_compiler():
    # more shapes and masks than dynamo recompiles for
    torch.compiler.reset()


def _widen(args: ModelArgs) -> ModelArgs:
    return replace(args, dim=64 * args.num_heads, ffn_dim=256, max_seq_len=256)


def _on_gpu(args: ModelArgs, **options) -> Transformer:
    return build(args, **options).to(DEVICE, torch.bfloat16)


def _difference(given: torch.Tensor, expected: torch.Tensor) -> float:
    given, expected = given.detach().float().cpu(), expected.detach().float().cpu()
    return float((given - expected).norm() / expected.norm())


def _assert_equals_the_reference(args: ModelArgs, **options) -> None:
    model = _on_gpu(args, **options)
    tokens = random_tokens(args, rows=2, num_tokens=NUM_TOKENS)
    logits = model(tokens.to(DEVICE))
    assert logits.dtype == torch.bfloat16
    named = dict(model.named_parameters())
    params = {n: p.detach().float().cpu().requires_grad_() for n, p in named.items()}
    expected = reference_logits(args, params, tokens)
    assert _difference(logits, expected) < 0.03
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (logits.float() * weights.to(DEVICE)).sum().backward()
    (expected * weights).sum().backward()
    for name, parameter in named.items():
        if parameter.requires_grad:
            assert _difference(parameter.grad, params[name].grad) < 0.1, name


@every_variant
def test_every_variant_equals_the_reference(args):
    _assert_equals_the_reference(_widen(args))


METHODS = [
    *(("rope gqa", backend) for backend in ("sdpa", "flash_attn", "fa3", "fa4")),
    *(("alibi gqa", backend) for backend in ("sdpa", "flex", "flash_attn")),
    *(("h_alibi ABCD gqa documents", backend) for backend in ("sdpa", "flex")),
]


@pytest.mark.parametrize(("name", "backend"), METHODS)
def test_every_attention_backend_equals_the_reference(name, backend):
    args = _widen(variant(name))
    try:
        check_backend(args, backend)
    except UserError as why:
        if why.code != "attention.unavailable" or "fail" in str(why) or "away from" in str(why):
            raise
        pytest.skip(str(why))
    _assert_equals_the_reference(args, attention_backend=backend)
    torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)


@pytest.mark.parametrize("kernel", attend_module._SDPA_KERNELS, ids=lambda k: k.name)
def test_every_sdpa_kernel_equals_the_reference(monkeypatch, kernel):
    monkeypatch.setattr(attend_module, "_SDPA_ORDERS", {"auto": [kernel]})
    _assert_equals_the_reference(_widen(variant("rope")))


@pytest.mark.parametrize("name", ["rope ABCD", "alibi ABCD gqa documents", "h_alibi AC"])
def test_blocks_compile_to_one_graph_with_the_same_numbers(name):
    args = _widen(variant(name))
    model, eager = _on_gpu(args), _on_gpu(args)
    for layer, block in model.layers.named_children():
        compiled = torch.compile(block, fullgraph=True, options=compile_options("cuda", "auto"))
        model.layers.register_module(layer, compiled)
    for seed in (0, 1):
        tokens = random_tokens(args, rows=2, num_tokens=NUM_TOKENS, seed=seed).to(DEVICE)
        assert _difference(model(tokens), eager(tokens)) < 0.03


@pytest.mark.parametrize("name", ["rope ABCD gqa", "alibi ABCD documents"])
def test_reading_in_chunks_equals_one_pass(name):
    args = _widen(variant(name))
    model = _on_gpu(args)
    tokens = random_tokens(args, rows=2, num_tokens=NUM_TOKENS).to(DEVICE)
    cache = Cache(args.num_layers)
    with torch.no_grad():
        sizes = [150, 1, 1, 40, 8]
        parts = [model(part, cache=cache) for part in tokens.split(sizes, dim=1)]
        assert _difference(torch.cat(parts, dim=1), model(tokens)) < 0.03
