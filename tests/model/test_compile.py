"""torch.compile, block by block as torchtitan does it: one graph for all, and the same numbers."""

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list

from canon_pretrain.model.transformer import Transformer
from tests.variants import VARIANTS, build, random_tokens, variant

# All from inside torch: dynamo looking at a block's input, flex attention where it is not compiled,
# its block masks under dynamo, and importing inductor.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{warning}")
    for warning in (
        "The .grad attribute of a Tensor that is not a leaf:UserWarning",
        "flex_attention called without:UserWarning",
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


def _compile_blocks(model: Transformer, backend) -> Transformer:
    for name, block in model.layers.named_children():
        model.layers.register_module(name, torch.compile(block, backend=backend, fullgraph=True))
    return model


system = pytest.mark.system
ONE_GRAPH = [
    # every sixth in the default run
    *(pytest.param(n, {}, marks=[system] if i % 6 else []) for i, n in enumerate(VARIANTS)),
    ("alibi ABCD gqa documents", {"attention_backend": "flex"}),
    ("h_alibi BD", {"attention_backend": "flex"}),
    ("rope ABCD k2 standard gqa", {"canon_backend": "reference"}),
    ("h_alibi BD documents", {"canon_backend": "reference"}),
]


@pytest.mark.parametrize(("name", "options"), ONE_GRAPH)
def test_one_graph_serves_all_blocks_and_all_batches_of_a_shape(name, options):
    counter, args = CompileCounter(), variant(name)
    compiled = _compile_blocks(build(args, **options), counter)
    eager = build(args, **options)
    for seed in range(3):  # whatever documents they hold
        tokens = random_tokens(args, rows=2, num_tokens=16, seed=seed)
        # on a CPU flex attention has no backward
        with torch.set_grad_enabled("attention_backend" not in options):
            torch.testing.assert_close(compiled(tokens), eager(tokens))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("full", "nope ABCD"),
        ("selective", "h_alibi ABCD k3 no_res cst tied documents"),
        pytest.param("memory_budget", "nope ABCD", marks=system),
    ],
)
def test_activation_checkpointing_changes_no_gradient(tmp_path, mode, name):
    args = variant(name)
    expected, model = build(args), build(args)
    asked = ActivationCheckpoint(mode=mode, selective_ac_option="op", memory_budget=0.5)
    tokens = random_tokens(args, rows=2, num_tokens=16)
    with torch._functorch.config.patch(activation_memory_budget=1.0):  # put back afterwards
        options = {"op_sac_save_list": _op_sac_save_list, "base_folder": str(tmp_path)}
        apply_ac(model, asked, model_compile_enabled=True, **options)
        _compile_blocks(model, "aot_eager_decomp_partition")
        for each in (expected, model):
            each(tokens).square().sum().backward()
    for one, other in zip(expected.parameters(), model.parameters(), strict=True):
        if one.grad is not None:  # as of cst
            assert (other.grad - one.grad).abs().max() < 1e-4 * one.grad.abs().max()


@pytest.mark.skipif(COMPILER is None, reason="inductor needs a C++ compiler (g++, c++ or clang++)")
@pytest.mark.parametrize("name", ["nope ABCD", "alibi AC act standard_relu2 qk_full gqa documents"])
def test_compiled_blocks_give_the_eager_logits_and_gradients(name):
    args = variant(name)
    eager, compiled = build(args), _compile_blocks(build(args), "inductor")
    tokens = random_tokens(args, rows=2, num_tokens=40)  # more than a chunk of compiled.py
    expected, given = eager(tokens), compiled(tokens)
    weights = torch.randn(given.shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)
    for logits in (expected, given):
        (logits * weights).sum().backward()
    pairs = zip(eager.parameters(), compiled.named_parameters(), strict=True)
    for parameter, (name_, other) in pairs:
        error = (other.grad - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert error < 1e-4, name_
