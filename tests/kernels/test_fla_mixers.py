"""The recurrences by fla-core: strict fakes of its functions, and (mark gpu) the package."""

import ast
import importlib.machinery
import importlib.metadata
import inspect
import itertools
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from canon_pretrain.kernels import fla_mixers, packages
from canon_pretrain.kernels.backends import check_mixer_backend, mixer_problem, recurrence
from canon_pretrain.kernels.fla_mixers import MIXERS
from canon_pretrain.kernels.recurrence_check import check_mixer
from canon_pretrain.kernels.recurrences import CHUNKED
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.cache import Context
from canon_pretrain.model.transformer import Transformer, TransformerBlock
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
    """The formula token by token in float64, with the package's checks and planted faults."""
    assert g.shape == (q.shape if beta is None and g.ndim == 4 else q.shape[:3])
    assert q.dtype == k.dtype == v.dtype
    assert g.dtype == torch.float32
    assert output_final_state
    assert q.shape == k.shape
    assert v.shape[:3] == q.shape[:3]
    if "error" in faults:
        raise RuntimeError("out of resource: shared memory\nmore")

    # Sequences are rows, or parts of the only row.
    if cu_seqlens is None:
        calls.append("rows")
        sequences = [(b, 0, q.shape[1]) for b in range(len(q))]
    else:
        calls.append("sequences")
        assert q.shape[0] == 1
        assert cu_seqlens.dtype == torch.int64
        bounds = cu_seqlens.tolist()
        assert bounds[0] == 0
        assert bounds[-1] == q.shape[1]
        sequences = [(0, begin, end) for begin, end in itertools.pairwise(bounds)]
        assert all(begin < end for _, begin, end in sequences)
    if initial_state is not None:
        assert initial_state.dtype == torch.float32
        assert len(initial_state) == len(sequences)

    outputs = []
    last_states = []
    for n, (b, begin, end) in enumerate(sequences):
        # with the fault "documents", a sequence goes on from the last one's state
        if n == 0 or "documents" not in faults:
            state = torch.zeros(q.shape[2], q.shape[3], v.shape[3], dtype=torch.float64)
        if initial_state is not None and not faults & {"state", "documents"}:
            state = initial_state[n].double()

        for t in range(begin, end):
            q_t, k_t, v_t, g_t = (x[b, t].double() for x in (q, k, v, g))
            if g_t.ndim == 1:
                g_t = g_t[:, None]
            if "sign" in faults:
                g_t = -g_t
            state = g_t.exp()[..., None] * state
            if beta is not None:
                v_t = beta[b, t, :, None] * (v_t - (k_t[:, None] @ state)[:, 0])
            state = state + k_t[..., None] * v_t[:, None]
            outputs.append(scale * (q_t[:, None] @ state)[:, 0])
        last_states.append(state)
    return torch.stack(outputs).view(v.shape).to(v.dtype), torch.stack(last_states).float()


