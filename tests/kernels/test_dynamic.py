"""Dynamic filters against a loop over tokens and taps in float64: values, gradients, memory."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from canon_pretrain.kernels.backends import canon, resolve_backend
from canon_pretrain.kernels.dynamic import canon_dynamic
from tests.canon_inputs import KINDS, PLAIN, every_kind, randoms, segments_of

RANK = 5


def by_loops(x_BTC, weight_CRK, *, z_BTR, residual, activation, segments_BN=None, num_heads=0):
    """Compute the formula, a token and a tap at a time."""
    if num_heads:
        z_BTR, weight_CRK = as_ranks(z_BTR, weight_CRK, num_heads)
    num_taps = weight_CRK.shape[2]
    rows = []
    for t in range(x_BTC.shape[1]):
        total = torch.zeros_like(x_BTC[:, 0])
        for j in range(min(num_taps, t + 1)):
            tap_BC = z_BTR[:, t] @ weight_CRK[:, :, num_taps - 1 - j].T
            term = tap_BC * x_BTC[:, t - j]
            if segments_BN is not None:
                place = num_taps - 1 + t
                term = term * (segments_BN[:, place] == segments_BN[:, place - j])[:, None]
            total = total + term

        if activation:
            total = F.silu(total)
        if residual:
            total = x_BTC[:, t] + total
        rows.append(total)
    return torch.stack(rows, dim=1)


def as_ranks(z_BTR, weight_C1K, num_heads):
    """Return z and weight of low rank for taps of heads: a rank per head and tap, one of static."""
    num_channels, _, num_taps = weight_C1K.shape
    selected = torch.zeros(num_channels, num_heads * num_taps, num_taps, dtype=weight_C1K.dtype)
    for channel in range(num_channels):
        head = channel // (num_channels // num_heads)
        for tap in range(num_taps):
            selected[channel, head * num_taps + tap, tap] = 1.0
    return F.pad(z_BTR, (0, 1), value=1.0), torch.cat((selected, weight_C1K), dim=1)


def derived(function, inputs, dy, **options):
    """Return the output and the gradients of x, z and the weight."""
    x, z, weight = (value.detach().clone().requires_grad_() for value in inputs)
    y = function(x, weight, z_BTR=z, **options)
    return [y, *torch.autograd.grad(y, (x, z, weight), dy.to(y.dtype))]


def inputs_of(num_tokens, num_taps, dtype=torch.float64):
    """Return x, z, a weight, and a gradient of the output."""
    x_shape = (3, num_tokens, 7)
    z_shape = (3, num_tokens, RANK)
    return randoms(x_shape, z_shape, (7, RANK, num_taps), x_shape, dtype=dtype)


@pytest.mark.parametrize("backend", ["eager", "traced", "reference"])
@pytest.mark.parametrize(("num_tokens", "num_taps"), [(1, 4), (3, 4), (5, 2), (24, 4), (12, 7)])
def test_values_and_gradients_equal_the_loop(num_tokens, num_taps, backend, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: backend == "traced")
    function = partial(canon, backend="reference") if backend == "reference" else canon
    *inputs, dy = inputs_of(num_tokens, num_taps)

    for kind, every in itertools.product(KINDS, (0, 3)):
        segments = segments_of(num_tokens, num_taps - 1, every)

        computed = derived(function, inputs, dy, segments_BN=segments, **kind)

        expected = derived(by_loops, inputs, dy, segments_BN=segments, **kind)
        torch.testing.assert_close(computed, expected)


def inputs_of_heads(num_tokens, num_taps, num_heads, dtype=torch.float64):
    """Return x of 6 channels, z and a weight of taps of heads, and a gradient of the output."""
    x_shape = (3, num_tokens, 6)
    z_shape = (3, num_tokens, num_heads * num_taps)
    return randoms(x_shape, z_shape, (6, 1, num_taps), x_shape, dtype=dtype)


@pytest.mark.parametrize("backend", ["eager", "traced", "reference"])
@pytest.mark.parametrize("num_heads", [1, 2, 6])
@pytest.mark.parametrize(("num_tokens", "num_taps"), [(1, 4), (3, 4), (5, 2), (12, 7)])
def test_taps_of_heads_equal_the_loop(num_tokens, num_taps, num_heads, backend, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: backend == "traced")
    function = partial(canon, backend="reference") if backend == "reference" else canon
    *inputs, dy = inputs_of_heads(num_tokens, num_taps, num_heads)

    for kind, every in itertools.product(KINDS, (0, 3)):
        segments = segments_of(num_tokens, num_taps - 1, every)
        options = {"segments_BN": segments, "num_heads": num_heads, **kind}

        computed = derived(function, inputs, dy, **options)

        expected = derived(by_loops, inputs, dy, **options)
        torch.testing.assert_close(computed, expected)


@every_kind
@pytest.mark.parametrize("num_heads", [0, 2])
def test_bfloat16_rounds_taps_and_sums_once(kind, num_heads):
    *inputs, dy = inputs_of(129, 4, torch.bfloat16)
    if num_heads:
        *inputs, dy = inputs_of_heads(129, 4, num_heads, torch.bfloat16)
    options = kind | {"num_heads": num_heads}
    exact = derived(by_loops, [x.double() for x in inputs], dy.double(), **options)

    computed = derived(canon_dynamic, inputs, dy, **options)

    assert {tensor.dtype for tensor in computed} == {torch.bfloat16}
    for ours, true in zip(computed, exact, strict=True):
        assert (ours.double() - true).norm() < 4e-3 * true.norm()


def saved_bytes(function, inputs, **options):
    """Return the bytes that a forward pass saves for the backward pass, without its inputs."""
    x, z, weight = (value.detach().requires_grad_() for value in inputs)
    input_addresses = {value.untyped_storage().data_ptr() for value in (x, z, weight)}
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in input_addresses:
            saved[storage.data_ptr()] = storage  # kept alive: no address is used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function(x, weight, z_BTR=z, **options)
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize("num_heads", [0, 4])
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.system)])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_no_taps_are_saved_for_backward(compiles, num_heads):
    inputs = randoms((2, 64, 32), (2, 64, RANK), (32, RANK, 4), dtype=torch.float32)
    if num_heads:
        inputs = randoms((2, 64, 32), (2, 64, 4 * 4), (32, 1, 4), dtype=torch.float32)
    segments = torch.zeros(2, 67).int()
    options = {"residual": True, "activation": True, "segments_BN": segments}
    options["num_heads"] = num_heads
    function = canon_dynamic
    if compiles:
        torch.compiler.reset()
        function = torch.compile(function, backend="aot_eager_decomp_partition", fullgraph=True)

    by_kernel = saved_bytes(function, inputs, **options)
    by_formula = saved_bytes(by_loops, inputs, **options)

    x_bytes = inputs[0].nbytes
    assert by_kernel < x_bytes  # z and the weight, in other layouts
    assert by_formula > 4 * x_bytes


@pytest.mark.parametrize("backend", ["auto", "triton", "causal_conv1d", "fla"])
def test_other_backends_use_compiled(backend):
    assert resolve_backend(backend, 4, dynamic=True) == "compiled"


def test_the_reference_remains_and_checks_shapes():
    assert resolve_backend("reference", 4, dynamic=True) == "reference"

    x, z, weight, _ = inputs_of(9, 4)
    weight_of_another_rank = torch.cat((weight, weight), dim=1)
    with pytest.raises(ValueError, match="expected"):
        canon(x, weight_of_another_rank, z_BTR=z, backend="reference", **PLAIN)
