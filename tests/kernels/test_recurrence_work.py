"""The work of Triton's recurrences in closed form is that of launches recorded without a GPU."""

import importlib

import pytest
import torch
from torch import nn

from canon_pretrain.kernels.recurrence_work import triton_kept_bytes, triton_work
from canon_pretrain.kernels.recurrences import CHUNKED
from canon_pretrain.titan.costs import count_saved

PACKAGE = "canon_pretrain.kernels.triton.recurrence"
ROWS = 6
NUM_TOKENS = 4096
# heads, keys and values, of 1.3B and of the release
SIZES = [
    ("gla", 4, 256, 512),
    ("gla", 16, 128, 256),
    ("mamba2", 16, 64, 256),
    ("mamba2", 16, 128, 256),
    ("gated_deltanet", 12, 128, 256),
    ("gated_deltanet", 8, 256, 256),
]


class Recorder:
    """Stands in for a kernel, and adds up the bytes of the tensors of its launches."""

    def __init__(self):
        self.launch_bytes = []

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            tensors = {
                id(value): value
                for value in (*arguments, *options.values())
                if isinstance(value, torch.Tensor)
            }
            self.launch_bytes.append(sum(x.numel() * x.itemsize for x in tensors.values()))

        return launch


@pytest.fixture
def recorder(monkeypatch):
    pytest.importorskip("triton")
    recorder = Recorder()
    for name in ("chunks", "gla", "ssd", "delta"):
        module = importlib.import_module(f"{PACKAGE}.{name}")
        for kernel in [kernel for kernel in vars(module) if kernel.endswith("_kernel")]:
            monkeypatch.setattr(module, kernel, recorder)
    return recorder


def empty_inputs(mixer, num_heads, key_dim, value_dim, dtype):
    """Return the inputs of a form, with any values."""

    def heads(*width, dtype=torch.float32):
        return torch.empty(ROWS, NUM_TOKENS, *width, dtype=dtype)

    per_head = torch.empty(num_heads)
    v = heads(num_heads, value_dim, dtype=dtype)
    q, k = (heads(num_heads, key_dim, dtype=dtype) for _ in range(2))
    B, C = (heads(key_dim, dtype=dtype) for _ in range(2))
    gate, step = (heads(num_heads) for _ in range(2))
    inputs = {
        "gla": (q, k, v, heads(num_heads, key_dim)),
        "mamba2": (v, gate, per_head, B, C, per_head.clone()),
        "gated_deltanet": (q, k, v, gate, step),
    }[mixer]
    return [x.requires_grad_() for x in inputs]


@pytest.mark.parametrize(("mixer", "num_heads", "key_dim", "value_dim"), SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_counted_is_what_is_launched(mixer, num_heads, key_dim, value_dim, dtype, recorder):
    forms = importlib.import_module(f"{PACKAGE}.forms").FORMS
    assert forms.keys() == CHUNKED.keys()
    inputs = empty_inputs(mixer, num_heads, key_dim, value_dim, dtype)
    options = {"scale": 0.1} if mixer == "gla" else {}

    y, _ = forms[mixer](*inputs, state=None, starts_BT=None, **options)
    num_forward = len(recorder.launch_bytes)
    torch.autograd.grad(y, inputs, torch.empty_like(y))

    sizes = (num_heads, key_dim, value_dim, dtype.itemsize)
    passes = {
        "forward": recorder.launch_bytes[:num_forward],
        "backward": recorder.launch_bytes[num_forward:],
    }
    for direction, launch_bytes in passes.items():
        work = triton_work(mixer, direction, *sizes)
        assert work.launches == len(launch_bytes)
        recorded = sum(launch_bytes) / (ROWS * NUM_TOKENS)
        # last states, and operands that a walk gets but does not read
        assert work.bytes_moved == pytest.approx(recorded, rel=0.1), direction
        assert work.flops["attention"] > 0


@pytest.mark.parametrize(("num_heads", "key_dim"), [(12, 128), (8, 256)])
def test_delta_keeps_what_is_counted(num_heads, key_dim, recorder):
    operator = importlib.import_module(f"{PACKAGE}.delta_operator").delta_operator
    inputs = empty_inputs("gated_deltanet", num_heads, key_dim, 256, torch.bfloat16)
    q, k, *others = inputs
    half = [x.detach().bfloat16().requires_grad_() for x in (q, k)]

    num_bytes = count_saved(lambda: operator(*half, *others, None), nn.ParameterList(half + others))

    per_head = triton_kept_bytes("gated_deltanet", key_dim, 2)
    assert num_bytes == ROWS * NUM_TOKENS * num_heads * per_head
    assert triton_kept_bytes("gla", key_dim, 2) == 0
