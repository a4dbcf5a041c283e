"""The whole model: against an independent implementation, causality by gradient, refusals."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import canon_pretrain.model.canon as canon_module
from canon_pretrain.errors import UserError
from canon_pretrain.model.args import POSITIONS, QK_NORMS, ModelArgs, flavor
from canon_pretrain.model.transformer import Transformer
from tests.reference_model import reference_logits

CANON_SETS = ("", "A", "B", "C", "D", "AC", "ABCD")
SMALL = ModelArgs(
    vocab_size=11, num_layers=2, dim=32, num_heads=4, ffn_dim=24, max_seq_len=12, init="lingua"
)
VARIANTS = [
    replace(SMALL, canon_set=canon_set, position=position, qk_norm=qk_norm)
    for canon_set, position, qk_norm in itertools.product(CANON_SETS, POSITIONS, QK_NORMS)
]


def _model(args: ModelArgs) -> Transformer:
    """Return a model whose norm gains differ from 1, so that a gain in the wrong place shows."""
    model = Transformer(args)
    model.init_weights()
    generator = torch.Generator().manual_seed(args.init_seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
    return model


def _variant_id(args: ModelArgs) -> str:
    return f"{args.position}-{args.canon_set or 'none'}-{args.qk_norm}"


def _influence(model: Transformer, num_tokens: int) -> torch.Tensor:
    """Return [T, T]: the largest |d logits[t] / d embedding[s]|, t in rows."""
    kept: list[torch.Tensor] = []

    def keep(_module, _inputs, output):
        output.retain_grad()
        kept.append(output)

    handle = model.tok_embeddings.register_forward_hook(keep)
    # copy t of the batch asks for logits[t] only: one backward pass gives the whole matrix
    tokens = torch.arange(num_tokens).expand(num_tokens, num_tokens) % model.args.vocab_size
    logits = model(tokens)
    handle.remove()
    weights = torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(0))
    (logits.diagonal(dim1=0, dim2=1).T @ weights).sum().backward()
    return kept[0].grad.abs().amax(dim=-1)


@pytest.mark.parametrize("args", VARIANTS, ids=_variant_id)
def test_no_token_sees_a_later_one_and_every_token_sees_all_before(args):
    influence = _influence(_model(args), num_tokens=7)
    assert torch.equal(influence.triu(1), torch.zeros_like(influence))
    assert (influence[torch.ones_like(influence).tril().bool()] > 0).all()


def test_the_causality_test_notices_a_canon_that_looks_ahead(monkeypatch):
    forward_in_time = canon_module.canon_reference

    def backward_in_time(x, weight, **options):
        return forward_in_time(x.flip(1), weight, **options).flip(1)

    monkeypatch.setattr(canon_module, "canon_reference", backward_in_time)
    influence = _influence(_model(replace(SMALL, canon_set="C")), num_tokens=7)
    assert (influence.triu(1) > 0).any()


def _canon_options(draw: st.DrawFn) -> dict[str, Any]:
    canon_set = "".join(draw(st.sets(st.sampled_from("ABCD"))))
    if not canon_set:
        return {}
    return {
        "canon_set": canon_set,
        "canon_kernel": draw(st.integers(2, 4)),
        "canon_residual": draw(st.booleans()),
        "canon_activation": draw(st.booleans()),
    }


@st.composite
def _configurations(draw: st.DrawFn) -> ModelArgs:
    position = draw(st.sampled_from([p for p in POSITIONS if "alibi" not in p]))
    num_heads = draw(st.sampled_from([4, 8] if position == "partial_rope_b" else [2, 4]))
    return ModelArgs(
        vocab_size=draw(st.integers(2, 20)),
        num_layers=draw(st.integers(1, 2)),
        dim=num_heads * draw(st.sampled_from([8, 16])),
        num_heads=num_heads,
        ffn_dim=draw(st.integers(1, 40)),
        max_seq_len=draw(st.integers(1, 9)),
        norm_eps=draw(st.sampled_from([1e-5, 1e-2])),
        position=position,
        rope_theta=draw(st.sampled_from([100.0, 10000.0])),
        **_canon_options(draw),
        qk_norm=draw(st.sampled_from(QK_NORMS)),
        init="lingua",
        init_seed=draw(st.integers(0, 100)),
    )


def _relative_error(given: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    given, expected = given.detach(), expected.detach()
    return float((given - expected).abs().max() / expected.abs().max().clamp_min(floor))


@settings(derandomize=True, deadline=None, max_examples=40)
@given(args=_configurations())
def test_logits_and_gradients_equal_the_independent_implementation(args):
    model = _model(args)
    generator = torch.Generator().manual_seed(args.init_seed)
    tokens = torch.randint(args.vocab_size, (2, args.max_seq_len), generator=generator)
    params = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    logits, expected = model(tokens), reference_logits(args, params, tokens)
    assert _relative_error(logits, expected) < 5e-5
    weights = torch.randn(logits.shape, generator=generator)
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    # some gradients are exactly zero (wq at one token): there, rounding is compared with the others
    floor = 1e-2 * max(float(p.grad.abs().max()) for p in params.values())
    for name, parameter in model.named_parameters():
        assert _relative_error(parameter.grad, params[name].grad, floor) < 5e-5, name


def test_parameter_names_are_the_interop_table():
    args = replace(SMALL, canon_set="ABCD", qk_norm="full", num_layers=1)
    with torch.device("meta"):
        names = {name.removesuffix(".weight") for name, _ in Transformer(args).named_parameters()}
    layer = {"attention_norm", "ffn_norm", "canon_a", "canon_c"}
    layer |= {f"attention.{n}" for n in ("wq", "wk", "wv", "wo", "q_norm", "k_norm", "canon_b")}
    layer |= {f"feed_forward.{n}" for n in ("w1", "w2", "w3", "canon_d")}
    assert names == {"tok_embeddings", "norm", "output"} | {f"layers.0.{n}" for n in layer}


def test_state_dict_holds_the_parameters_and_nothing_else():
    model = _model(SMALL)
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_absent_parts_leave_no_module_and_all_blocks_share_the_tables():
    block = _model(SMALL).layers["0"]
    assert block.canon_a is block.canon_c is block.attention.canon_b is None
    assert block.attention.q_norm is block.attention.k_norm is block.feed_forward.canon_d is None
    model = _model(SMALL)
    assert all(b.attention.rope is model.rope for b in model.layers.values())
    assert _model(replace(SMALL, position="nope")).rope is None


@pytest.mark.parametrize("changes", [{}, {"position": "alibi", "document_mask": True}], ids=str)
def test_blocks_are_passed_no_floats_but_the_hidden_state(changes):
    # FSDP2's mixed precision would cast any other floating-point argument to bfloat16
    seen = []
    model = _model(replace(SMALL, canon_set="ABCD", **changes))
    for block in model.layers.values():
        block.register_forward_pre_hook(
            lambda _module, args, kwargs: seen.append((args[1:], kwargs)), with_kwargs=True
        )
    model(torch.zeros(1, 3, dtype=torch.int64))
    assert len(seen) == SMALL.num_layers
    for others, kwargs in seen:
        tensors = [other for other in others if isinstance(other, torch.Tensor)]
        assert not kwargs and len(tensors) == (2 if changes else 0)
        assert not any(tensor.is_floating_point() for tensor in tensors)


def test_first_loss_is_close_to_uniform():
    args = flavor("debug")
    model = Transformer(args)
    model.init_weights()
    tokens = torch.arange(100).reshape(2, 50)
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    assert abs(loss.item() - torch.tensor(float(args.vocab_size)).log()) < 0.1


def test_bfloat16_model_runs_and_stays_close():
    args = replace(SMALL, canon_set="ABCD", qk_norm="full")
    tokens = torch.arange(10)[None]
    logits = _model(args).bfloat16()(tokens)
    assert logits.dtype == torch.bfloat16
    assert _relative_error(logits.float(), _model(args)(tokens)) < 0.1


def test_too_long_a_sequence_is_refused_with_both_numbers():
    with pytest.raises(UserError, match="13 tokens.*max_seq_len = 12"):
        _model(SMALL)(torch.zeros(1, 13, dtype=torch.int64))
    assert _model(SMALL)(torch.zeros(1, 12, dtype=torch.int64)).shape == (1, 12, 11)