def fake(mixer):
    """Return a function with the package's signature, which torch.compile does not trace."""
    signature = inspect.signature(eval(f"lambda {SIGNATURES[mixer]}: None"))

    def function(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        used = {name: bound.arguments[name] for name in USED & {*bound.arguments}}
        used.setdefault("beta", None)
        return _sequences(**used)

    return torch.compiler.disable(function)


@pytest.fixture(autouse=True)
def fakes(monkeypatch):
    """Install the fakes as modules; return them by name."""
    modules = {"fla": ModuleType("fla")}
    vars(modules["fla"]).update(__version__="0.6.0", __path__=[])
    for mixer, package in MIXERS.items():
        module = ModuleType(package.functions)
        setattr(module, package.needed[0], fake(mixer))
        modules[package.functions] = module
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
    """Return the inputs of a mixer's form in their order, and a state."""
    heads = (B, num_tokens, H)
    q, keys, values = randoms((*heads, k), (*heads, k), (*heads, v), dtype=dtype)
    q = F.normalize(q, dim=-1)
    keys = F.normalize(keys, dim=-1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    log, state = randoms((*heads, k), (B, H, k, v), dtype=wide, seed=1)
    log = F.logsigmoid(log)
    gate = log[..., 0]

    inputs = {
        "gla": (q, keys, values, log),
        "mamba2": (values, -gate, gate[0, 0], keys[:, :, 0], q[:, :, 1], gate[1, 0]),
        "gated_deltanet": (q, keys, values, gate, gate.exp()),
    }[mixer]
    return [x.detach().requires_grad_() for x in (*inputs, state)]


def _results(form, inputs, *, has_state=True, starts=None, scale=None):
    """Return values, the last state and the gradients, each for weights of its own."""
    *heads, state = inputs
    options = {} if scale is None else {"scale": scale}
    outputs = form(*heads, state=state if has_state else None, starts_BT=starts, **options)
    upstream = [torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y) for y in outputs]
    leaves = inputs if has_state else heads
    return [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]


def _starts(num_tokens=11):
    """Return where documents start: in the first row at 0, 4 and 5, in the second at 7."""
    starts = torch.zeros(B, num_tokens, dtype=torch.bool)
    starts[0, [0, 4, 5]] = True
    starts[1, 7] = True
    return starts


def _scale(mixer):
    """Return the scale argument, which only GLA's form takes."""
    return 0.3 if mixer == "gla" else None


@each_mixer
@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("documents", [False, True])
def test_it_equals_the_chunked_form(mixer, has_state, documents):
    inputs = _inputs(mixer)
    options = {
        "has_state": has_state,
        "starts": _starts() if documents else None,
        "scale": _scale(mixer),
    }

    computed = _results(recurrence(mixer, "fla"), inputs, **options)

    assert calls == ["sequences" if documents else "rows"] * 2  # backward runs forward again
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = _results(CHUNKED[mixer], exact, **options)
    for ours, true in zip(computed, expected, strict=True):
        torch.testing.assert_close(ours, true.to(ours.dtype), rtol=1e-5, atol=1e-5)


@each_mixer
@pytest.mark.parametrize(
    "change", [{"num_tokens": 1}, {"dtype": torch.float64}], ids=["one token", "float64"]
)
def test_one_token_and_float64_use_the_chunked_form(mixer, change):
    inputs = _inputs(mixer, **change)

    computed = _results(recurrence(mixer, "fla"), inputs, scale=_scale(mixer))

    chunked = _results(CHUNKED[mixer], inputs, scale=_scale(mixer))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(computed, chunked, strict=True))
    assert not calls


