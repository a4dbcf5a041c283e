"""The operators of `kernels/triton/` under what PyTorch does to them: compile, checkpoint, shard.

See triton_cases.py, which runs these, and triton_properties.py, whose values they take.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests import triton_properties as properties
from tests.triton_properties import (
    all_sites,
    assert_equal,
    face,
    gradients,
    random,
    sites_inputs,
)
from tests.variants import build, random_tokens, variant


def operators() -> Any:
    face()
    return torch.ops.canon_pretrain


def operators_pass_opcheck() -> None:
    """Schemas, fakes, autograd and their meeting under AOT dispatch, as PyTorch tests operators."""
    ops = operators()
    x, gate = random(2, 5, 6, seed=1), random(2, 5, 6, seed=2)
    weight, weights = random(6, 1, 4, seed=3), random(12, 1, 4, seed=4)
    segments = torch.tensor(
        [[0, 0, 0, 1, 1, 2, 2, 2]] * 2, dtype=torch.int32, device=properties.DEVICE
    )
    check = torch.library.opcheck
    cos, sin = (torch.rand(5, 1, device=properties.DEVICE) for _ in range(2))
    nothing = (None, None, 0, 0)
    for rows in (
        (None, None, None, *nothing, True, False, "none", 0.0),
        (random(6, seed=5), segments, None, *nothing, False, True, "full", 1e-5),
        (gate[0, 0], None, gate, *nothing, True, False, "full", 1e-5),
        (random(3, seed=6), None, None, cos, sin, 3, 2, True, False, "per_head", 1e-5),
    ):
        check(ops.canon_rows.default, (x, weight, *rows))
    check(ops.canon_gate.default, (x, gate, weights, segments, True, False, False))


def backward_operators_pass_opcheck() -> None:
    """The same of the operators that backward calls, which have no gradient themselves."""
    ops = operators()
    x, dy, gain = (random(*shape, seed=1).detach() for shape in ((1, 2, 6), (1, 2, 6), (6,)))
    weight, weights = random(6, 1, 4, seed=3).detach(), random(12, 1, 4, seed=4).detach()
    rstd = torch.rand(1, 2, device=x.device)
    tests = ("test_schema", "test_faketensor")
    for want in (True, False):
        same = (x, weight, gain, None, None, None, rstd)
        kind = (3, 0, True, True, "full", 1e-5, want)
        rows = torch.ops.canon_pretrain.canon_rows_backward.default
        torch.library.opcheck(rows, ([dy, x], *same, dy + x, *kind), test_utils=tests)
        gate = (dy, x, dy, weights, None, True, False, True, want)
        torch.library.opcheck(ops.canon_gate_backward.default, gate, test_utils=tests)


def one_graph_under_compile() -> None:
    """fullgraph, and the same bits as eager."""
    inputs = sites_inputs()
    compiled = torch.compile(all_sites(), fullgraph=True, backend="aot_eager")
    assert_equal(gradients(compiled, inputs), gradients(all_sites(), inputs))


def activation_checkpointing_keeps_the_bits() -> None:
    """Full, and selective with the operators' results kept."""
    inputs = sites_inputs()
    want = gradients(all_sites(), inputs)

    def full(*args: Tensor) -> Tensor:
        return checkpoint(all_sites(), *args, use_reentrant=False)

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = "canon" in str(op)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def selective(*args: Tensor) -> Tensor:
        def contexts() -> Any:
            return create_selective_checkpoint_contexts(policy)

        return checkpoint(all_sites(), *args, use_reentrant=False, context_fn=contexts)

    assert_equal(gradients(full, inputs), want)
    assert_equal(gradients(selective, inputs), want)


class _Block(torch.nn.Module):
    """What `_sites` computes, with its weights as parameters."""

    def __init__(self, gain: Tensor, weights: Tensor) -> None:
        super().__init__()
        self.gain, self.weights = torch.nn.Parameter(gain), torch.nn.Parameter(weights)
        self.sites = all_sites()

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y: Tensor = self.sites(h, self.gain, self.weights, cos, sin)
        return y


def fsdp2_shards_the_weights() -> None:
    """One rank, mixed precision: values and gradients are those of the block itself in bfloat16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    h, gain, weights, cos, sin = (value.detach() for value in sites_inputs())
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        # tables stay float32, as Rope's do: its block is not handed them
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
        mesh = torch.distributed.init_device_mesh(properties.DEVICE, (1,))
        sharded = fully_shard(_Block(gain, weights), mesh=mesh, mp_policy=policy)
        plain = _Block(gain.bfloat16(), weights.bfloat16())
        for block in (sharded, plain):
            block(h.bfloat16(), cos, sin).float().square().sum().backward()
        for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad.to_local(), theirs.grad.float())
    finally:
        torch.distributed.destroy_process_group()


KERNELS = ("canon_triton", "norm_canon_stream_triton", "canon_qkv_triton", "canon_gate_triton")
# model -> the kernels that it asks for; the rest of it is plain
MODELS = {
    "nope ABCD": KERNELS[1:],
    "partial_rope_b ABCD cst qk_per_head gqa": KERNELS[1:],
    "partial_rope_b BD k3 no_res act standard qk_per_head gqa documents": (KERNELS[0], KERNELS[2]),
    "partial_rope_c ABCD qk_full": KERNELS[1:],
    "partial_rope_a ABCD k2 no_res act cst relu2": KERNELS[1:],
}


def a_model_is_the_references(name: str) -> None:
    """Its logits and all gradients, and the kernels that ran."""
    args, fused = variant(name), face()
    models = [build(args, canon_backend=backend) for backend in ("reference", "triton")]
    tokens = random_tokens(args, rows=2, num_tokens=11)
    with contextlib.ExitStack() as stack:
        spies = {
            kernel: stack.enter_context(
                mock.patch.object(fused, kernel, wraps=getattr(fused, kernel))
            )
            for kernel in KERNELS
        }
        results = [model(tokens) for model in models]
    weights = torch.randn(results[0].shape, generator=torch.Generator().manual_seed(1))
    for logits in results:
        (logits * weights).sum().backward()
    used = {kernel for kernel, spy in spies.items() if spy.called}
    # canon_qkv_triton calls canon_triton
    assert set(MODELS[name]) <= used <= {*MODELS[name], "canon_triton"}, used
    pairs = zip(*([p.grad for p in model.parameters()] for model in models), strict=True)
    for one, other in (results, *pairs):
        assert one is None or (one - other).abs().max() < 1e-4 * one.abs().max()


CPU_CASES: dict[str, Callable[[], None]] = {
    "fsdp2 shards the weights": fsdp2_shards_the_weights,
    **{f"model {name}": partial(a_model_is_the_references, name) for name in MODELS},
}
CASES: dict[str, Callable[[], None]] = {
    function.__name__.replace("_", " "): function
    for function in (
        operators_pass_opcheck,
        backward_operators_pass_opcheck,
        one_graph_under_compile,
        activation_checkpointing_keeps_the_bits,
    )
}
