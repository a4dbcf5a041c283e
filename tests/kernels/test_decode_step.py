"""Canon's cache: a sequence in chunks against the formula over all of it."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from canon_pretrain.kernels.backends import canon_reference
from canon_pretrain.kernels.decode_step import CanonMemory, group_steps
from tests.canon_inputs import every_kind, randoms, segments_of

WIDTHS = [5, 2, 4]  # of the parts


def _inputs(num_tokens, width=4, dtype=torch.float64):
    shapes = (3, num_tokens, sum(WIDTHS)), (sum(WIDTHS), 1, width)
    return randoms(*shapes, dtype=dtype, seed=num_tokens)


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
    leaves = [value.requires_grad_() for value in _inputs(num_tokens, width)]
    segments = segments_of(num_tokens, width - 1, every)
    expected = canon_reference(*leaves, **kind, segments_BN=segments)[:, : sum(sizes)]
    with torch.no_grad():
        _assert_close(_read(*leaves, sizes, segments, **kind), expected)
    found = _read(*leaves, sizes, segments, **kind)
    _assert_close(found, expected)
    if sum(sizes):
        (dy,) = randoms(found.shape, seed=1)
        grads = [torch.autograd.grad(y, leaves, dy) for y in (found, expected)]
        torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-11)


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
    segments = segments_of(30, width - 1, every)
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
