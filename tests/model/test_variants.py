"""Every variant: logits of the reference, causality by gradient, bfloat16."""

import itertools

import torch

from tests.reference_model import reference_logits
from tests.variants import build, every_variant, random_tokens


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
