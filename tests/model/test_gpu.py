"""On a GPU: variants and attention backends in bfloat16 against the float32 reference."""

from dataclasses import replace

import pytest
import torch

from canon_pretrain.core.errors import UserError
from canon_pretrain.kernels.backends import compile_options
from canon_pretrain.model import attend as attend_module
from canon_pretrain.model import decode
from canon_pretrain.model.attend import check_backend
from canon_pretrain.model.cache import Cache
from canon_pretrain.model.decode import DecodeStep, generate
from tests.reference_model import reference_logits
from tests.variants import VARIANTS, build, every_variant, random_tokens, variant

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


def _wide(args):
    """Return args of heads of 64, which all attention backends can compute."""
    return replace(args, dim=64 * args.num_heads, ffn_dim=256, max_seq_len=256)


def _on_gpu(args, **options):
    """Return a model in bfloat16 and tokens, both on the GPU."""
    tokens = random_tokens(args, rows=2, num_tokens=NUM_TOKENS)
    return build(args, **options).to(DEVICE, torch.bfloat16), tokens.to(DEVICE)


@pytest.mark.parametrize("name", ["rope ABCD gqa", "nope ABCD documents", "gla ABCD", "mamba2 AB"])
def test_generation_by_a_graph_equals_eager_steps(name, monkeypatch):
    """In float64, where other kernels change no token; a failed capture would warn."""
    model = build(variant(name)).to(DEVICE, torch.float64)
    prompts = [random_tokens(model.args, 1, n, seed=n)[0].tolist() for n in (1, 3, 30, 9)]
    has_graph = []
    capture = DecodeStep._capture

    def watched(step, tokens_B1):
        capture(step, tokens_B1)
        has_graph.append(step._graph is not None)

    monkeypatch.setattr(DecodeStep, "_capture", watched)
    answers = generate(model, prompts, max_new_tokens=[40, 7, 60, 60])
    monkeypatch.setattr(decode, "FIXED_DEVICES", ())
    expected = generate(model, prompts, max_new_tokens=[40, 7, 60, 60])

    assert has_graph
    assert all(has_graph)
    assert answers == expected


def _difference(computed, expected):
    """Return the norm of the difference over that of `expected`."""
    computed = computed.detach().float().cpu()
    expected = expected.detach().float().cpu()
    return float((computed - expected).norm() / expected.norm())


def _assert_equals_the_reference(args, **options):
    """Logits and gradients in bfloat16 are close to those of the reference in float32."""
    model, tokens = _on_gpu(args, **options)
    parameters = dict(model.named_parameters())
    exact = {name: p.detach().float().cpu().requires_grad_() for name, p in parameters.items()}
    expected = reference_logits(args, exact, tokens.cpu())

    logits = model(tokens)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (logits.float() * weights.to(DEVICE)).sum().backward()
    (expected * weights).sum().backward()

    assert logits.dtype == torch.bfloat16
    assert _difference(logits, expected) < 0.03
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            assert _difference(parameter.grad, exact[name].grad) < 0.1, name


@every_variant
def test_every_variant_equals_the_reference(args):
    _assert_equals_the_reference(_wide(args))


BACKENDS = [
    ("rope gqa", "sdpa"),
    ("rope gqa", "flash_attn"),
    ("rope gqa", "fa3"),
    ("rope gqa", "fa4"),
    ("alibi gqa", "sdpa"),
    ("alibi gqa", "flex"),
    ("alibi gqa", "flash_attn"),
    ("relative distances6 gqa", "sdpa"),
    ("relative distances6 gqa", "flex"),
    ("relative distances6 gqa documents", "flex"),
    ("h_alibi ABCD gqa documents", "sdpa"),
    ("h_alibi ABCD gqa documents", "flex"),
]


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_every_attention_backend_equals_the_reference(name, backend):
    args = _wide(variant(name))
    try:
        check_backend(args, backend)
    except UserError as why:
        if "fail" in str(why) or "away from" in str(why):
            raise
        pytest.skip(str(why))
    _assert_equals_the_reference(args, attention_backend=backend)
    torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)


@pytest.mark.parametrize("kernel", attend_module._CUDNN_FIRST, ids=lambda k: k.name)
def test_every_sdpa_kernel_equals_the_reference(monkeypatch, kernel):
    monkeypatch.setattr(attend_module, "_SDPA_ORDERS", {"auto": [kernel]})
    _assert_equals_the_reference(_wide(VARIANTS["rope"]))


@pytest.mark.parametrize("name", ["rope ABCD", "alibi ABCD documents", "h_alibi AC"])
def test_compiled_blocks_and_chunks_equal_one_eager_pass(name):
    args = _wide(variant(name))
    eager, tokens = _on_gpu(args)
    compiled, _ = _on_gpu(args)
    for layer, block in compiled.layers.named_children():
        block = torch.compile(block, fullgraph=True, options=compile_options("cuda", "auto"))
        compiled.layers.register_module(layer, block)
    expected = eager(tokens)

    with torch.no_grad():
        cache = Cache.of(args)
        chunks = [eager(part, cache=cache) for part in tokens.split([150, 1, 1, 40, 8], dim=1)]
    logits = compiled(tokens)

    assert _difference(torch.cat(chunks, dim=1), expected) < 0.03
    assert _difference(logits, expected) < 0.03
