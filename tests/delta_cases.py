"""The Triton kernels of the gated delta rule against the formula, token by token in float64.

`python -m tests.delta_cases OUT.json NAMES`, with TRITON_INTERPRET=1, runs CASES in one process as
`tests.triton_cases` does; `python -m tests.delta_cases OUT.json --faults` the first ones with each
of FAULTS in the kernels' source.
"""

import functools
import importlib
import json
import multiprocessing
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch._dynamo  # imported by custom operators: once, before the forks
import torch.nn.functional as F

from tests.triton_cases import correct_bfloat16, quicken_interpreter

PACKAGE = "canon_pretrain.kernels.triton.recurrence"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCES = {"fp32": 4e-6, "bf16": 2.0**-5, "fp16": 2.0**-8}
"""Of a value or gradient, over the largest of them: sums of rounded products."""
LOG_DECAYS = {
    "none": (0.0,),
    "weak": (-1e-5, -1e-3),
    "usual": (-0.01, -0.1, -1.0),
    "extreme": (0.0, -1e-3, -40.0, -99.0, -1e4, -torch.inf),
}
LARGEST_STEPS = (0.0, 1.0, 2.0)


class Case(NamedTuple):
    dtype: str
    batch: int
    num_tokens: int
    num_heads: int
    key_dim: int
    value_dim: int
    chunk: int
    decay: str = "usual"
    largest_step: float = 1.0
    has_state: bool = True
    has_starts: bool = True

    @property
    def name(self):
        return " ".join(str(value) for value in self)


def drawn_cases(number):
    """Draw cases of all kinds; short ones, because the interpreter is slow."""
    generator = torch.Generator().manual_seed(0)

    def choose(*values):
        return values[torch.randint(len(values), (1,), generator=generator)]

    cases = []
    for _ in range(number):
        chunk = choose(16, 16, 32, 64)
        case = Case(
            dtype=choose("fp32", "fp32", "bf16", "fp16"),
            batch=choose(1, 1, 2),
            num_tokens=choose(1, 2, 15, 16, 17, 31, 33, 48, 63, 65, 70),
            num_heads=choose(1, 2, 3),
            key_dim=choose(1, 3, 8, 16, 17, 24),
            value_dim=choose(1, 5, 8, 16, 20, 33),
            chunk=chunk,
            decay=choose(*LOG_DECAYS),
            largest_step=choose(*LARGEST_STEPS),
            has_state=choose(False, True),
            has_starts=choose(False, True),
        )
        cases.append(case)
    return cases


QUICK = [
    Case("fp32", 1, 37, 2, 8, 6, 16, "extreme"),
    Case("bf16", 1, 20, 1, 17, 20, 64, "usual", 2.0),
]
LONG = [
    Case("fp32", 1, 200, 1, 8, 6, 64, "extreme"),
    Case("fp32", 1, 200, 1, 8, 6, 64, "weak", 2.0),
    Case("bf16", 1, 130, 1, 100, 40, 64),
    Case("bf16", 2, 130, 1, 8, 6, 32, "none"),
    Case("fp32", 1, 20, 1, 130, 33, 64),
    Case("fp32", 1, 20, 1, 256, 70, 16),
]


def problem(case):
    """Return q, k, v, g, beta in the case's dtype, a state, and starts of documents."""
    generator = torch.Generator().manual_seed(1)
    shape = (case.batch, case.num_tokens, case.num_heads)

    def randn(*sizes):
        return torch.randn(sizes, generator=generator)

    q = F.normalize(randn(*shape, case.key_dim), dim=-1)
    k = F.normalize(randn(*shape, case.key_dim), dim=-1)
    k = F.normalize(k + k[:, :1], dim=-1)  # similar keys, which overwrite each other
    v = randn(*shape, case.value_dim)
    logs = torch.tensor(LOG_DECAYS[case.decay])
    g = logs[torch.randint(len(logs), shape, generator=generator)]
    beta = case.largest_step * randn(*shape).sigmoid()
    state = None
    if case.has_state:
        state = randn(case.batch, case.num_heads, case.key_dim, case.value_dim)
    starts = None
    if case.has_starts:
        starts = torch.rand(shape[:2], generator=generator) < 1 / 7

    dtype = DTYPES[case.dtype]
    return [q.to(dtype), k.to(dtype), v.to(dtype), g, beta], state, starts


