"""Generation with a cache against full passes, for every variant and batch layout."""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from canon_pretrain.model import decode
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.decode import generate, sample
from canon_pretrain.model.transformer import Transformer
from tests.support import refused
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
def test_tokens_and_logits_equal_full_passes(args):
    model, prompts = build(args), prompts_for(args)
    with recorded(model) as passes:
        together = generate(model, prompts, max_new_tokens=NEW)
    assert len(passes) == NEW
    # no graph, and no inference tensors, which fail in a later training step
    assert not any(logits.requires_grad or logits.is_inference() for logits in passes)
    with recorded(model) as passes_in_parts:  # one row per batch, 12 tokens per pass
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


@pytest.mark.parametrize("name", ["rope ABCD gqa", "alibi BD gqa"])
def test_rows_end_independently_and_keep_their_order(name):
    model = build(variant(name))
    prompts = prompts_for(model.args, (5, 1, 17, 2, 40, 17, 8))
    free = generate(model, prompts, max_new_tokens=NEW)
    limits = [NEW, 1, NEW, 7, NEW, 2, NEW]
    # find two ids for which answers end for all three reasons
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

    options = {"max_new_tokens": limits, "eos_id": eos_id, "stop": stop, "on_end": ended.append}
    for batch_tokens in (10_000, 120, 1):
        asked.clear()
        ended.clear()
        assert generate(model, prompts, batch_tokens=batch_tokens, **options) == expected
        assert sorted(ended) == list(range(len(prompts)))
        # once per token, with all tokens so far
        prefixes = [
            [(i, kept[: n + 1]) for n in range(len(kept))] for i, kept in enumerate(expected)
        ]
        assert sorted(asked) == sum(prefixes, [])
    with recorded(model) as passes:  # rows that have ended are not computed
        generate(model, [[5], [6, 7], [8]], max_new_tokens=[4, 1, 2])
    assert [len(logits) for logits in passes] == [3, 2, 1, 1]
    assert generate(model, [], max_new_tokens=3) == []


def test_batches_stay_within_budget_and_are_few():
    lengths, new, budget = [1 + 37 * i % 71 for i in range(40)], 20, 200
    found = list(decode.batches([[5] * n for n in lengths], [new] * 40, budget, 160))
    assert sorted(i for batch in found for i in batch) == list(range(40))
    for batch in found:
        assert len(batch) * (max(lengths[i] for i in batch) + new) <= budget
    assert len(found) <= math.ceil(sum(n + new for n in lengths) / budget * 1.25)


def test_generation_does_not_affect_training():
    """Generate between forward and backward, before the step, and under inference_mode."""

    def train(generates: bool) -> list[Tensor]:
        model = build(variant("partial_rope_a ABCD k2 no_res act cst relu2"))
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        seen = []

        def maybe_generate() -> None:
            if generates:
                generate(model, [[3, 4], [5]], max_new_tokens=5)
                with torch.inference_mode():
                    generate(model, [[3, 4], [5]], max_new_tokens=5)

        for step in range(3):
            tokens = random_tokens(model.args, 2, 20, seed=step)
            logits = model(tokens)
            maybe_generate()
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            maybe_generate()
            seen += [loss.detach(), *(p.grad.clone() for p in parameters)]
            optimizer.step()
            optimizer.zero_grad()
        assert model.training
        return seen + [p.detach() for p in model.parameters()]

    for with_it, without in zip(train(True), train(False), strict=True):
        assert torch.equal(with_it, without)


def test_samples_depend_on_the_seed_only():
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
    # near temperature 0 the most likely token is always drawn
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
def test_tokens_are_sampled_with_their_probabilities(temperature, top_k, top_p):
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
    with refused("generate.logits_not_finite"):
        sample(torch.full((1, 2), math.nan), draws[:1], 1.0, 0, 1.0)


REFUSED: list[tuple[str, list[list[int]], dict[str, Any]]] = [
    ("empty_prompt", [[1], []], {}),
    ("token_ids", [[1, 40]], {}),
    ("max_new_tokens", [[1], [2]], {"max_new_tokens": [1]}),
    ("max_new_tokens", [[1], [2]], {"max_new_tokens": [1, 0]}),
    ("sampling", [[1]], {"temperature": 1.0}),
    ("sampling", [[1]], {"temperature": -1.0}),
    ("sampling", [[1]], {"top_k": 3}),
    ("sampling", [[1]], {"top_p": 0.0}),
]


def test_bad_arguments_are_refused_before_any_pass():
    model = build(BASE)
    with recorded(model) as passes:
        for code, prompts, options in REFUSED:
            with refused(f"generate.{code}"):
                generate(model, prompts, **{"max_new_tokens": NEW, **options})
        with refused("model.sequence_too_long", prompt=1):
            generate(model, [[1] * 3, [1] * 152], max_new_tokens=NEW)
    assert not passes
