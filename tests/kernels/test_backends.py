"""The reference against independent formulas; the choice of a backend; Canon's cache."""

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from canon_pretrain.kernels import backends
from canon_pretrain.kernels.backends import canon, canon_gate, canon_reference
from canon_pretrain.kernels.decode_step import CanonMemory, group_steps
from canon_pretrain.model.transformer import Transformer
from tests.canon_inputs import PLAIN, every_kind, randoms, segments_of
from tests.reference_model import canon_by_loops
from tests.support import refused
from tests.variants import variant

assert_close_float64 = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_taps", [2, 3, 4])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 9])
def test_the_reference_equals_loops_and_conv1d(num_tokens, num_taps):
    x, weight = randoms((2, num_tokens, 5), (5, 1, num_taps))
    convolved = F.conv1d(F.pad(x.transpose(1, 2), (num_taps - 1, 0)), weight, groups=5)
    convolved = convolved.transpose(1, 2)

    for residual, activation in itertools.product((True, False), repeat=2):
        y = canon_reference(x, weight, residual=residual, activation=activation)

        cfg = SimpleNamespace(canon_residual=residual, canon_activation=activation)
        assert_close_float64(y, canon_by_loops(x, weight, cfg))
        by_conv1d = F.silu(convolved) if activation else convolved
        assert_close_float64(y, by_conv1d + residual * x)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_bfloat16_is_summed_in_float32(weight_dtype):
    x, weight = randoms((2, 9, 5), (5, 1, 4), dtype=torch.bfloat16)
    exact = canon_reference(x.float(), weight.float(), **PLAIN)

    y = canon_reference(x, weight.to(weight_dtype), **PLAIN)

    # rounded once, at the end
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, exact.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("x_shape", "weight_shape"),
    [((2, 3, 4), (5, 1, 4)), ((3, 4), (4, 1, 4)), ((2, 3, 4), (4, 4))],
    ids=["other channels", "no rows", "flat weight"],
)
def test_bad_shapes_are_refused(x_shape, weight_shape):
    with pytest.raises(ValueError, match="expected"):
        canon_reference(torch.zeros(x_shape), torch.zeros(weight_shape), **PLAIN)


def test_unavailable_backends_are_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with refused("canon.unavailable", backend="triton"):
        backends.check_canon_backend("triton", "cpu")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for backend in ("triton", "causal_conv1d", "fla"):
        with refused("canon.unavailable", backend=backend):
            Transformer(variant("nope ABCD"), canon_backend=backend)
    with refused("config.unknown_choice", name="canon_backend"):
        Transformer(variant("nope ABCD"), canon_backend="tritan")


@pytest.mark.parametrize(
    ("device", "dtype", "interpret", "reason"),
    [
        ("cpu", torch.float32, "0", "TRITON_INTERPRET=1"),
        ("cpu", torch.float32, "1", "None"),
        ("cpu", torch.float64, "1", "float64"),
        ("mps", torch.float32, "0", '"mps"'),
        ("cuda", torch.bfloat16, "0", "CUDA"),
    ],
    ids=["cpu", "interpreter", "float64", "mps", "no cuda"],
)
def test_why_triton_is_unavailable(device, dtype, interpret, reason, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", interpret)

    assert reason in str(backends.backend_problem("triton", device, dtype))


@pytest.mark.parametrize("backend", ["compiled", "causal_conv1d", "fla", "triton"])
def test_backends_fall_back_to_compiled(monkeypatch, backend):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    gate, up, weight = randoms((2, 9, 8), (2, 9, 8), (16, 1, 4))

    y = canon(gate, weight[:8], **PLAIN, backend=backend)
    expected = canon(gate, weight[:8], **PLAIN, backend="reference")
    torch.testing.assert_close(y, expected)

    for relu2 in (False, True):
        y = canon_gate(gate, up, weight, **PLAIN, relu2=relu2, backend=backend)
        expected = canon_gate(gate, up, weight, **PLAIN, relu2=relu2, backend="reference")
        torch.testing.assert_close(y, expected)


# ---- a sequence in chunks against the formula over all of it

WIDTHS = [5, 2, 4]  # of the parts


def _inputs(num_tokens, width=4, dtype=torch.float64):
    """Return x [3, T, C] and a weight of `width` taps; C channels in parts of WIDTHS."""
    channels = sum(WIDTHS)
    return randoms((3, num_tokens, channels), (channels, 1, width), dtype=dtype, seed=num_tokens)


def _read(x, weight, sizes, segments=None, memory=None, start=0, **kind):
    """Return the outputs of chunks of these sizes, from token `start` on."""
    memory = memory or CanonMemory(x, weight, **kind)
    outputs = []
    for size in sizes:
        stop = start + size
        window = None if segments is None else segments[:, start : stop + weight.shape[2] - 1]
        parts = x[:, start:stop].split(WIDTHS, dim=-1)
        outputs.append(torch.cat(memory.read(parts, lambda: weight, window), dim=-1))
        start = stop
    return torch.cat(outputs, dim=1)


@every_kind
@settings(max_examples=20, deadline=None)
@example(sizes=[1] * 12, width=4, every=0)
@example(sizes=[4, 0, 4, 1, 3], width=2, every=1)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=20),
    width=st.integers(2, 4),
    every=st.integers(0, 9),
)
def test_any_chunks_of_any_documents(kind, sizes, width, every):
    num_tokens = max(1, sum(sizes))
    x, weight = _inputs(num_tokens, width)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    segments = segments_of(num_tokens, width - 1, every)
    expected = canon_reference(*leaves, **kind, segments_BN=segments)[:, : sum(sizes)]

    with torch.no_grad():
        without_graph = _read(*leaves, sizes, segments, **kind)
    y = _read(*leaves, sizes, segments, **kind)

    assert_close_float64(without_graph, expected)
    assert_close_float64(y, expected)
    if sum(sizes):
        (dy,) = randoms(y.shape, seed=1)
        grads = torch.autograd.grad(y, leaves, dy)
        expected_grads = torch.autograd.grad(expected, leaves, dy)
        torch.testing.assert_close(grads, expected_grads, rtol=1e-11, atol=1e-11)