def recurrence(q, k, v, g, beta, state=None, starts=None):
    """Compute the formula, token by token, in float64."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    rows, num_tokens, heads, key_width = k.shape
    identity = torch.eye(key_width, dtype=torch.float64)
    if state is None:
        state = torch.zeros(rows, heads, key_width, v.shape[-1])
    state = state.double()

    outputs = []
    for t in range(num_tokens):
        if starts is not None:
            state = torch.where(starts[:, t, None, None, None], 0, state)
        q_t, k_t, v_t = (x[:, t, :, None] for x in (q, k, v))
        a_t = g[:, t, :, None, None].exp()
        b_t = beta[:, t, :, None, None]
        state = a_t * (identity - b_t * k_t.mT @ k_t) @ state + b_t * k_t.mT @ v_t
        outputs.append(key_width**-0.5 * (q_t @ state)[:, :, 0])
    return torch.stack(outputs, dim=1), state


def derived(function, inputs, state, starts):
    """Return the outputs and the gradients of all inputs, in float64."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    first_state = None if state is None else state.clone().requires_grad_()
    outputs = function(*leaves, first_state, starts)

    generator = torch.Generator().manual_seed(9)
    dys = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in outputs]
    objective = sum((y.double() * dy).sum() for y, dy in zip(outputs, dys, strict=True))
    if first_state is not None:
        leaves.append(first_state)
    return [x.double() for x in (*outputs, *torch.autograd.grad(objective, leaves))]


def run(q, k, v, g, beta, state, starts):
    delta = importlib.import_module(f"{PACKAGE}.delta_operator").delta
    return delta(q, k, v, g, beta, state=state, starts_BT=starts)


def small_tiles(chunk):
    """Cut small problems into several chunks, tiles of values and tiles of keys."""
    chunks = importlib.import_module(f"{PACKAGE}.chunks")
    kernels = importlib.import_module(f"{PACKAGE}.delta")
    tiles = {"WALK_STATE": 256, "GRADIENT_KEYS": 16, "GRADIENT_VALUES": 16}
    patched = mock.patch.multiple(kernels, **tiles)
    return mock.patch.object(chunks, "CHUNK", chunk), patched


def check(case):
    inputs, state, starts = problem(case)
    chunk_patch, tiles_patch = small_tiles(case.chunk)
    with chunk_patch, tiles_patch:
        found = derived(run, inputs, state, starts)
    expected = derived(recurrence, inputs, state, starts)
    for i, (ours, exact) in enumerate(zip(found, expected, strict=True)):
        scale = exact.abs().max().clamp(min=1e-3)
        error = ((ours - exact).abs().max() / scale).item()
        assert error <= TOLERANCES[case.dtype], f"value {i}: {error:.2g} of the largest"


# -- properties


def decays_keep_their_digits():
    """After strong decays, values and gradients of later tokens have small relative errors."""
    inputs, state, _ = problem(Case("fp32", 1, 40, 1, 8, 6, 64))
    inputs[3][:] = -1e-4
    inputs[3][:, 3::5] = -60.0
    small_gradients = []
    for function in (run, recurrence):
        *_, dg, _, _ = derived(function, inputs, state, None)
        small_gradients.append(dg[:, 3::5])
    ours, exact = small_gradients
    assert 0 < exact.abs().max() < 1e-20
    torch.testing.assert_close(ours, exact, rtol=1e-4, atol=0)


def a_start_forgets():
    """What is before a start changes nothing after it, and has no gradient from there."""
    inputs, state, starts = problem(Case("fp32", 1, 40, 1, 8, 6, 64))
    starts[:, 20] = True
    others = [torch.cat((100 * x[:, :20].flip(1), x[:, 20:]), dim=1) for x in inputs[:3]]
    o, last = run(*inputs, state, starts)
    other_o, other_last = run(*others, *inputs[3:], -state, starts)
    assert torch.equal(o[:, 20:], other_o[:, 20:])
    assert torch.equal(last, other_last)

    leaves = [x.clone().requires_grad_() for x in (*inputs, state)]
    o, last = run(*leaves, starts)
    gradients = torch.autograd.grad(o[:, 20:].sum() + last.sum(), leaves)
    for gradient in gradients[:5]:
        assert not gradient[:, :20].any()
    dg = gradients[3]
    assert dg.any() and not dg[starts].any()
    assert not gradients[5].any()


def not_a_number_is_not_hidden():
    for i in range(1, 5):
        inputs, state, _ = problem(Case("fp32", 1, 20, 1, 8, 6, 64))
        inputs[i][0, 10] = torch.nan
        o, last = run(*inputs, state, None)
        assert o[0, 11:].isnan().any() and last.isnan().any(), i


def any_strides_are_supported():
    inputs, state, starts = problem(Case("fp32", 2, 20, 2, 8, 6, 64))
    expected = derived(run, inputs, state, starts)
    joined = torch.cat([x.flatten(2) for x in inputs[:3]], dim=-1)
    parts = joined.split([16, 16, 12], dim=-1)
    views = [x.unflatten(-1, (2, -1)) for x in parts]
    views += [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs[3:]]
    for ours, same in zip(derived(run, views, state, starts), expected, strict=True):
        assert torch.equal(ours, same)


