"""Checks of `kernels/triton/recurrence/` against the recurrences, token by token, in float64.

`kernels/test_triton_recurrence.py` runs CASES in one process with Triton's interpreter (as
`python -m tests.recurrence_cases OUT.json NAMES`). triton is imported by the cases:
TRITON_INTERPRET is read then.

Shapes: B batch, T tokens, H heads, K key dim, V value dim; Mamba2: N = K state, P = V head dim.
"""

import functools
import importlib
import json
import random
import sys
import traceback
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F

from canon_pretrain.kernels.gla import chunked_gla
from tests.triton_cases import correct_bfloat16, quicken_interpreter

DEVICE = "cpu"
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCES = {FP32: 2e-5, BF16: 2**-6, FP16: 2**-7}
"""Of the largest value. Decays' gradients have terms of bfloat16 also for float16."""
SCALE = 0.3
RATES = {"weak": 1e-4, "usual": 0.05, "strong": 3.0, "extreme": 300.0}


def operators():
    return importlib.import_module("canon_pretrain.kernels.triton.recurrence.operators")


def chunks_of(size):
    chunks = importlib.import_module("canon_pretrain.kernels.triton.recurrence.chunks")
    return mock.patch.object(chunks, "CHUNK", size)


class Case(NamedTuple):
    form: str
    dtype: torch.dtype
    num_tokens: int
    rows: int
    heads: int
    key_dim: int
    value_dim: int
    decays: str
    starts_every: int
    has_state: bool
    chunk: int


# -- the formulas


def linear_recurrence(q, k, v, decay, state):
    """o_t = q_t S_t,  S_t = decay_t S_{t-1} + k_t^T v_t."""
    outputs = []
    for t in range(q.shape[1]):
        state = decay[:, t, :, :, None] * state + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append((q[:, t, :, None] @ state)[:, :, 0])
    return torch.stack(outputs, dim=1), state


def exact_gla(q, k, v, log_decay, state, starts):
    decay = log_decay.exp().masked_fill(starts[..., None, None], 0)
    return linear_recurrence(SCALE * q, k, v, decay, state)


def exact_ssd(x, dt, A, B, C, D, state, starts):
    num_heads = dt.shape[2]
    decay = (dt * A).exp().masked_fill(starts[..., None], 0)
    k = dt[..., None] * B[:, :, None]
    q = C[:, :, None].expand(-1, -1, num_heads, -1)
    y, state = linear_recurrence(q, k, x, decay[..., None].expand_as(k), state)
    return y + D[:, None] * x, state


EXACT = {"gla": exact_gla, "ssd": exact_ssd}


def run(form, *inputs_and_past):
    *inputs, state, starts = inputs_and_past
    if form == "gla":
        return operators().gla(*inputs, SCALE, state=state, starts_BT=starts)
    return operators().ssd(*inputs, state=state, starts_BT=starts)


# -- inputs


def drawer(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator).to(DEVICE)


