"""The Triton kernels on a real GPU: the checks of triton_cases.py at the sizes of models."""

import pytest
import torch

from canon_pretrain.kernels.backends import backend_problem
from tests import triton_cases as cases
from tests import triton_properties as properties
from tests import triton_systems as systems

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONS = (
    {},
    {"residual": False},
    {"activation": True},
    {"documents": True},
    {"activation": True, "documents": True, "residual": False},
)
# sums over thousands of tokens in float32
EXTRA = 2e-5
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
options = pytest.mark.parametrize("options", OPTIONS, ids=str)


def test_they_can_be_had():
    for dtype in DTYPES:
        assert backend_problem("triton", "cuda", dtype) is None


@dtypes
@options
@pytest.mark.parametrize(
    ("rows", "num_tokens", "width", "taps"),
    [(2, 4096, 2048, 4), (3, 1000, 1368, 3), (1, 130, 77, 2), (1, 1, 8, 4)],
)
@pytest.mark.parametrize("norm", [False, True])
def test_canon(dtype, options, rows, num_tokens, width, taps, norm):
    cases.check_canon(
        "cuda", dtype, rows, num_tokens, width, taps, norm=norm, extra=EXTRA, **options
    )


def test_a_row_wider_than_a_program_holds():
    cases.check_canon("cuda", torch.float32, 1, 64, 6144, norm=True, extra=EXTRA)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS[2:], ids=str)
@pytest.mark.parametrize("norm", ["none", "full", "per_head"])
@pytest.mark.parametrize("rope", ["", "rope", "a", "b", "c"])
def test_canon_qkv(dtype, options, norm, rope):
    cases.check_qkv("cuda", dtype, 2, 1030, 32, 8, 64, norm=norm, rope=rope, extra=EXTRA, **options)


@dtypes
@options
@pytest.mark.parametrize("act", ["silu", "relu2"])
@pytest.mark.parametrize(("num_tokens", "width"), [(4096, 5504), (129, 1001)])
def test_canon_gate(dtype, options, act, num_tokens, width):
    cases.check_gate("cuda", dtype, 2, num_tokens, width, act=act, extra=EXTRA, **options)


@pytest.mark.parametrize("name", [*properties.CASES, *systems.CASES])
def test_property(name, monkeypatch):
    monkeypatch.setattr(properties, "DEVICE", "cuda")
    (properties.CASES | systems.CASES)[name]()


def _inputs(rows, num_tokens, width, device="cuda"):
    x = torch.randn(rows, num_tokens, width, device=device, dtype=torch.bfloat16)
    gain, weight = torch.rand(width, device=device), torch.rand(width, 1, 4, device=device)
    return [value.requires_grad_() for value in (x, gain, weight)]


def test_gradients_repeat_bit_by_bit_on_a_busy_gpu():
    x, gain, weight = _inputs(4, 4096, 2048)
    noise, results = torch.randn(4096, 4096, device="cuda"), []
    beside = torch.cuda.Stream()
    for i in range(4):
        with torch.cuda.stream(beside):  # programs end in another order each time
            for _ in range(3 * i):
                noise @ noise
        y = properties.norm_canon(x, gain, weight, residual=True, activation=False)
        results.append(torch.autograd.grad(y, [x, gain, weight], torch.ones_like(y)))
    torch.cuda.synchronize()
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_more_than_two_to_the_31_elements():
    num_tokens, width, tail = 2**20 + 5, 2304, 64
    x, gain, weight = _inputs(1, num_tokens, width)
    options = {"residual": True, "activation": False}
    y = properties.norm_canon(x, gain, weight, **options)
    (dx,) = torch.autograd.grad(y, [x], torch.ones_like(y))
    last = x.detach()[:, -tail - 3 :].clone().requires_grad_()
    y_last = properties.norm_canon(last, gain, weight, **options)
    (dx_last,) = torch.autograd.grad(y_last, [last], torch.ones_like(y_last))
    assert torch.equal(y[:, -tail:], y_last[:, -tail:])
    assert torch.equal(dx[:, -tail:], dx_last[:, -tail:])


def test_inductor_keeps_it_one_graph():
    canon_triton = cases.fused().canon_triton  # an import is no part of a graph

    def site(x, gain, weight):
        options = {"residual": True, "activation": False, "gain": gain, "norm": "full"}
        y = canon_triton(2 * x, weight, eps=1e-5, **options)
        return torch.nn.functional.silu(y)

    inputs = _inputs(2, 256, 512)
    compiled = torch.compile(site, fullgraph=True)
    pairs = zip(_with_gradients(compiled, inputs), _with_gradients(site, inputs), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def _with_gradients(function, inputs):
    y = function(*inputs)
    return y, *torch.autograd.grad(y, inputs, torch.ones_like(y))
