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
    labels[[2, -1]] = IGNORE_INDEX
    return h, weight, labels


def whole(h, weight, labels, *, z_loss=0.0, squared_loss=0.0):
    """Return the losses and the objective of whole logits, by autograd."""
    logits = h @ weight.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")

    added = torch.zeros_like(losses)
    if squared_loss:
        added = squared_loss * losses.square()
    if z_loss:
        z = losses + logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        added = added + z_loss * z.square() * (labels != IGNORE_INDEX)
    return losses.detach(), (losses + added).sum()


def grads_of(objective, *leaves, scale=1.0):
    return torch.autograd.grad(objective * scale, leaves)


@every_term
@pytest.mark.parametrize("chunk_tokens", [4096, 6, 5, 1])
def test_derivatives_in_float64(terms, chunk_tokens):
    h, weight, labels = problem(torch.float64)
    chunked = functools.partial(linear_cross_entropy, chunk_tokens=chunk_tokens, **terms)
    expected_losses, expected_objective = whole(h, weight, labels, **terms)

    losses, objective = chunked(h, weight, labels)
    with torch.no_grad():
        without_graph = chunked(h, weight, labels)

    assert torch.autograd.gradcheck(lambda h, w: chunked(h, w, labels)[1], (h, weight))
    assert not losses.requires_grad
    assert not losses[[2, -1]].any()
    expected = (expected_losses, expected_objective)
    torch.testing.assert_close((losses, objective), expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(without_graph, expected, rtol=1e-13, atol=1e-13)
    grads = grads_of(objective, h, weight, scale=0.3)
    expected_grads = grads_of(expected_objective, h, weight, scale=0.3)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-12, atol=1e-12)
    assert not grads[0][[2, -1]].any()


def _losses_and_grads(function, h, weight, labels):
    """Return the losses and the gradients; the scale, no power of two, must add no rounding."""
    losses, objective = function(h, weight, labels)
    return losses, *grads_of(objective, h, weight, scale=1 / 48)


def _assert_errors_equal_those_of_whole_logits(
    h, weight, labels, *, terms, chunk_tokens, compile_backend=None
):
    by_chunks = functools.partial(
        linear_cross_entropy,
        chunk_tokens=chunk_tokens,
        compile_backend=compile_backend,
        **terms,
    )
    by_logits = functools.partial(whole, **terms)
    exact_h = h.detach().double().requires_grad_()
    exact_weight = weight.detach().double().requires_grad_()

    truth = _losses_and_grads(by_logits, exact_h, exact_weight, labels)
    chunked = _losses_and_grads(by_chunks, h, weight, labels)
    repeated = _losses_and_grads(by_chunks, h, weight, labels)
    plain = _losses_and_grads(by_logits, h, weight, labels)

    if h.dtype == torch.float32:
        tolerance = 2.0
    else:
        tolerance = 1.05 if h.is_cuda else 1.02
    for ours, again, theirs, true in zip(chunked, repeated, plain, truth, strict=True):
        assert torch.equal(ours, again)
        assert ours.dtype == (torch.float32 if ours.ndim < 2 else h.dtype)
        assert (ours.double() - true).norm() <= tolerance * (theirs.double() - true).norm()


@every_term
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_tokens", [4096, 32])
def test_low_precision_errors_equal_those_of_whole_logits(terms, dtype, chunk_tokens):
    h, weight, labels = problem(dtype, num_tokens=256, dim=64, vocab=500, spread=0.2)
    _assert_errors_equal_those_of_whole_logits(
        h, weight, labels, terms=terms, chunk_tokens=chunk_tokens
    )


@pytest.mark.gpu
@every_term
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("compile_backend", [None, "inductor"])
def test_sums_of_halves_are_float32_on_a_gpu(terms, dtype, compile_backend):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    h, weight, labels = problem(dtype, num_tokens=4096, dim=256, vocab=8192, spread=0.1)
    _assert_errors_equal_those_of_whole_logits(
        h.detach().cuda().requires_grad_(),
        weight.detach().cuda().requires_grad_(),
        labels.cuda(),
        terms=terms,
        chunk_tokens=1024,
        compile_backend=compile_backend,
    )


@pytest.mark.parametrize("has_grad", [False, True])
def test_a_loss_whose_square_overflows_is_finite(has_grad):
    h, weight, labels = problem(torch.float32)
    h = (h.detach() * 1e22).requires_grad_()
    expected_losses, expected_objective = whole(h, weight, labels)
    assert expected_objective.isfinite()

    with torch.set_grad_enabled(has_grad):
        losses, objective = linear_cross_entropy(h, weight, labels, chunk_tokens=5)

    torch.testing.assert_close((losses, objective), (expected_losses, expected_objective))
    if has_grad:
        for grad in grads_of(objective, h, weight):
            assert grad.isfinite().all()


def _assert_compiled_equals(compiled, plain):
    """The values and gradients of the compiled loss are those of the plain one."""
    h, weight, labels = problem(torch.float32, num_tokens=40)
    losses, objective = compiled(h, weight, labels)
    expected_losses, expected_objective = plain(h, weight, labels)
    torch.testing.assert_close((losses, objective), (expected_losses, expected_objective))
    expected_grads = grads_of(expected_objective, h, weight)
    torch.testing.assert_close(grads_of(objective, h, weight), expected_grads)


# from torch, tracing an autograd function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.system
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@every_term
def test_it_compiles_by_itself(terms, backend):
    torch._dynamo.reset()
    plain = functools.partial(linear_cross_entropy, chunk_tokens=10, **terms)
    _assert_compiled_equals(functools.partial(plain, compile_backend=backend), plain)


# from torch, tracing an autograd function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.system
@pytest.mark.parametrize("chunk_tokens", [5, 0])
@every_term
def test_it_compiles_in_a_caller(terms, chunk_tokens):
    torch._dynamo.reset()
    loss = head_loss(Loss(**terms, chunk_tokens=chunk_tokens))
    _assert_compiled_equals(torch.compile(loss, backend="aot_eager", fullgraph=True), loss)


class LargestTensor(TorchDispatchMode):
    """Keep the bytes of the largest tensor that an operator returns."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self.size = max(self.size, value.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("chunk_tokens", [128, 0], ids=["chunks", "whole"])
def test_logits_exist_for_one_chunk_at_a_time(chunk_tokens):
    num_tokens = 2048
    vocab = 32_000
    h, weight, labels = problem(torch.float32, num_tokens, dim=16, vocab=vocab)

    with LargestTensor() as largest:
        _, objective = head_loss(Loss(chunk_tokens=chunk_tokens))(h, weight, labels)
        objective.backward()

    bytes_per_logit = 4
    assert largest.size == (chunk_tokens or num_tokens) * vocab * bytes_per_logit
