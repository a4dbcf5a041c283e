"""torch.compile of each block, as in torchtitan: one graph, and the same numbers."""

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list

from tests.variants import SOME_VARIANTS, VARIANTS, build, random_tokens, variant

# from inside torch
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{warning}")
    for warning in (
        "The .grad attribute of a Tensor that is not a leaf",
        "flex_attention called without",
        ".*should not be instantiated:DeprecationWarning",
        "`torch.jit:DeprecationWarning",
    )
]
COMPILER = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _compile_blocks(model, backend):
    """Compile each block of the model in place; return the model."""
    for name, block in model.layers.named_children():
        model.layers.register_module(name, torch.compile(block, backend=backend, fullgraph=True))
    return model


system = pytest.mark.system
MOST_DIFFERENT = SOME_VARIANTS[:30]  # 5 s each
ONE_GRAPH = [
    ("nope ABCD", {}),
    ("nope ABC moe", {}),
    *(pytest.param(name, {}, marks=system) for name in MOST_DIFFERENT),
    *(
        pytest.param(name, {}, marks=pytest.mark.long)
        for name in VARIANTS
        if name not in (*MOST_DIFFERENT, "nope ABCD")
    ),
    pytest.param("alibi ABCD gqa documents", {"attention_backend": "flex"}, marks=system),
    pytest.param("relative BD distances6", {"attention_backend": "flex"}, marks=system),
    pytest.param("h_alibi BD documents", {"canon_backend": "reference"}, marks=system),
]


@pytest.mark.parametrize(("name", "options"), ONE_GRAPH)
def test_one_graph_serves_all_blocks_and_batches(name, options):
    args = VARIANTS.get(name) or variant(name)
    eager = build(args, **options)
    counter = CompileCounter()
    compiled = _compile_blocks(build(args, **options), counter)

    for seed in range(3):  # different documents
        tokens = random_tokens(args, rows=2, num_tokens=16, seed=seed)
        # on a CPU flex attention has no backward
        with torch.set_grad_enabled("attention_backend" not in options):
            torch.testing.assert_close(compiled(tokens), eager(tokens), rtol=1e-5, atol=5e-5)
    assert counter.frame_count == len(args.kinds)


def _assert_equal_gradients(model, expected):
    """The gradients of the parameters are close to those of another model's."""
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        if other.grad is not None:  # as of cst
            error = (parameter.grad - other.grad).abs().max()
            assert error < 1e-4 * other.grad.abs().max()


@system
@pytest.mark.parametrize("mode", ["full", "selective", "memory_budget"])
def test_activation_checkpointing_keeps_gradients(tmp_path, mode):
    args = variant("nope ABCD documents")
    eager = build(args)
    model = build(args)
    tokens = random_tokens(args, rows=2, num_tokens=16)

    with torch._functorch.config.patch(activation_memory_budget=1.0):  # put back afterwards
        apply_ac(
            model,
            ActivationCheckpoint(mode=mode, selective_ac_option="op", memory_budget=0.5),
            model_compile_enabled=True,
            op_sac_save_list=_op_sac_save_list,
            base_folder=str(tmp_path),
        )
        _compile_blocks(model, "aot_eager_decomp_partition")
        for each in (eager, model):
            each(tokens).square().sum().backward()

    _assert_equal_gradients(model, eager)


@system
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_compiled_blocks_equal_eager_ones():
    args = variant("nope ABCD")
    eager = build(args)
    compiled = _compile_blocks(build(args), "inductor")
    tokens = random_tokens(args, rows=2, num_tokens=40)  # more than a chunk of compiled.py

    expected = eager(tokens)
    logits = compiled(tokens)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (expected * weights).sum().backward()
    (logits * weights).sum().backward()

    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    _assert_equal_gradients(compiled, eager)