def inputs_of(case, seed=0):
    """Return the inputs, the state and the starts; the starts of the rows differ."""
    draw = drawer(seed)
    shape = (case.rows, case.num_tokens, case.heads)
    rate = RATES[case.decays]
    if case.form == "gla":
        q, k = (draw(*shape, case.key_dim).to(case.dtype) for _ in range(2))
        v = draw(*shape, case.value_dim).to(case.dtype)
        log_decay = -rate * draw(*shape, case.key_dim).square()
        if case.decays == "strong":
            log_decay = log_decay.masked_fill(draw(*log_decay.shape) > 2, -torch.inf)
        inputs = [q, k, v, log_decay]
    else:
        x = draw(*shape, case.value_dim).to(case.dtype)
        B, C = (draw(*shape[:2], case.key_dim).to(case.dtype) for _ in range(2))
        dt = rate * F.softplus(draw(*shape))
        A = -draw(case.heads).exp()
        inputs = [x, dt, A, B, C, draw(case.heads)]
    state = draw(case.rows, case.heads, case.key_dim, case.value_dim)

    starts = torch.zeros(case.rows, case.num_tokens, dtype=torch.bool, device=DEVICE)
    if case.starts_every:
        starts[0, :: case.starts_every] = True
        starts[-1, case.num_tokens // 2] = True
    return inputs, state, starts


def gradients(function, inputs, upstream):
    outputs = function(*inputs)
    return [*outputs, *torch.autograd.grad(outputs, inputs, upstream, materialize_grads=True)]


def outputs_and_gradients(case, seed=0):
    """Return ours and the exact ones, of the same inputs and gradients of the outputs."""
    inputs, state, starts = inputs_of(case, seed)
    if not case.has_state:
        state = torch.zeros_like(state)
    leaves = [x.requires_grad_() for x in (*inputs, *([state] if case.has_state else []))]
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    draw = drawer(seed + 1)
    out_shape = (*inputs[0].shape[:2], case.heads, case.value_dim)
    upstream = [draw(*out_shape).to(case.dtype), draw(*state.shape)]

    def ours(*leaves):
        past = leaves[len(inputs) :] or (None,)
        given_starts = starts if case.starts_every else None
        return run(case.form, *leaves[: len(inputs)], *past, given_starts)

    def exact(*leaves):
        past = leaves[len(inputs) :] or (state.double(),)
        return EXACT[case.form](*leaves[: len(inputs)], *past, starts)

    exact_results = gradients(exact, exact_leaves, [dy.double() for dy in upstream])
    return gradients(ours, leaves, upstream), exact_results, leaves


def check(case):
    """Outputs, the last state and all gradients, in the inputs' dtypes."""
    with chunks_of(case.chunk):
        computed, expected, leaves = outputs_and_gradients(case)
    dtypes = [case.dtype, FP32, *(x.dtype for x in leaves)]
    assert [x.dtype for x in computed] == dtypes
    for number, (ours, true) in enumerate(zip(computed, expected, strict=True)):
        assert ours.shape == true.shape, number
        error = ((ours.double() - true).abs().max() / true.abs().max().clamp(min=1)).item()
        assert error <= TOLERANCES[case.dtype], f"value {number}: {error:.3g}"


# -- properties


def cases_of_both(**changes):
    base = Case("gla", FP32, 45, 2, 1, 8, 12, "usual", 0, True, 32)
    return [base._replace(form=form, **changes) for form in ("gla", "ssd")]


def results_of(case, change=lambda x: x):
    inputs, state, starts = inputs_of(case)
    leaves = [change(x).requires_grad_() for x in (*inputs, state)]
    past = (starts,) if case.starts_every else (None,)
    draw = drawer(7)

    def ours(*leaves):
        return run(case.form, *leaves, *past)

    out_shape = (case.rows, case.num_tokens, case.heads, case.value_dim)
    upstream = [draw(*out_shape).to(case.dtype), draw(*state.shape)]
    with chunks_of(case.chunk):
        return gradients(ours, leaves, upstream)


def assert_equal(computed, expected):
    for ours, true in zip(computed, expected, strict=True):
        assert torch.equal(ours, true)


def runs_are_equal_bit_by_bit():
    for case in cases_of_both(dtype=BF16):
        assert_equal(results_of(case), results_of(case))


def parts_of_wider_rows_are_read_in_place():
    """And other strides are copied."""

    def in_wider_rows(x):
        if x.ndim < 3:
            return x.detach()
        width = x[0, 0].numel()
        wide = torch.full((*x.shape[:2], width + 5), torch.nan)
        part = wide[:, :, 3 : 3 + width]
        part.copy_(x.flatten(2))
        return part.unflatten(2, x.shape[2:])

    def transposed(x):
        return x.mT.contiguous().mT.detach() if x.ndim > 1 else x.detach()

    for case in cases_of_both():
        expected = results_of(case)
        assert_equal(results_of(case, in_wider_rows), expected)
        assert_equal(results_of(case, transposed), expected)


def no_gradient_crosses_a_start():
    """Not even rounded."""
    for case in cases_of_both(num_tokens=40):
        inputs, state, starts = inputs_of(case)
        starts[:, [13, 29]] = True
        leaves = [x.requires_grad_() for x in (*inputs, state)]
        with chunks_of(case.chunk):
            y, _ = run(case.form, *leaves, starts)
            grads = torch.autograd.grad(y[:, 13:29].square().sum(), leaves)
        for grad in grads[:-1]:
            if grad.ndim > 1:  # not A and D
                assert grad[:, 13:29].any()
                assert not grad[:, :13].any()
                assert not grad[:, 29:].any()
        assert not grads[-1].any()
        if case.form == "gla":
            assert not grads[3][:, 13].any()


def not_a_number_is_not_hidden():
    """A log decay's: of GLA a token's, of Mamba2 a head's rate."""
    for case, index in zip(cases_of_both(num_tokens=20, chunk=16), (3, 2), strict=True):
        inputs, state, starts = inputs_of(case)
        log_decays = inputs[index] if case.form == "ssd" else inputs[index][:, 10]
        log_decays.fill_(torch.nan)
        y, last = run(case.form, *inputs, state, starts)
        assert y[:, 16:].isnan().all() and last.isnan().all(), case.form


def two_calls_equal_one():
    for case in cases_of_both(starts_every=9):
        inputs, state, starts = inputs_of(case)
        expected = run(case.form, *inputs, state, starts)
        outputs = []
        for begin, end in ((0, 17), (17, 44), (44, 45)):
            of_tokens = [x[:, begin:end] if x.ndim > 1 else x for x in inputs]
            y, state = run(case.form, *of_tokens, state, starts[:, begin:end])
            outputs.append(y)
        assert (torch.cat(outputs, dim=1) - expected[0]).abs().max() < 1e-5
        assert (state - expected[1]).abs().max() < 1e-5


def they_compile_to_one_graph():
    for case in cases_of_both(num_tokens=20, starts_every=7):
        inputs, state, starts = inputs_of(case)
        leaves = [x.requires_grad_() for x in (*inputs, state)]
        function = getattr(operators(), case.form)
        scale = [SCALE] if case.form == "gla" else []
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        results = []
        for form in (function, compiled):
            y, last = form(*leaves[:-1], *scale, state=leaves[-1], starts_BT=starts)
            results.append([y, last, *torch.autograd.grad(y.sum() + last.sum(), leaves)])
        assert_equal(*results)


def single_tokens_and_float64_are_exact():
    for case in cases_of_both(num_tokens=1):
        check(case)
    for case in cases_of_both(num_tokens=5):
        inputs, state, starts = inputs_of(case)
        inputs = [x.double() for x in inputs]
        y, _ = run(case.form, *inputs, state.double(), starts)
        true, _ = EXACT[case.form](*inputs, state.double(), starts)
        assert (y - true).abs().max() < 1e-12


def errors_do_not_grow_with_the_length():
    """At 16,384 tokens in bfloat16, gradients of the first and of the last tokens."""
    case = Case("gla", BF16, 16_384, 1, 1, 16, 16, "weak", 0, False, 64)
    inputs, _, _ = inputs_of(case)
    dy = drawer(7)(*inputs[2].shape).to(BF16)
    results = []
    for form, dtype in ((operators().gla, None), (chunked_gla, torch.float64)):
        leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
        o, _ = form(*leaves, SCALE)
        results.append([o, *torch.autograd.grad(o, leaves, dy.to(o.dtype))])
    for ours, true in zip(*results, strict=True):
        for part in (slice(0, 1024), slice(-1024, None)):
            error = (ours[:, part].double() - true[:, part]).abs().max()
            assert error <= 2**-6 * true[:, part].abs().max()


PROPERTIES = {
    function.__name__.replace("_", " "): function
    for function in (
        runs_are_equal_bit_by_bit,
        parts_of_wider_rows_are_read_in_place,
        no_gradient_crosses_a_start,
        not_a_number_is_not_hidden,
        two_calls_equal_one,
        they_compile_to_one_graph,
        single_tokens_and_float64_are_exact,
        errors_do_not_grow_with_the_length,
    )
}


# -- shapes


def draw_case(form, number):
    choose = random.Random(f"{form} {number}").choice
    chunk = choose((16, 16, 32, 64))
    return Case(
        form,
        choose((FP32, FP32, BF16, BF16, FP16)),
        choose((2, 3, 15, 16, 17, 33, 50, 63, 64, 65, 100, 129, 200)[: 8 if chunk < 64 else None]),
        choose((1, 2)),
        choose((1, 2, 3)),
        choose((3, 8, 12, 16, 24, 40)),
        choose((4, 8, 12, 16, 24, 33)),
        choose(tuple(RATES)),
        choose((0, 0, 1, 5, 16, 30)),
        choose((False, True)),
        chunk,
    )


NUM_DRAWN = 100
"""Cases of each form."""
QUICK = [
    Case("gla", FP32, 19, 1, 2, 8, 12, "usual", 7, True, 16),
    Case("gla", BF16, 5, 2, 1, 12, 8, "strong", 0, False, 16),
    Case("ssd", FP32, 19, 1, 3, 8, 12, "usual", 7, True, 16),
    Case("ssd", BF16, 5, 2, 1, 12, 8, "strong", 0, False, 16),
]


def name_of(case):
    return " ".join(str(field).removeprefix("torch.") for field in case)


DRAWN = [draw_case(form, number) for form in ("gla", "ssd") for number in range(NUM_DRAWN)]
CASES = {name_of(case): functools.partial(check, case) for case in (*QUICK, *DRAWN)} | PROPERTIES


def main() -> None:
    """Run all cases (or those named) and write {name: error or ""} to argv[1]."""
    torch.set_num_threads(1)
    quicken_interpreter()
    correct_bfloat16()
    results = {}
    for name in sys.argv[2:] or CASES:
        try:
            CASES[name]()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
