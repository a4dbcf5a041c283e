"""The recurrences by fla-core: strict fakes of its functions, and (mark gpu) the package."""

import ast
import importlib.machinery
import importlib.metadata
import inspect
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from canon_pretrain.kernels import fla_mixers, packages
from canon_pretrain.kernels.backends import check_mixer_backend
from canon_pretrain.kernels.fla_mixers import FORMS, MIXERS, check_mixer
from canon_pretrain.kernels.recurrences import CHUNKED
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.cache import Context
from canon_pretrain.model.transformer import TransformerBlock
from tests.canon_inputs import randoms
from tests.support import refused

CPU = torch.device("cpu")
B, H, K, V = 2, 2, 8, 6
faults: set[str] = set()
calls: list[str] = []
each_mixer = pytest.mark.parametrize("mixer", MIXERS)


STATES = "scale=None, initial_state=None, output_final_state=False, "
VARLEN = "state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None"
# of 0.6.0; a test compares them with an installed fla-core
SIGNATURES = {
    "gla": f"q, k, v, g, {STATES}{VARLEN}",
    "mamba2": f"q, k, v, g=None, g_gamma=None, {STATES}{VARLEN}, **kwargs",
    "gated_deltanet": f"q, k, v, g, beta, {STATES}use_qk_l2norm_in_kernel=False, "
    f"use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, {VARLEN}, chunk_indices=None, "
    "cp_context=None, **kwargs",
}
USED = {"q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "cu_seqlens"}


def _sequences(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens):
    """The formula token by token in float64, with the package's checks."""
    assert g.shape == (q.shape if beta is None and g.ndim == 4 else q.shape[:3])
    assert q.dtype == k.dtype == v.dtype and g.dtype == torch.float32 and output_final_state
    assert q.shape == k.shape and v.shape[:3] == q.shape[:3]
    if "error" in faults:
        raise RuntimeError("out of resource: shared memory\nmore")
    calls.append("sequences" if cu_seqlens is not None else "rows")
    rows = [(b, 0, q.shape[1]) for b in range(len(q))]
    if cu_seqlens is not None:
        assert q.shape[0] == 1 and cu_seqlens.dtype == torch.int64
        bounds = cu_seqlens.tolist()
        assert bounds[0] == 0 and bounds[-1] == q.shape[1]
        rows = [(0, *pair) for pair in zip(bounds, bounds[1:], strict=False)]
        assert all(begin < end for _, begin, end in rows)
    if initial_state is not None:
        assert initial_state.dtype == torch.float32 and len(initial_state) == len(rows)
    outputs, finals = [], []
    for n, (b, begin, end) in enumerate(rows):
        if not n or "documents" not in faults:  # else the last sequence's
            state = torch.zeros(q.shape[2], q.shape[3], v.shape[3], dtype=torch.float64)
        if initial_state is not None and not faults & {"state", "documents"}:
            state = initial_state[n].double()
        for t in range(begin, end):
            q_t, k_t, v_t, g_t = (x[b, t].double() for x in (q, k, v, g))
            g_t = g_t if g_t.ndim == 2 else g_t[:, None]
            state = (-g_t if "sign" in faults else g_t).exp()[..., None] * state
            if beta is not None:
                v_t = beta[b, t, :, None] * (v_t - (k_t[:, None] @ state)[:, 0])
            state = state + k_t[..., None] * v_t[:, None]
            outputs.append(scale * (q_t[:, None] @ state)[:, 0])
        finals.append(state)
    return torch.stack(outputs).view(v.shape).to(v.dtype), torch.stack(finals).float()


def fake(mixer):
    """Return a function with the package's signature, which torch.compile does not trace."""
    signature = inspect.signature(eval(f"lambda {SIGNATURES[mixer]}: None"))

    def function(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return _sequences(
            **{"beta": None} | {n: bound.arguments[n] for n in USED & {*bound.arguments}}
        )

    return torch.compiler.disable(function)


@pytest.fixture(autouse=True)
def fakes(monkeypatch):
    modules = {"fla": ModuleType("fla")}
    vars(modules["fla"]).update(__version__="0.6.0", __path__=[])
    for mixer, package in MIXERS.items():
        module = modules[package.functions] = ModuleType(package.functions)
        setattr(module, package.needed[0], fake(mixer))
    for path, module in modules.items():
        module.__spec__ = importlib.machinery.ModuleSpec(path, None)
        monkeypatch.setitem(sys.modules, path, module)
    monkeypatch.setattr(packages, "DEVICE_TYPES", ("cpu", "cuda"))
    faults.clear()
    calls.clear()
    return modules


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def _inputs(mixer, num_tokens=11, dtype=torch.float32, k=K, v=V):
    shape = (B, num_tokens, H)
    q, keys, values = randoms((*shape, k), (*shape, k), (*shape, v), dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    log, state = randoms((*shape, k), (B, H, k, v), dtype=wide, seed=1)
    log, q, keys = F.logsigmoid(log), F.normalize(q, dim=-1), F.normalize(keys, dim=-1)
    gate = log[..., 0]
    heads = {
        "gla": (q, keys, values, log),
        "mamba2": (values, -gate, gate[0, 0], keys[:, :, 0], q[:, :, 1], gate[1, 0]),
        "gated_deltanet": (q, keys, values, gate, gate.exp()),
    }[mixer]
    return [x.detach().requires_grad_() for x in (*heads, state)]


def _results(form, inputs, *, has_state=True, starts=None, scale=None):
    """Values, the state and the gradients of both, by formulas of different weights."""
    *heads, state = inputs
    options = {} if scale is None else {"scale": scale}
    found = form(*heads, state=state if has_state else None, starts_BT=starts, **options)
    wanted = inputs if has_state else heads
    grads = [torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y) for y in found]
    return [*found, *torch.autograd.grad(found, wanted, grads)]


def _starts(num_tokens=11):
    starts = torch.zeros(B, num_tokens, dtype=torch.bool)
    starts[0, [0, 4, 5]] = starts[1, 7] = True
    return starts


def _scale(mixer):
    return 0.3 if mixer == "gla" else None


@each_mixer
@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("documents", [False, True])
def test_it_equals_the_chunked_form(mixer, has_state, documents):
    inputs = _inputs(mixer)
    options = {"has_state": has_state, "starts": _starts() if documents else None}
    found = _results(FORMS[mixer], inputs, scale=_scale(mixer), **options)
    assert calls == ["sequences" if documents else "rows"] * 2  # backward runs forward again
    exact = [x.detach().double().requires_grad_() for x in inputs]
    for ours, true in zip(
        found, _results(CHUNKED[mixer], exact, scale=_scale(mixer), **options), strict=True
    ):
        torch.testing.assert_close(ours, true.to(ours.dtype), rtol=1e-5, atol=1e-5)


@each_mixer
def test_one_token_and_float64_use_the_chunked_form(mixer):
    for change in ({"num_tokens": 1}, {"dtype": torch.float64}):
        inputs = _inputs(mixer, **change)
        ours, chunked = (
            _results(form, inputs, scale=_scale(mixer)) for form in (FORMS[mixer], CHUNKED[mixer])
        )
        assert all(torch.equal(one, other) for one, other in zip(ours, chunked, strict=True))
    assert not calls


@each_mixer
def test_low_precision_has_one_dtype_and_a_float32_state(mixer):
    found = _results(FORMS[mixer], _inputs(mixer, dtype=torch.bfloat16), scale=_scale(mixer))
    assert (found[0].dtype, found[1].dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@each_mixer
@pytest.mark.system
def test_a_block_compiles_to_one_graph(mixer):
    sizes = {"dim": 32, "num_heads": 2, "ffn_dim": 48, "document_mask": True}
    args = ModelArgs(mixer=mixer, position="nope", canon_set="A", **sizes)
    chunked, block = (
        TransformerBlock(args, None, None, "auto", backend) for backend in ("chunked", "fla")
    )
    for parameter in chunked.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    block.load_state_dict(chunked.state_dict())
    (x,) = randoms((B, 11, 32), dtype=torch.float32)
    segments = torch.tensor([[-2, -2, -2, *[0] * 4, *[1] * 7], [-2, -2, -2, *[0] * 7, *[1] * 4]])
    torch._dynamo.reset()
    results = []
    for each in (chunked, torch.compile(block, fullgraph=True, backend="aot_eager")):
        y = each(x, Context(segments_BN=segments.int()))
        results.append([y, *torch.autograd.grad(y.square().sum(), [*each.parameters()])])
    assert calls == ["sequences"] * 2
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("has_state", [False, True])
def test_the_operator_follows_torchs_rules(has_state):
    *heads, state = _inputs("gated_deltanet", num_tokens=5)
    given = heads, state if has_state else None, None, "gated_deltanet", 0.5
    torch.library.opcheck(fla_mixers.fla_forward, given)


def test_why_it_is_unavailable(fakes, on_gpu, monkeypatch):
    def refusal(mixer="gla", key_dim=K):
        with refused("mixer.unavailable", backend="fla") as caught:
            check_mixer_backend(mixer, key_dim, "fla")
        return caught.value.fields["problem"]

    for mixer in MIXERS:
        check_mixer_backend(mixer, 256, "fla")
    check_mixer_backend("gla", 512, "fla")
    assert "257" in refusal("gated_deltanet", 257)
    assert "attention" in refusal("attention")
    with refused("config.unknown_choice", name="mixer_backend"):
        check_mixer_backend("gla", K, "flash")
    monkeypatch.setattr(fakes["fla"], "__version__", "0.5.1")
    assert "0.5.1 is too old" in refusal()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(fakes["fla"], "__version__", "0.6.1")
    assert "CUDA device" in refusal()
    monkeypatch.delattr(fakes["fla.ops.gla"], "chunk_gla")
    assert "AttributeError" in refusal()
    monkeypatch.setitem(sys.modules, "fla", None)
    assert "not installed" in refusal()


@each_mixer
@pytest.mark.parametrize("fault", ["", "sign", "state", "documents", "error"])
def test_the_startup_check_finds_faults(mixer, fault, on_gpu):
    faults.add(fault)
    problem = check_mixer(mixer, K, V, torch.bfloat16, CPU)
    assert (problem is None) == (not fault)
    assert ("out of resource" in str(problem)) == (fault == "error")


def test_the_fakes_have_the_packages_signatures():
    try:
        installed = importlib.metadata.distribution("fla-core")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fla-core is not installed")
    for mixer, package in MIXERS.items():
        file = installed.locate_file(package.functions.replace(".", "/") + "/chunk.py")
        functions = [node for node in ast.parse(file.read_text()).body if hasattr(node, "args")]
        (real,) = (node.args for node in functions if node.name == package.needed[0])
        for argument in real.args:
            argument.annotation = None
        assert ast.unparse(real) == ast.unparse(
            ast.parse(f"lambda {SIGNATURES[mixer]}: 0").body[0].value.args
        )


@pytest.mark.gpu
@each_mixer
@pytest.mark.parametrize("dtype", packages.DTYPES)
def test_the_real_kernels(mixer, dtype, monkeypatch):
    monkeypatch.undo()
    for module in [name for name in sys.modules if name.split(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, module)
    key_dim, value_dim = {"gla": (256, 512), "mamba2": (64, 256)}.get(mixer, (128, 256))
    if problem := fla_mixers.fla_problem(mixer, key_dim):
        pytest.skip(problem)
    assert check_mixer(mixer, key_dim, value_dim, dtype, torch.device("cuda")) is None
