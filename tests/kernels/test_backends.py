"""Which backend a model takes, what is refused and why, and that all give the same model."""

import copy
import pickle

import pytest
import torch

from canon_pretrain.core.errors import UserError
from canon_pretrain.kernels.backends import (
    BACKENDS,
    canon,
    canon_gate,
    check_canon_backend,
    check_canon_backend_fits,
    choose,
)
from canon_pretrain.model.transformer import Transformer
from tests.variants import build, random_tokens, variant


def test_auto_outside_a_run_is_compiled():
    assert choose("auto") == "compiled"
    assert [choose(name) for name in BACKENDS[1:]] == list(BACKENDS[1:])


def test_an_unknown_backend_is_refused_with_the_nearest():
    for check in (check_canon_backend, check_canon_backend_fits):
        with pytest.raises(UserError, match='canon_backend = "tritan".*Did you mean "triton"'):
            check("tritan")


def test_triton_on_a_cpu_is_refused_with_the_reason_but_may_be_planned(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    check_canon_backend_fits("triton")
    with pytest.raises(UserError, match='canon_backend = "triton".*CPU.*TRITON_INTERPRET.*"auto"'):
        check_canon_backend("triton", "cpu")


def test_a_missing_causal_conv1d_is_refused_with_the_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_canon_backend_fits("causal_conv1d")
    with pytest.raises(UserError, match='"causal_conv1d".*not installed: pip install.*"auto"'):
        Transformer(variant("nope ABCD"), canon_backend="causal_conv1d")
    with pytest.raises(UserError, match='"fla".*not installed: pip install.*"auto"'):
        Transformer(variant("nope ABCD"), canon_backend="fla")


@pytest.mark.parametrize("backend", ["compiled", "causal_conv1d", "fla", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_a_backend_can_not_take_goes_to_compiled(monkeypatch, backend, dtype):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(2, 9, 8, generator=generator, dtype=dtype) for _ in range(2))
    weight = torch.randn(16, 1, 4, generator=generator, dtype=dtype)
    options = {"residual": True, "activation": False}
    expected = canon(gate, weight[:8], **options, backend="reference")
    torch.testing.assert_close(canon(gate, weight[:8], **options, backend=backend), expected)
    for relu2 in (False, True):
        expected = canon_gate(gate, up, weight, **options, relu2=relu2, backend="reference")
        given = canon_gate(gate, up, weight, **options, relu2=relu2, backend=backend)
        torch.testing.assert_close(given, expected)


@pytest.mark.parametrize(
    "name", ["nope ABCD k2 no_res act standard documents", "rope BD k2 no_res gqa tied"]
)
def test_a_model_may_be_copied_and_pickled_and_gives_the_references_logits(name):
    args = variant(name)
    expected, model = build(args, canon_backend="reference"), build(args)
    tokens = random_tokens(args, rows=2, num_tokens=13)
    torch.testing.assert_close(copy.deepcopy(model)(tokens), expected(tokens))
    assert torch.equal(pickle.loads(pickle.dumps(model))(tokens), model(tokens))