@each_mixer
def test_low_precision_has_one_dtype_and_a_float32_state(mixer):
    inputs = _inputs(mixer, dtype=torch.bfloat16)

    output, last_state, *_ = _results(recurrence(mixer, "fla"), inputs, scale=_scale(mixer))

    assert (output.dtype, last_state.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@each_mixer
@pytest.mark.system
def test_a_block_compiles_to_one_graph(mixer):
    args = ModelArgs(
        mixer=mixer,
        position="nope",
        canon_set="A",
        dim=32,
        num_heads=2,
        ffn_dim=48,
        document_mask=True,
    )
    chunked = TransformerBlock(args, None, None, "auto", "chunked")
    block = TransformerBlock(args, None, None, "auto", "fla")
    for parameter in chunked.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    block.load_state_dict(chunked.state_dict())
    (x,) = randoms((B, 11, 32), dtype=torch.float32)
    segments = torch.tensor([[-2, -2, -2, *[0] * 4, *[1] * 7], [-2, -2, -2, *[0] * 7, *[1] * 4]])

    def outputs_and_grads(function):
        y = function(x, Context(segments_BN=segments.int()))
        return [y, *torch.autograd.grad(y.square().sum(), [*function.parameters()])]

    torch._dynamo.reset()
    expected = outputs_and_grads(chunked)
    computed = outputs_and_grads(torch.compile(block, fullgraph=True, backend="aot_eager"))

    assert calls == ["sequences"] * 2
    for ours, theirs in zip(computed, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("has_state", [False, True])
def test_the_operator_follows_torchs_rules(has_state):
    *heads, state = _inputs("gated_deltanet", num_tokens=5)
    arguments = (heads, state if has_state else None, None, "gated_deltanet", 0.5)
    torch.library.opcheck(fla_mixers.fla_forward, arguments)


def refusal(mixer="gla", key_dim=K):
    """Return the problem for which the backend refuses a mixer."""
    with refused("mixer.unavailable", backend="fla") as caught:
        check_mixer_backend(mixer, key_dim, "fla")
    return caught.value.fields["problem"]


def test_mixers_that_the_package_cannot_run_are_refused(on_gpu):
    for mixer in MIXERS:
        check_mixer_backend(mixer, 256, "fla")
    check_mixer_backend("gla", 512, "fla")

    assert "257" in refusal("gated_deltanet", 257)
    assert "attention" in refusal("attention")
    with refused("config.unknown_choice", name="mixer_backend"):
        check_mixer_backend("gla", K, "flash")


def test_layers_of_attention_do_not_refuse_it_for_the_others(on_gpu):
    args = ModelArgs(
        vocab_size=40,
        num_layers=2,
        dim=32,
        num_heads=2,
        ffn_dim=48,
        pattern=("gated_deltanet", "attention"),
    )
    with torch.device("meta"):
        Transformer(args, mixer_backend="fla")
        with refused("mixer.unavailable", backend="fla"):
            Transformer(replace(args, pattern=()), mixer_backend="fla")


def test_why_it_is_unavailable(fakes, on_gpu, monkeypatch):
    monkeypatch.setattr(fakes["fla"], "__version__", "0.5.1")
    assert "0.5.1 is too old" in refusal()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(fakes["fla"], "__version__", "0.6.1")
    assert "CUDA device" in refusal()

    monkeypatch.delattr(fakes["fla.ops.gla"], "chunk_gla")
    assert "AttributeError" in refusal()

    monkeypatch.setitem(sys.modules, "fla", None)
    assert "not installed" in refusal()


def arguments_of(function):
    """Return a function's arguments as source text without annotations."""
    for argument in function.args.args:
        argument.annotation = None
    return ast.unparse(function.args)


@each_mixer
@pytest.mark.parametrize("fault", ["", "sign", "state", "documents", "error"])
def test_the_startup_check_finds_faults(mixer, fault, on_gpu):
    faults.add(fault)
    problem = check_mixer("fla", mixer, K, V, torch.bfloat16, CPU)
    assert (problem is None) == (not fault)
    assert ("out of resource" in str(problem)) == (fault == "error")


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_fakes_have_the_packages_signatures(mixer):
    package = MIXERS[mixer]
    try:
        installed = importlib.metadata.distribution("fla-core")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fla-core is not installed")

    file = installed.locate_file(package.functions.replace(".", "/") + "/chunk.py")
    functions = [node for node in ast.parse(file.read_text()).body if hasattr(node, "args")]
    (real,) = (node for node in functions if node.name == package.needed[0])

    faked = ast.parse(f"lambda {SIGNATURES[mixer]}: 0").body[0].value
    assert arguments_of(real) == arguments_of(faked)


# of keys and of values, in models
REAL_WIDTHS = {"gla": (256, 512), "mamba2": (64, 256), "gated_deltanet": (128, 256)}


@pytest.mark.gpu
@each_mixer
@pytest.mark.parametrize("dtype", packages.DTYPES)
def test_the_real_kernels(mixer, dtype, monkeypatch):
    monkeypatch.undo()
    for module in [name for name in sys.modules if name.split(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, module)
    key_dim, value_dim = REAL_WIDTHS[mixer]
    if problem := mixer_problem(mixer, key_dim, "fla"):
        pytest.skip(problem)

    assert check_mixer("fla", mixer, key_dim, value_dim, dtype, torch.device("cuda")) is None
