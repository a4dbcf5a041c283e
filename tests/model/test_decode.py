"""Generation with a cache against whole passes, for every variant and however the rows are put."""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from canon_pretrain.core.errors import UserError
from canon_pretrain.model import decode
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.decode import generate, sample
from canon_pretrain.model.transformer import Transformer
from tests.variants import BASE, build, every_variant, random_tokens, variant

LENGTHS = (1, 3, 30, 9, 31)
NEW = 10


def prompts_for(args: ModelArgs, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [random_tokens(args, 1, n, seed=n)[0].tolist() for n in lengths]


@contextmanager
def recorded(model: Transformer) -> Iterator[list[Tensor]]:
    passes: list[Tensor] = []
    handle = model.register_forward_hook(lambda *given: passes.append(given[2]))
    yield passes
    handle.remove()


def whole_pass(model: Transformer, prompt: list[int], answer: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([prompt + answer[:-1]]))[0, len(prompt) - 1 :]


@every_variant
def test_tokens_and_logits_are_those_of_whole_passes(args):
    model, prompts = build(args), prompts_for(args)
    with recorded(model) as passes:
        together = generate(model, prompts, max_new_tokens=NEW)
    assert len(passes) == NEW  # the prompts at once, then a token at a time
    # no graph is kept; and no inference tensors, which a later training step could trip over
    assert not any(logits.requires_grad or logits.is_inference() for logits in passes)
    with recorded(model) as passes_in_parts:  # each for itself, 12 tokens at a time
        in_parts = generate(model, prompts, max_new_tokens=NEW, batch_tokens=12)
    assert len(passes_in_parts) == len(prompts) * NEW + 2 + 2
    assert together == in_parts == generate(model, prompts, max_new_tokens=NEW, read_tokens=30)
    longest_first = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    for row, i in enumerate(longest_first):
        expected = whole_pass(model, prompts[i], together[i])
        assert expected.argmax(-1).tolist() == together[i]
        found = torch.stack([logits_B1V[row, -1] for logits_B1V in passes])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def cut_answer(free: list[int], limit: int, eos_id: int, stop_id: int) -> tuple[list[int], str]:
    for place, token in enumerate(free[:limit]):
        if token in (eos_id, stop_id):
            is_eos = token == eos_id
            return free[: place + (not is_eos)], "eos" if is_eos else "stop"
    return free[:limit], "limit"


@pytest.mark.parametrize("name", ["rope ABCD k2 standard gqa", "alibi BD k2 act qk_full gqa"])
def test_rows_end_by_themselves_and_answers_keep_their_order(name):
    model = build(variant(name))
    prompts = prompts_for(model.args, (5, 1, 17, 2, 40, 17, 8))
    free = generate(model, prompts, max_new_tokens=NEW)
    limits = [NEW, 1, NEW, 7, NEW, 2, NEW]
    # two ids for which some answers end in each of the three ways
    for eos_id, stop_id in itertools.permutations(sorted({t for row in free for t in row}), 2):
        cut = [cut_answer(*given, eos_id, stop_id) for given in zip(free, limits, strict=True)]
        if {reason for _, reason in cut} == {"eos", "stop", "limit"}:
            break
    else:
        pytest.fail("no such ids")
    expected = [tokens for tokens, _ in cut]
    asked: list[tuple[int, list[int]]] = []
    ended: list[int] = []

    def stop(i: int, tokens: list[int]) -> bool:
        assert i not in ended
        asked.append((i, list(tokens)))
        return tokens[-1] == stop_id

    options = {"max_new_tokens": limits, "eos_id": eos_id, "stop": stop, "ended": ended.append}
    for batch_tokens in (10_000, 120, 1):
        asked.clear()
        ended.clear()
        assert generate(model, prompts, batch_tokens=batch_tokens, **options) == expected
        assert sorted(ended) == list(range(len(prompts)))
        # once a token, with all up to it
        assert sorted(asked) == [
            (i, kept[: n + 1]) for i, kept in enumerate(expected) for n in range(len(kept))
        ]
    with recorded(model) as passes:  # rows that ended are not computed
        generate(model, [[5], [6, 7], [8]], max_new_tokens=[4, 1, 2])
    assert [len(logits) for logits in passes] == [3, 2, 1, 1]
    assert generate(model, [], max_new_tokens=3) == []


def test_batches_stay_within_their_budget_and_are_few():
    lengths, new, budget = [1 + 37 * i % 71 for i in range(40)], 20, 200
    found = list(decode.batches([[5] * n for n in lengths], [new] * 40, budget, 160))
    assert sorted(i for batch in found for i in batch) == list(range(40))
    for batch in found:
        assert len(batch) * (max(lengths[i] for i in batch) + new) <= budget
    assert len(found) <= math.ceil(sum(n + new for n in lengths) / budget * 1.25)


def test_training_goes_on_as_if_nothing_had_been_asked():
    """Asked while a graph is held, between a backward pass and its step; under inference_mode."""

    def train(asks: bool) -> list[Tensor]:
        model = build(variant("partial_rope_a ABCD k2 no_res act cst relu2"))
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        seen = []

        def ask() -> None:
            if asks:
                generate(model, [[3, 4], [5]], max_new_tokens=5)
                with torch.inference_mode():
                    generate(model, [[3, 4], [5]], max_new_tokens=5)

        for step in range(3):
            tokens = random_tokens(model.args, 2, 20, seed=step)
            logits = model(tokens)
            ask()
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            ask()
            seen += [loss.detach(), *(p.grad.clone() for p in parameters)]
            optimizer.step()
            optimizer.zero_grad()
        assert model.training
        return seen + [p.detach() for p in model.parameters()]

    for with_it, without in zip(train(True), train(False), strict=True):
        assert torch.equal(with_it, without)


def test_draws_depend_on_the_seed_and_on_nothing_else():
    model = build(variant("rope AC no_res act standard_relu2 qk_full gqa tied documents"))
    prompts = prompts_for(model.args, (5, 1, 17, 2, 40))

    def drawn(seed: int, **options: Any) -> list[list[int]]:
        options |= {"max_new_tokens": 15, "top_k": 30}
        generator = torch.Generator().manual_seed(seed)
        options |= {"temperature": 0.9, "top_p": 0.95, "generator": generator}
        return generate(model, prompts, **options)

    torch.manual_seed(0)
    first = drawn(1)
    torch.manual_seed(7)
    assert first == drawn(1) == drawn(1, batch_tokens=1) == drawn(1, batch_tokens=90)
    assert first != drawn(2)
    greedy = generate(model, prompts, max_new_tokens=15)
    assert all(a != b for a, b in zip(first, greedy, strict=True))
    # draws are of the whole passes' distribution: the only likely id is always taken
    cold = {"temperature": 1e-4, "generator": torch.Generator().manual_seed(3)}
    assert generate(model, prompts, max_new_tokens=15, **cold) == greedy


def expected_probabilities(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> list[float]:
    ranked = sorted(range(len(logits)), key=lambda i: -logits[i])[: top_k or None]
    weights = {i: math.exp((logits[i] - max(logits)) / temperature) for i in ranked}
    nucleus: dict[int, float] = {}
    for i in ranked:
        if sum(nucleus.values()) < top_p:
            nucleus[i] = weights[i] / sum(weights.values())
    return [nucleus.get(i, 0.0) / sum(nucleus.values()) for i in range(len(logits))]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.5, 0, 1.0), (2.0, 3, 1.0), (1.0, 0, 0.6), (1.3, 5, 0.7), (1.0, 0, 1e-9)],
)
def test_ids_are_drawn_with_their_probabilities(temperature, top_k, top_p):
    logits = torch.randn(11, generator=torch.Generator().manual_seed(0)) * 2
    num_draws = 20_000
    draws = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws
    ids = sample(logits.expand(num_draws, -1), draws, temperature, top_k, top_p)
    found = torch.bincount(ids, minlength=11) / num_draws
    expected = expected_probabilities(logits.tolist(), temperature, top_k, top_p)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=2 / num_draws)
    likely = {i for i, probability in enumerate(expected) if probability}
    edges = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert set(sample(logits.expand(2, -1), edges, temperature, top_k, top_p).tolist()) <= likely
    with pytest.raises(UserError, match="not finite"):
        sample(torch.full((1, 2), math.nan), draws[:1], 1.0, 0, 1.0)


REFUSED: list[tuple[list[list[int]], dict[str, Any], str]] = [
    ([[1], []], {}, "prompt 1"),
    ([[1, 40]], {}, "prompt 0"),
    ([[1] * 3, [1] * 152], {}, "max_seq_len"),
    ([[1], [2]], {"max_new_tokens": [1]}, "max_new_tokens"),
    ([[1], [2]], {"max_new_tokens": [1, 0]}, "prompt 1"),
    ([[1]], {"temperature": 1.0}, "Generator"),
    ([[1]], {"temperature": -1.0}, "temperature"),
    ([[1]], {"top_k": 3}, "temperature"),
    ([[1]], {"top_p": 0.0}, "top_p"),
]


def test_what_can_not_be_done_is_refused_before_anything_is_computed():
    model = build(BASE)
    for prompts, options, match in REFUSED:
        with recorded(model) as passes, pytest.raises(UserError, match=match):
            generate(model, prompts, **{"max_new_tokens": NEW, **options})
        assert not passes
