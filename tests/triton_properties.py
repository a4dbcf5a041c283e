"""What holds for the operators of `kernels/triton/` whatever their numbers; see triton_cases.py."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

from canon_pretrain.kernels.reference import canon_reference

DEVICE = "cpu"


def face() -> Any:
    return importlib.import_module("canon_pretrain.kernels.triton.fused")


def norm_canon(h: Tensor, gain: Tensor, weight: Tensor, **options: Any) -> Any:
    """Canon(RMSNorm(h)) by one kernel."""
    return face().canon_triton(h, weight, gain=gain, norm="full", eps=1e-5, **options)


def random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(shape).uniform_(-1, 1, generator=generator).to(DEVICE).requires_grad_()


def all_sites() -> Callable[..., Tensor]:
    """The four functions one after the other; what imports them is no part of a graph."""
    return functools.partial(_sites, face())


def _sites(
    fused: Any, h: Tensor, gain: Tensor, weights: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """h [B, T, 8], weights [8, 1, 4]."""
    options = {"residual": True, "activation": False}
    h, x, *xs = fused.norm_canon_stream_triton(
        h, gain, weights, eps=1e-5, added_BTD=h.sin(), readers=3, **options
    )
    q, k, v = fused.canon_qkv_triton(
        x, xs[0][..., :4], xs[1][..., 4:], torch.cat((weights,) * 2), head_dim=4,
        qk_norm="per_head",
        q_gain=gain[:4], k_gain=gain[4:], eps=1e-5, cos_TR=cos, sin_TR=sin, rope_share=1, **options,
    )  # fmt: skip
    up = fused.canon_triton((q.flatten(2) * torch.cat((k, v), 2).flatten(2)), weights, **options)
    both = torch.cat((weights, weights))
    inner: Tensor = fused.canon_gate_triton(x, up, both, relu2=False, **options)
    return h + inner


def sites_inputs() -> list[Tensor]:
    from canon_pretrain.model.positions import rope_tables

    cos, sin = rope_tables(3, 4, 100.0)
    inputs = [random(1, 3, 8, seed=1), random(8, seed=2), random(8, 1, 4, seed=3)]
    return [*inputs, cos.to(DEVICE), sin.to(DEVICE)]


def gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    y = function(*inputs)
    dy = random(*y.shape, seed=5).detach().to(y.dtype)
    return y.detach(), *torch.autograd.grad(y, inputs[:3], dy)


def assert_equal(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)


def the_streams_gradient_is_added() -> None:
    """Both ways out of h, in float64 and with the norm alone, whose path stays as it is."""
    fused = face()
    inputs = [random(2, 5, 8, seed=1), random(8, seed=2), random(8, 1, 4, seed=3)]
    kind = {"residual": True, "activation": False}
    options = {"eps": 1e-5, **kind}

    def run(h: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
        h, y = fused.norm_canon_stream_triton(h, gain, weight, **options)
        return h.sin() + y

    def exact(h: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
        x = torch.nn.functional.rms_norm(h, (8,), gain, 1e-5)
        return h.sin() + canon_reference(x, weight, residual=True, activation=False)

    want = gradients(exact, [x.detach().double().requires_grad_() for x in inputs])
    for ours, truth in zip(gradients(run, inputs), want, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-6)
    alone = gradients(lambda *a: fused.norm_canon_stream_triton(*a, **options)[1], inputs)
    assert_equal(alone, gradients(lambda *a: norm_canon(*a, **kind), inputs))


def additions_beside_the_norm_are_the_streams() -> None:
    """What is added to h is added as PyTorch does; y's readers get gradients that are summed."""
    _check_additions(8, 37, activation=False)
    _check_additions(2050, 4, activation=True)  # too wide for three gradients in one kernel
    _check_additions(2050, 4, activation=False)