def _step(memories, tokens, weights, window):
    """Read one token at each site, in one step of them all; return the outputs by site."""
    known_step = memories[0]._step
    (step,) = group_steps(memories, [known_step] if known_step else [])
    step.begin(window)
    outputs = []
    for memory, x, weight in zip(memories, tokens, weights, strict=True):
        parts = memory.read(x.split(WIDTHS, -1), lambda weight=weight: weight, window)
        outputs.append(torch.cat(parts, -1))
    step.end()
    return outputs


@torch.no_grad()
@every_kind
@pytest.mark.parametrize(("width", "every"), [(2, 3), (3, 0), (4, 1)])
def test_sites_that_step_together_equal_one_pass(width, every, kind):
    sites = [_inputs(num_tokens, width) for num_tokens in (30, 31, 32)]
    weights = [weight for _, weight in sites]
    segments = segments_of(30, width - 1, every)
    expected = [canon_reference(x[:, :30], w, **kind, segments_BN=segments) for x, w in sites]
    memories = [CanonMemory(x, weight, **kind) for x, weight in sites]

    t = 0
    for size in (5, *(1,) * 4, 2, -1, *(1,) * 9, 8):  # 1: together; -1: one token, site by site
        stop = t + abs(size)
        if size == 1:
            window = None if segments is None else segments[:, t : stop + width - 1]
            outputs = _step(memories, [x[:, t:stop] for x, _ in sites], weights, window)
        else:
            outputs = [
                _read(x, weight, [stop - t], segments, memory, t)
                for memory, (x, weight) in zip(memories, sites, strict=True)
            ]

        for output, whole in zip(outputs, expected, strict=True):
            assert_close_float64(output, whole[:, t:stop])
        t = stop
    assert t == 29


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_kind
def test_sums_are_float32_and_rounded_once(dtype, kind):
    x, weight = _inputs(200, dtype=dtype)
    truth = canon_reference(x.double(), weight.double(), **kind)
    reference_error = (canon_reference(x, weight, **kind).double() - truth).norm()

    # The first token alone, then steps of one token; the other readings are in chunks.
    memory = CanonMemory(x, weight, **kind)
    steps = [_read(x, weight, [1], memory=memory)]
    for t in range(1, 200):
        steps += _step([memory], [x[:, t : t + 1]], [weight], None)
    outputs = [torch.cat(steps, dim=1)]
    for sizes in ([150] + [1] * 50, [2] * 100, [50] * 4):
        outputs.append(_read(x, weight, sizes, **kind))

    for output in outputs:
        assert output.dtype == dtype
        assert (output.double() - truth).norm() <= 1.001 * reference_error
