"""The chunked loss against autograd of whole logits."""

import functools

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from canon_pretrain.kernels.linear_cross_entropy import IGNORE_INDEX, linear_cross_entropy
from canon_pretrain.run.sections import Loss
from canon_pretrain.titan.spec import head_loss

TERMS = [{}, {"z_loss": 0.03}, {"squared_loss": 0.05}, {"z_loss": 0.03, "squared_loss": 0.05}]
every_term = pytest.mark.parametrize("terms", TERMS, ids=str)


def problem(dtype, num_tokens=12, dim=7, vocab=19, spread=1.0):
    """Return h_ND, weight_VD and labels_N, two of them ignored."""
    generator = torch.Generator().manual_seed(3)
    h = torch.randn(num_tokens, dim, generator=generator).to(dtype).requires_grad_()
    weight = (spread * torch.randn(vocab, dim, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(vocab, (num_tokens,), generator=generator)
    labels[2] = labels[-1] = IGNORE_INDEX
    return h, weight, labels


def whole(h, weight, labels, *, z_loss=0.0, squared_loss=0.0):
    logits = h @ weight.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    each = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    added = squared_loss * each.square() if squared_loss else torch.zeros_like(each)
    if z_loss:
        z = each + logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        added = added + z_loss * z.square() * (labels != IGNORE_INDEX)
    return each.detach(), (each + added).sum()


def grads_of(objective, *leaves, scale=1.0):
    return torch.autograd.grad(objective * scale, leaves)


@every_term
@pytest.mark.parametrize("chunk_tokens", [4096, 6, 5, 1])
def test_derivatives_in_float64(terms, chunk_tokens):
    h, weight, labels = problem(torch.float64)
    loss = functools.partial(linear_cross_entropy, chunk_tokens=chunk_tokens, **terms)
    assert torch.autograd.gradcheck(lambda h, w: loss(h, w, labels)[1], (h, weight))
    found, expected = loss(h, weight, labels), whole(h, weight, labels, **terms)
    assert not found[0].requires_grad and not found[0][[2, -1]].any()
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    with torch.no_grad():
        torch.testing.assert_close(loss(h, weight, labels), expected, rtol=1e-13, atol=1e-13)
    grads = [grads_of(each[1], h, weight, scale=0.3) for each in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
    assert not grads[0][0][[2, -1]].any()


def _assert_errors_equal_those_of_whole_logits(given, terms, chunk_tokens, **how):
    """The factor of a step, which is no power of two, must not add a rounding."""
    *inputs, labels = given
    exact = [part.detach().double().requires_grad_() for part in inputs]
    truth, *computed = (
        (loss[0], *grads_of(loss[1], *leaves, scale=1 / 48))
        for loss, leaves in (
            (whole(*exact, labels, **terms), exact),
            (linear_cross_entropy(*given, chunk_tokens=chunk_tokens, **terms, **how), inputs),
            (linear_cross_entropy(*given, chunk_tokens=chunk_tokens, **terms, **how), inputs),
            (whole(*given, **terms), inputs),
        )
    )
    dtype = inputs[0].dtype
    tolerance = 2 if dtype == torch.float32 else 1.05 if inputs[0].is_cuda else 1.02
    for ours, again, plain, true in zip(*computed, truth, strict=True):
        assert torch.equal(ours, again)
        assert ours.dtype == (torch.float32 if ours.ndim < 2 else dtype)
        errors = [(each.double() - true).norm() for each in (ours, plain)]
        assert errors[0] <= tolerance * errors[1]


@every_term
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_tokens", [4096, 32])
def test_low_precision_errors_equal_those_of_whole_logits(terms, dtype, chunk_tokens):
    given = problem(dtype, num_tokens=256, dim=64, vocab=500, spread=0.2)
    _assert_errors_equal_those_of_whole_logits(given, terms, chunk_tokens)


@pytest.mark.gpu
@every_term
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("compile_backend", [None, "inductor"])
def test_sums_of_halves_are_float32_on_a_gpu(terms, dtype, compile_backend):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    own = problem(dtype, num_tokens=4096, dim=256, vocab=8192, spread=0.1)
    given = [part.detach().cuda().requires_grad_(part.requires_grad) for part in own]
    how = {"compile_backend": compile_backend}
    _assert_errors_equal_those_of_whole_logits(given, terms, 1024, **how)


def test_a_loss_whose_square_overflows_is_finite():
    h, weight, labels = problem(torch.float32)
    h = (h.detach() * 1e22).requires_grad_()
    expected = whole(h, weight, labels)
    assert expected[1].isfinite()
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            found = linear_cross_entropy(h, weight, labels, chunk_tokens=5)
        torch.testing.assert_close(found, expected)
    for grad in grads_of(found[1], h, weight):
        assert grad.isfinite().all()


# from torch, tracing an autograd function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.system
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@every_term
def test_it_compiles_by_itself_and_in_a_caller(terms, backend):
    h, weight, labels = problem(torch.float32, num_tokens=40)
    torch._dynamo.reset()
    inner = functools.partial(linear_cross_entropy, chunk_tokens=10, **terms)
    pairs = [(functools.partial(inner, compile_backend=backend), inner)]
    if backend == "aot_eager":
        losses = [head_loss(Loss(**terms, chunk_tokens=chunk)) for chunk in (5, 0)]
        pairs += [(torch.compile(f, backend=backend, fullgraph=True), f) for f in losses]
    for compiled, plain in pairs:
        found, expected = compiled(h, weight, labels), plain(h, weight, labels)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(grads_of(found[1], h, weight), grads_of(expected[1], h, weight))


class LargestTensor(TorchDispatchMode):
    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore
        out = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.size = max(self.size, *sizes) if sizes else self.size
        return out


def test_logits_exist_for_one_chunk_at_a_time():
    num_tokens, dim, vocab, chunk = 2048, 16, 32_000, 128
    sizes = []
    for chunk_tokens in (chunk, 0):
        h, weight, labels = problem(torch.float32, num_tokens, dim, vocab)
        with LargestTensor() as largest:
            _, objective = head_loss(Loss(chunk_tokens=chunk_tokens))(h, weight, labels)
            objective.backward()
        sizes.append(largest.size)
    assert sizes == [chunk * vocab * 4, num_tokens * vocab * 4]
