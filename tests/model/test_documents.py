"""Documents: the numbers, and packed documents against documents by themselves."""

from dataclasses import replace

import pytest
import torch

from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.attend import Attend
from canon_pretrain.model.cache import Cache, document_numbers
from canon_pretrain.model.transformer import Transformer
from tests.variants import BASE, EOS_ID, VARIANTS, build, variant

WITH_DOCUMENTS = [name for name, args in VARIANTS.items() if args.document_mask]
# lengths 1, 2 and 3 are shorter than Canon's reach; the last document has no end yet
DOCUMENTS = (
    (5, 9, 17, 4, EOS_ID),
    (EOS_ID,),
    (8, EOS_ID),
    (3, 3, EOS_ID),
    (21, 6, 7, 30, 11, 13, EOS_ID),
    (12, 9, 14, 1),
)


def test_eos_belongs_to_the_document_that_it_ends():
    tokens = torch.tensor([[4, 2, 2, 5, 6, 2, 7], [2, 4, 5, 6, 7, 8, 2]])
    expected = [[0, 0, 1, 2, 2, 2, 3], [0, 1, 1, 1, 1, 1, 1]]
    assert document_numbers(tokens, EOS_ID).tolist() == expected
    first = torch.tensor([10, 20], dtype=torch.int32)
    numbers = document_numbers(tokens, EOS_ID, first)
    assert numbers.tolist() == [[10 + n for n in expected[0]], [20 + n for n in expected[1]]]
    assert numbers.dtype == torch.int32


def test_documents_are_numbered_on_from_part_to_part():
    args = replace(BASE, document_mask=True)
    tokens = torch.randint(0, 5, (3, 30), generator=torch.Generator().manual_seed(0))
    model, cache, parts = build(args), Cache(args.num_layers), []
    for part in tokens.split([1, 4, 13, 12], dim=1):
        parts.append(model._segments(part, None, cache))
    assert torch.equal(torch.cat(parts, dim=1), document_numbers(tokens, EOS_ID))


def _weights(args: ModelArgs) -> torch.Tensor:
    """What the logits are multiplied with before they are summed, [T, V]."""
    num_tokens = sum(len(document) for document in DOCUMENTS)
    return torch.randn(num_tokens, args.vocab_size, generator=torch.Generator().manual_seed(0))


def _packed(model: Transformer) -> torch.Tensor:
    return model(torch.tensor([[token for document in DOCUMENTS for token in document]]))[0]


def _separate(model: Transformer) -> torch.Tensor:
    return torch.cat([model(torch.tensor([document]))[0] for document in DOCUMENTS])


def _gradients(model: Transformer, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (logits * _weights(model.args)).sum().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", WITH_DOCUMENTS)
def test_packed_documents_equal_separate_ones_in_logits_and_all_gradients(name):
    model = build(variant(name))
    packed, separate = _packed(model), _separate(model)
    torch.testing.assert_close(packed, separate, rtol=1e-4, atol=1e-5)
    given, expected = _gradients(model, packed), _gradients(model, separate)
    wanted = {n for n, p in model.named_parameters() if p.requires_grad}
    assert given.keys() == expected.keys() == wanted
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for parameter, gradient in expected.items():
        scale = gradient.abs().max().clamp_min(1e-2 * largest)
        assert (given[parameter] - gradient).abs().max() < 5e-5 * scale, parameter


def _crossed(model: Transformer) -> torch.Tensor:
    """Which tokens of the packed documents differ from those of separate ones, bool [T]."""
    with torch.no_grad():
        return ((_packed(model) - _separate(model)).abs() > 1e-4).any(dim=-1)


@pytest.mark.parametrize("name", [*WITH_DOCUMENTS, "alibi", "h_alibi", "rope ABCD", "nope BD"])
def test_without_the_option_documents_are_mixed(name):
    name = name.replace(" documents", "")
    crossed = _crossed(build(variant(name)))
    assert not crossed[: len(DOCUMENTS[0])].any()
    assert crossed[len(DOCUMENTS[0]) :].all()


@pytest.mark.parametrize("kernel", [2, 4])
@pytest.mark.parametrize("canon_set", ["A", "B", "C", "D"])
def test_each_canon_site_alone_stops_at_a_documents_start(monkeypatch, canon_set, kernel):
    # attention that mixes no tokens: each reads its own value
    monkeypatch.setattr(Attend, "forward", lambda self, q, k, v, mask: v)
    args = replace(BASE, num_layers=1, canon_set=canon_set, canon_kernel=kernel)
    assert not _crossed(build(replace(args, document_mask=True))).any()
    reached = [i < kernel - 1 for document in DOCUMENTS for i in range(len(document))]
    reached[: len(DOCUMENTS[0])] = [False] * len(DOCUMENTS[0])
    assert _crossed(build(args)).tolist() == reached
