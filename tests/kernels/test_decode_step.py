"""Canon's cache: a sequence in chunks against the formula over all of it."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from canon_pretrain.kernels.backends import canon_reference
from canon_pretrain.kernels.decode_step import CanonMemory, group_steps
from canon_pretrain.model.cache import BEFORE_START, PADDING

PLAIN = {"residual": True, "activation": False}
KINDS = [{"residual": r, "activation": a} for r in (True, False) for a in (False, True)]
every_kind = pytest.mark.parametrize("kind", KINDS)
WIDTHS = [5, 2, 4]  # of the parts


def _inputs(num_tokens, width=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = (3, num_tokens, sum(WIDTHS)), (sum(WIDTHS), 1, width)
    x, weight = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return x.to(dtype), weight.to(dtype)


def _segments(num_tokens, reach, every=4):
    if not every:
        return None
    tokens = torch.arange(num_tokens)
    padded = torch.where(tokens < num_tokens // 3, PADDING, 0)
    rows = torch.stack((tokens // every, padded, torch.zeros_like(tokens))).int()
    return F.pad(rows, (reach, 0), value=BEFORE_START)


def _read(x, weight, sizes, segments=None, memory=None, start=0, **kind):
    """Return the outputs of chunks of these sizes, from token `start` on."""
    memory = memory or CanonMemory(x, weight, **kind)
    outputs = []
    for size in sizes:
        stop = start + size
        window = None if segments is None else segments[:, start : stop + weight.shape[2] - 1]
        parts = x[:, start:stop].split(WIDTHS, dim=-1)
        outputs.append(torch.cat(memory.read(parts, weight, window), dim=-1))
        start = stop
    return torch.cat(outputs, dim=1)


def _assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@every_kind
@settings(max_examples=25, deadline=None)
@example(sizes=[1] * 12, width=4, every=0)
@example(sizes=[4, 0, 4, 1, 3], width=2, every=1)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=40),
    width=st.integers(2, 4),
    every=st.integers(0, 9),
)
def test_any_chunks_of_any_documents(kind, sizes, width, every):
    num_tokens = max(1, sum(sizes))
    x, weight = _inputs(num_tokens, width)
    segments = _segments(num_tokens, width - 1, every)
    expected = canon_reference(x, weight, **kind, segments_BN=segments)[:, : sum(sizes)]
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            _assert_close(_read(x, weight, sizes, segments, **kind), expected)


def _step(memories, tokens, weights, window):
    steps = memories[0]._step
    (step,) = group_steps(memories, [steps] if steps else [])
    step.begin(window)
    sites = zip(memories, tokens, weights, strict=True)
    found = [torch.cat(memory.read(x.split(WIDTHS, -1), w, window), -1) for memory, x, w in sites]
    step.end()
    return found


@torch.no_grad()
@every_kind
@pytest.mark.parametrize(("width", "every"), [(2, 3), (3, 0), (4, 1)])
def test_sites_that_step_together_equal_one_pass(width, every, kind):
    given = [_inputs(num_tokens, width) for num_tokens in (30, 31, 32)]
    segments = _segments(30, width - 1, every)
    expected = [canon_reference(x[:, :30], w, **kind, segments_BN=segments) for x, w in given]
    memories = [CanonMemory(x, w, **kind) for x, w in given]
    weights, t = [w for _, w in given], 0
    for size in (5, *(1,) * 4, 2, -1, *(1,) * 9, 8):  # 1: together; -1: one token, site by site
        stop = t + abs(size)
        window = None if segments is None else segments[:, t : stop + width - 1]
        if size == 1:
            found = _step(memories, [x[:, t:stop] for x, _ in given], weights, window)
        else:
            pairs = zip(memories, given, strict=True)
            found = [_read(x, w, [stop - t], segments, m, t) for m, (x, w) in pairs]
        for one, whole in zip(found, expected, strict=True):
            _assert_close(one, whole[:, t:stop])
        t = stop
    assert t == 29


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_kind
def test_sums_are_float32_and_rounded_once(dtype, kind):
    x, weight = _inputs(200, dtype=dtype)
    truth = canon_reference(x.double(), weight.double(), **kind)
    theirs = (canon_reference(x, weight, **kind).double() - truth).norm()
    memory = CanonMemory(x, weight, **kind)
    steps = [_read(x, weight, [1], memory=memory)]
    steps += [_step([memory], [x[:, t : t + 1]], [weight], None)[0] for t in range(1, 200)]
    cuts = ([150] + [1] * 50, [2] * 100, [50] * 4)
    for found in (torch.cat(steps, dim=1), *(_read(x, weight, sizes, **kind) for sizes in cuts)):
        assert found.dtype == dtype
        assert (found.double() - truth).norm() <= 1.001 * theirs


@every_kind
@pytest.mark.parametrize("every", [0, 4])
def test_gradients_reach_earlier_chunks(every, kind):
    x, weight = (tensor.requires_grad_() for tensor in _inputs(9))
    segments = _segments(9, 3, every)
    dy = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    whole = canon_reference(x, weight, **kind, segments_BN=segments)
    expected = torch.autograd.grad(whole, (x, weight), dy)
    for sizes in ([1] * 9, [2, 1, 6], [5, 4]):
        found = torch.autograd.grad(_read(x, weight, sizes, segments, **kind), (x, weight), dy)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