def they_compile_to_one_graph():
    inputs, state, starts = problem(Case("fp32", 1, 20, 2, 8, 6, 64))
    delta = importlib.import_module(f"{PACKAGE}.delta_operator").delta

    def call(q, k, v, g, beta, state, starts):
        return delta(q, k, v, g, beta, state=state, starts_BT=starts)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = [derived(function, inputs, state, starts) for function in (compiled, run)]
    for ours, eager in zip(*results, strict=True):
        assert torch.equal(ours, eager)


def operators_follow_torchs_rules():
    operator = importlib.import_module(f"{PACKAGE}.delta_operator")
    inputs, state, _ = problem(Case("fp32", 1, 5, 1, 4, 4, 64))
    arguments = [x.requires_grad_() for x in (*inputs, state)]
    torch.library.opcheck(operator.delta_operator, arguments)
    torch.library.opcheck(operator.delta_operator, [*arguments[:-1], None])


PROPERTIES = {
    function.__name__.replace("_", " "): function
    for function in (
        decays_keep_their_digits,
        a_start_forgets,
        not_a_number_is_not_hidden,
        any_strides_are_supported,
        they_compile_to_one_graph,
        operators_follow_torchs_rules,
    )
}
DRAWN = drawn_cases(92)
CASES = {
    **{case.name: functools.partial(check, case) for case in (*QUICK, *DRAWN, *LONG)},
    **PROPERTIES,
}


# -- faults


class Fault(NamedTuple):
    """A text of the kernels' source and its replacement."""

    text: str
    instead: str


STATES = "states, key, value, key_dim, value_dim, value_dim, "
BETA = "beta += first_token * num_heads + head"
FAULTS = {
    "none": Fault("", ""),
    "step of the wrong token": Fault("place) * beta_C[None, :]", "place) * beta_C[:, None]"),
    "inverse not joined": Fault("chunks.product(below, first)", "below"),
    "last rows of the inverse": Fault("range(1, size)", "range(1, size - 1)"),
    "state not decayed": Fault("to(dtype), decay * state_KV)", "to(dtype), state_KV)"),
    "write not decayed": Fault("(until_C * beta_C)[:, None] * z_CV", "beta_C[:, None] * z_CV"),
    "wrong state written": Fault(f"{STATES}state_KV)", f"{STATES}decay * state_KV)"),
    "first state ignored": Fault("if has_state:", "if False:"),
    "gradient of a decay": Fault("dg_C += decay * tl.sum(", "dg_C += tl.sum("),
    "gradient of a step": Fault("dbeta_C += written_C", "dbeta_C += 0"),
    "half of the keys' gradient": Fault("dsystem_CC + tl.trans(dsystem_CC)", "dsystem_CC"),
    "inverse not transposed": Fault("tl.trans(inverse_CC)", "inverse_CC"),
    "steps of the first head": Fault(BETA, BETA.removesuffix(" + head")),
    "sums in float32": Fault("chunks.CUT, log_C).to(tl.float64)", "chunks.CUT, log_C)"),
    "gradients of q and k": Fault("return dq_BTHK, dk_BTHK", "return dk_BTHK, dq_BTHK"),
    "tokens after the end": Fault("mask=place_C < num_tokens, other=0.0", "mask=place_C >= 0"),
}
FAULT_CASES = [
    Case("fp32", 1, 70, 2, 17, 20, 64, "extreme", has_starts=False),
    Case("fp32", 1, 34, 2, 8, 6, 16, "usual", has_starts=False),
    Case("fp32", 1, 34, 2, 8, 6, 16, "usual", has_state=False),
]


def found_fault(fault):
    """Return the first error of FAULT_CASES with a fault in a copy of the kernels, or ""."""
    package = importlib.import_module(PACKAGE)
    text, instead = FAULTS[fault]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "recurrence"
        shutil.copytree(Path(package.__path__[0]), copy)
        kernels = copy / "delta.py"
        source = kernels.read_text()
        assert text in source, (fault, text)
        kernels.write_text(source.replace(text, instead) if text else source)
        package.__path__ = [str(copy)]
        for case in FAULT_CASES:
            try:
                check(case)
            except Exception as error:
                return f"{type(error).__name__}: {error}"[:200]
    return ""


def main() -> None:
    """Write {case or fault: error or ""} to argv[1]."""
    out, *names = sys.argv[1:]
    torch.set_num_threads(1)
    quicken_interpreter()
    correct_bfloat16()
    if names == ["--faults"]:
        with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
            results = dict(zip(FAULTS, pool.map(found_fault, FAULTS, chunksize=1), strict=True))
    else:
        results = {}
        for name in names or CASES:
            try:
                CASES[name]()
                results[name] = ""
            except Exception:
                results[name] = traceback.format_exc()
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
