"""The Triton kernels on a real GPU: the checks of triton_cases.py at the sizes of models."""

import pytest
import torch

from tests import triton_cases as cases
from tests.triton_cases import BF16, FP16, FP32, PLAIN, PROPERTIES, norm_canon

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
# sums over thousands of tokens in float32
EXTRA = 2e-5
dtypes = pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
options = pytest.mark.parametrize(
    "options", [{}, {"residual": False}, {"activation": True, "documents": True}], ids=str
)


@pytest.fixture(autouse=True)
def _on_the_gpu(monkeypatch):
    monkeypatch.setattr(cases, "DEVICE", "cuda")


@dtypes
@options
@pytest.mark.parametrize("shape", [(2, 4096, 2048, 4), (3, 1000, 1368, 3), (1, 130, 77, 2)])
def test_canon_and_its_gate(dtype, options, shape):
    for norm in (False, True):
        cases.check_canon(dtype, *shape, norm=norm, extra=EXTRA, **options)
    for relu2 in (False, True):
        cases.check_gate(dtype, *shape, relu2=relu2, extra=EXTRA, **options)


def test_a_row_wider_than_a_program_holds():
    cases.check_canon(FP32, 1, 64, 6144, norm=True, extra=EXTRA)


@dtypes
@options
@pytest.mark.parametrize("norm", ["none", "full", "per_head"])
@pytest.mark.parametrize("rope", ["", "rope", "a", "b", "c"])
def test_canon_qkv(dtype, options, norm, rope):
    cases.check_qkv(dtype, 2, 1030, 32, 8, 64, norm=norm, rope=rope, extra=EXTRA, **options)


@pytest.mark.parametrize("name", PROPERTIES)
def test_property(name):
    PROPERTIES[name]()


def _inputs(rows, num_tokens, width):
    """Return x in bfloat16, the gain of a norm, and the weight of Canon."""
    x = torch.randn(rows, num_tokens, width, device="cuda", dtype=BF16)
    gain = torch.rand(width, device="cuda")
    weight = torch.rand(width, 1, 4, device="cuda")
    return [value.requires_grad_() for value in (x, gain, weight)]


def _with_gradients(x, gain, weight):
    """Return the output and the gradients of all inputs."""
    y = norm_canon(x, gain, weight, **PLAIN)
    return y, *torch.autograd.grad(y, (x, gain, weight), torch.ones_like(y))


def test_gradients_are_deterministic_on_a_busy_gpu():
    inputs = _inputs(4, 4096, 2048)
    noise = torch.randn(4096, 4096, device="cuda")
    second_stream = torch.cuda.Stream()

    results = []
    for i in range(4):
        with torch.cuda.stream(second_stream):  # changes the order in which programs end
            for _ in range(3 * i):
                noise @ noise
        results.append(_with_gradients(*inputs))
    torch.cuda.synchronize()

    for other in results[1:]:
        cases.assert_equal(results[0], other)


def test_more_than_two_to_the_31_elements():
    tail = 64
    x, gain, weight = _inputs(1, 2**20 + 5, 2304)
    last_tokens = x.detach()[:, -tail - 3 :].clone().requires_grad_()

    y, dx, *_ = _with_gradients(x, gain, weight)
    y_alone, dx_alone, *_ = _with_gradients(last_tokens, gain, weight)

    cases.assert_equal(
        [y[:, -tail:], dx[:, -tail:]],
        [y_alone[:, -tail:], dx_alone[:, -tail:]],
    )


def test_inductor_keeps_one_graph():
    inputs = cases.sites_inputs()
    site = cases.all_sites()
    expected = cases.gradients(site, inputs)

    compiled = torch.compile(site, fullgraph=True)

    torch.testing.assert_close(cases.gradients(compiled, inputs), expected, rtol=1e-4, atol=1e-4)
