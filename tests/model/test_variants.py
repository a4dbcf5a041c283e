"""Every variant: logits of the reference, causality by gradient, bfloat16."""

import itertools

import pytest
import torch

from tests.reference_model import reference_logits
from tests.variants import NAMES, build, every_variant, random_tokens, variant


def _relative_error(found, expected, floor=0.0):
    found, expected = found.detach(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(floor))


@every_variant
def test_logits_and_gradients_equal_the_reference(args):
    model, tokens = build(args), random_tokens(args, rows=2, num_tokens=11)
    params = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    logits, expected = model(tokens), reference_logits(args, params, tokens)
    assert logits.shape == (*tokens.shape, args.vocab_size)
    assert _relative_error(logits, expected) < 5e-5
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    # some gradients are exactly zero: compare their rounding with the others
    floor = 1e-2 * max(float(p.grad.abs().max()) for p in params.values())
    for name, parameter in model.named_parameters():
        if "canon" in name and not args.canon_trainable:
            assert not parameter.requires_grad and parameter.grad is None, name
        else:
            assert _relative_error(parameter.grad, params[name].grad, floor) < 5e-5, name


def test_gpt2_equals_that_of_transformers():
    """LayerNorm, gelu and biases, without positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = build(variant("nope gpt2 tied"))
    a, ours = model.args, model.state_dict()
    sizes = {"n_layer": a.num_layers, "n_embd": a.dim, "n_head": a.num_heads, "n_inner": a.ffn_dim}
    config = GPT2Config(vocab_size=a.vocab_size, n_positions=a.max_seq_len, **sizes)
    theirs = GPT2LMHeadModel(config).eval()
    state = {"wpe.weight": torch.zeros(a.max_seq_len, a.dim)}
    state["wte.weight"] = ours["tok_embeddings.weight"]
    names = {"attention_norm": "ln_1", "attention.wo": "attn.c_proj", "ffn_norm": "ln_2"}
    names |= {"feed_forward.w1": "mlp.c_fc", "feed_forward.w2": "mlp.c_proj"}
    for end in ("weight", "bias"):
        state[f"ln_f.{end}"] = ours[f"norm.{end}"]
        for i in range(a.num_layers):
            layer = f"layers.{i}"
            qkv = torch.cat([ours[f"{layer}.attention.w{name}.{end}"] for name in "qkv"])
            state[f"h.{i}.attn.c_attn.{end}"] = qkv.T if end == "weight" else qkv
            for our_name, their_name in names.items():
                value = ours[f"{layer}.{our_name}.{end}"]
                state[f"h.{i}.{their_name}.{end}"] = value.T if value.ndim == 2 else value
    theirs.transformer.load_state_dict(state)
    tokens = random_tokens(a, rows=2, num_tokens=24)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def _influence(model, tokens_T):
    kept = []

    def keep(_module, _inputs, output):
        output.retain_grad()
        kept.append(output)

    handle = model.tok_embeddings.register_forward_hook(keep)
    # row t of the batch uses logits[t] only: one backward pass computes the whole matrix
    logits = model(tokens_T.expand(len(tokens_T), -1))
    handle.remove()
    weights = torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(0))
    (logits.diagonal(dim1=0, dim2=1).T @ weights).sum().backward()
    return kept[0].grad.abs().amax(dim=-1)


# 2 is EOS, which ends its document
TOKENS = (7, 5, 2, 9, 11, 4, 2, 2, 6)
DOCUMENTS = ((0, 1, 2), (3, 4, 5, 6), (7,), (8,))


@every_variant
def test_tokens_depend_on_earlier_ones_of_their_document(args):
    influence = _influence(build(args), torch.tensor(TOKENS))
    everything = tuple(range(len(TOKENS)))
    expected = torch.zeros_like(influence, dtype=torch.bool)
    for document in DOCUMENTS if args.document_mask else (everything,):
        for t, s in itertools.product(document, document):
            expected[t, s] = s <= t
    assert torch.equal(influence != 0, expected)


@pytest.mark.parametrize("name", NAMES[::4])
def test_bfloat16_stays_close_to_float32(name):
    args = variant(name)
    tokens = random_tokens(args, rows=2, num_tokens=24)
    model = build(args).bfloat16()
    logits = model(tokens).detach()
    assert logits.dtype == torch.bfloat16
    expected = model.float()(tokens).detach()  # the same weights, those of 8 bits
    difference = (logits.float() - expected).norm() / expected.norm()
    assert 0 < difference < 0.03