def _check_additions(width: int, num_tokens: int, *, activation: bool) -> None:
    fused = face()
    inputs = [random(2, num_tokens, width, seed=1), random(width, seed=2)]
    inputs.append(random(width, 1, 4, seed=3))
    segments = torch.arange(3 + num_tokens, device=DEVICE, dtype=torch.int32) // 5
    options: dict[str, Any] = {"residual": True, "activation": activation}
    options["segments_BN"] = segments.expand(2, -1)
    scales = [random(num_tokens, width, seed=i).detach() for i in (4, 5, 6)]

    def run(h: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
        h, *ys = fused.norm_canon_stream_triton(
            h, gain, weight, eps=1e-5, added_BTD=h.sin(), readers=3, **options
        )
        return together(h, ys)

    def apart(h: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
        h = h + h.sin()
        return together(h, [norm_canon(h, gain, weight, **options)] * 3)

    def exact(h: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
        h = h + h.sin()
        x = torch.nn.functional.rms_norm(h, (width,), gain, 1e-5)
        return together(h, [canon_reference(x, weight, **options)] * 3)

    def together(h: Tensor, ys: list[Tensor]) -> Tensor:
        a, b, c = (y * scale.to(h.dtype) for y, scale in zip(ys, scales, strict=True))
        return h.cos() + a + b + c

    doubles = [x.detach().double().requires_grad_() for x in inputs]
    for ours, truth in zip(gradients(run, inputs), gradients(exact, doubles), strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5)
    assert torch.equal(gradients(run, inputs)[0], gradients(apart, inputs)[0])
    if DEVICE != "cpu":  # the interpreter cuts a bfloat16 off
        halves = [x.detach().bfloat16().requires_grad_() for x in inputs]
        assert torch.equal(gradients(run, halves)[0], gradients(apart, halves)[0])


def gradients_repeat_bit_by_bit() -> None:
    """Two runs, over several programs along the tokens."""
    inputs = [random(2, 35, 8, seed=1), random(8, seed=2), random(8, 1, 4, seed=3)]

    def run(h: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = norm_canon(h, gain, weight, residual=True, activation=False)
        return y

    assert_equal(gradients(run, inputs), gradients(run, inputs))


def only_the_inputs_are_kept() -> None:
    """Saved for backward: the inputs themselves, and one float32 number a token of a norm."""
    h, gate, up = (random(2, 4, 8, seed=i) for i in range(3))
    weight, gain = random(8, 1, 4, seed=4), random(8, seed=5)
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    options = {"residual": True, "activation": False}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        norm_canon(h, gain, weight, **options)
        weights = torch.cat((weight, weight)).detach().requires_grad_()
        face().canon_gate_triton(gate, up, weights, relu2=False, **options)
    own = {x.data_ptr() for x in (h, gate, up, weight, gain, weights)}
    others = [x for x in saved if x.data_ptr() not in own]
    assert [(tuple(x.shape), x.dtype) for x in others] == [((2, 4), torch.float32)]
    assert len(saved) == 7, len(saved)


def what_needs_no_gradient_gets_none() -> None:
    """A frozen weight (cst-Canon) costs no sums, and a frozen input gets nothing."""
    x, weight = random(1, 5, 8, seed=1), random(8, 1, 4, seed=2)
    options = {"residual": True, "activation": False}
    want = gradients(lambda x, w, _: face().canon_triton(x, w, **options) + 0 * _.sum(), [
        x, weight, random(1, seed=3),
    ])  # fmt: skip
    dy = random(1, 5, 8, seed=5).detach()
    for inputs, index in (((x, weight.detach()), 0), ((x.detach(), weight), 1)):
        y = face().canon_triton(*inputs, **options)
        (gradient,) = torch.autograd.grad(y, [inputs[index]], dy)
        assert torch.equal(gradient, want[1 + index])


def any_strides_are_taken() -> None:
    """Transposed, sliced and expanded tensors give what their contiguous copies give."""
    x = random(8, 5, 2, seed=1).transpose(0, 2)
    weight = random(8, 1, 5, seed=2)[..., 1:]
    gain = random(16, seed=3)[::2]
    dy = torch.ones(1, 1, 8, device=DEVICE).expand(2, 5, 8)
    results = []
    for copy in (False, True):
        inputs = [v.detach().contiguous() if copy else v.detach() for v in (x, gain, weight)]
        for value in inputs:
            value.requires_grad_()
        y = norm_canon(*inputs, residual=True, activation=True)
        gradient = dy.contiguous() if copy else dy
        results.append((y, *torch.autograd.grad(y, inputs, gradient)))
    assert_equal(*results)


def nothing_leaks_out_of_a_document() -> None:
    """NaN and inf in one document leave the values and gradients of the others as they are."""
    segments = torch.tensor([[-2, -2, -2, 0, 0, 0, 1, 1, 2, 2]], dtype=torch.int32, device=DEVICE)
    clean = random(1, 7, 8, seed=1).detach()
    dirty = clean.clone()
    dirty[:, 3], dirty[:, 4] = torch.nan, torch.inf
    gain, weight = random(8, seed=2), random(8, 1, 4, seed=3)
    options = {"residual": True, "activation": True, "segments_BN": segments}
    functions = (
        lambda x: face().canon_triton(x, weight, **options),
        lambda x: norm_canon(x, gain, weight, **options),
        lambda x: face().canon_gate_triton(
            x, x, torch.cat((weight, weight)), relu2=False, **options
        ),
    )
    others = [0, 1, 2, 5, 6]
    for function in functions:
        values = []
        for x in (clean, dirty):
            x = x.clone().requires_grad_()
            with numpy.errstate(invalid="ignore"):  # the interpreter's
                y = function(x)
                (dx,) = torch.autograd.grad(y.sum(), x)
            values.append((y[:, others], dx[:, others]))
        assert values[1][0].isfinite().all() and not y.isfinite().all()
        assert_equal(*values)


def empty_inputs_give_empty_outputs() -> None:
    """No rows: nothing is launched."""
    weight = random(8, 1, 4, seed=1)
    x = torch.empty(0, 5, 8, device=DEVICE, requires_grad=True)
    y = face().canon_triton(x, weight, residual=True, activation=False)
    dx, dweight = torch.autograd.grad(y.sum(), [x, weight])
    assert y.shape == dx.shape == x.shape
    assert torch.equal(dweight, torch.zeros_like(weight))


def wrong_shapes_are_refused() -> None:
    """Before a kernel reads past an end."""
    x, weight = random(1, 5, 8, seed=1), random(8, 1, 4, seed=2)
    options = {"residual": True, "activation": False}
    short = torch.zeros(1, 5, dtype=torch.int32, device=DEVICE)
    fused = face()
    for call in (
        lambda: fused.canon_triton(x, weight[:7], **options),
        lambda: fused.canon_triton(x, weight.expand(8, 1, 4)[..., :1], **options),
        lambda: fused.canon_triton(x, weight, segments_BN=short, **options),
        lambda: norm_canon(x, x[0, 0, :7], weight, **options),
        lambda: fused.canon_gate_triton(x, x[:, :4], weight, relu2=False, **options),
    ):
        try:
            call()
        except ValueError as error:
            assert "(" in str(error)
        else:
            raise AssertionError("not refused")


def too_wide_a_row_takes_the_norm_of_pytorch() -> None:
    """The same values, where a program can't hold a row."""
    fused, inputs = face(), sites_inputs()[:3]
    options = {"eps": 1e-5, "residual": True, "activation": False}

    def norm(h: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
        return h * norm_canon(h, gain, weight, residual=True, activation=False)

    def stream(h: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
        h, y = fused.norm_canon_stream_triton(h, gain, weight, **options)
        return h * y

    def heads(h: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
        q, k, v = fused.canon_qkv_triton(
            h, h, h, torch.cat((weight,) * 3), head_dim=4, qk_norm="full", q_gain=gain, k_gain=gain,
            **options,
        )  # fmt: skip
        return q * k * v

    most = fused.MAX_ROW
    for function in (norm, stream, heads):
        want = gradients(function, inputs)
        fused.MAX_ROW = 4
        try:
            got = gradients(function, inputs)
        finally:
            fused.MAX_ROW = most
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def blocks_follow_from_the_shape() -> None:
    """All tokens are in a run, and none is longer than 32 bits count."""
    blocks = importlib.import_module("canon_pretrain.kernels.triton.blocks")
    for kind in ("forward", "backward", "gate forward", "gate backward", "whole row"):
        for shape in ((1, 1, 1), (6, 4096, 2048), (1, 2**24, 2304), (512, 300, 5504)):
            chosen = blocks.choose_blocks(kind, *shape)
            assert chosen.warps in (1, 2, 4, 8, 16)
            assert 16 <= chosen.run and chosen.run * shape[2] < 2**31
            assert chosen.block >= shape[2] if kind == "whole row" else chosen.block <= 256


CASES: dict[str, Callable[[], None]] = {
    function.__name__.replace("_", " "): function
    for function in (
        the_streams_gradient_is_added,
        additions_beside_the_norm_are_the_streams,
        gradients_repeat_bit_by_bit,
        only_the_inputs_are_kept,
        what_needs_no_gradient_gets_none,
        any_strides_are_taken,
        nothing_leaks_out_of_a_document,
        empty_inputs_give_empty_outputs,
        wrong_shapes_are_refused,
        too_wide_a_row_takes_the_norm_of_pytorch,
        blocks_follow_from_the_shape,
    )
}
