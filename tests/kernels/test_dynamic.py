"""Dynamic filters against a loop over tokens and taps in float64: values, gradients, memory."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from canon_pretrain.kernels.backends import canon, resolve_backend
from canon_pretrain.kernels.dynamic import canon_dynamic
from tests.canon_inputs import KINDS, PLAIN, every_kind, randoms, segments_of

RANK = 5


def by_loops(x_BTC, weight_CRK, *, z_BTR, residual, activation, segments_BN=None):
    """The formula, a token and a tap at a time."""
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
        total = F.silu(total) if activation else total
        rows.append(x_BTC[:, t] + total if residual else total)
    return torch.stack(rows, dim=1)


def derived(function, inputs, dy, **options):
    x, z, weight = leaves = [v.detach().clone().requires_grad_() for v in inputs]
    y = function(x, weight, z_BTR=z, **options)
    return [y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def inputs_of(num_tokens, num_taps, dtype=torch.float64):
    shapes = (3, num_tokens, 7), (3, num_tokens, RANK), (7, RANK, num_taps)
    return randoms(*shapes, shapes[0], dtype=dtype)


@pytest.mark.parametrize("backend", ["eager", "traced", "reference"])
@pytest.mark.parametrize(("num_tokens", "num_taps"), [(1, 4), (3, 4), (5, 2), (24, 4), (12, 7)])
def test_values_and_gradients_equal_the_loop(num_tokens, num_taps, backend, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: backend == "traced")
    *inputs, dy = inputs_of(num_tokens, num_taps)
    for kind, every in itertools.product(KINDS, (0, 3)):
        options = kind | {"segments_BN": segments_of(num_tokens, num_taps - 1, every)}
        expected = derived(by_loops, inputs, dy, **options)
        own = {"backend": "reference"} if backend == "reference" else {}
        torch.testing.assert_close(derived(canon, inputs, dy, **options, **own), expected)


@every_kind
def test_bfloat16_rounds_taps_and_sums_once(kind):
    *inputs, dy = inputs_of(129, 4, torch.bfloat16)
    found = derived(canon_dynamic, inputs, dy, **kind)
    assert {tensor.dtype for tensor in found} == {torch.bfloat16}
    exact = derived(by_loops, [x.double() for x in inputs], dy.double(), **kind)
    for one, other in zip(found, exact, strict=True):
        assert (one.double() - other).norm() < 4e-3 * other.norm()


def saved_bytes(function, inputs, **options):
    x, z, weight = (v.detach().requires_grad_() for v in inputs)
    own, saved = {v.untyped_storage().data_ptr() for v in (x, z, weight)}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage  # kept alive: no address is used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function(x, weight, z_BTR=z, **options)
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.system)])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_no_taps_are_saved_for_backward(compiles):
    inputs = randoms((2, 64, 32), (2, 64, RANK), (32, RANK, 4), dtype=torch.float32)
    options = {"residual": True, "activation": True, "segments_BN": torch.zeros(2, 67).int()}
    function = canon_dynamic
    if compiles:
        torch.compiler.reset()
        function = torch.compile(function, backend="aot_eager_decomp_partition", fullgraph=True)
    # z and the weight, in other layouts
    assert saved_bytes(function, inputs, **options) < inputs[0].nbytes
    assert saved_bytes(by_loops, inputs, **options) > 4 * inputs[0].nbytes


def test_other_backends_use_compiled():
    for backend in ("auto", "triton", "causal_conv1d", "fla"):
        assert resolve_backend(backend, 4, dynamic=True) == "compiled"
    assert resolve_backend("reference", 4, dynamic=True) == "reference"
    x, z, weight, dy = inputs_of(9, 4)
    wrong = torch.cat((weight, weight), dim=1)
    with pytest.raises(ValueError, match="expected"):
        canon(x, wrong, z_BTR=z, backend="reference", **PLAIN)
