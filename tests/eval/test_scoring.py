"""Shared prefixes: the same scores as one row at a time, with fewer tokens read."""

import functools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from canon_pretrain.model.transformer import Transformer
from eval.model.lm import CanonLM, request_cost
from eval.model.score import Answer, Batch, Pair, Planner, score_batch
from tests.scripted_lm import Letters, requests
from tests.support import refused
from tests.variants import VARIANTS, build

FEW = (
    "rope standard gqa",
    "nope ABCD",
    "nope ABCD k2 no_res act standard documents",
    "alibi BD k2 act qk_full gqa",
    "h_alibi ABCD k3 no_res cst tied documents",
    "partial_rope_b ABCD cst qk_per_head gqa",
)
MAX_LENGTH = 24


@functools.cache
def model_of(name: str) -> Transformer:
    return build(VARIANTS[name]).eval()


def naive(model: Transformer, tokens: list[int], count: int) -> Answer:
    """One row, one pass, one token after another, in float64."""
    with torch.no_grad():
        logits_TV = model(torch.tensor([tokens[:-1]]))[0].double()
    total, greedy = 0.0, True
    for t in range(len(tokens) - 1 - count, len(tokens) - 1):
        total += logits_TV[t].log_softmax(-1)[tokens[t + 1]].item()
        greedy &= int(logits_TV[t].argmax()) == tokens[t + 1]
    return total, greedy


def scored(
    model: Transformer, pairs: list[Pair], planner: Planner
) -> tuple[list[Answer], list[Batch]]:
    plan = planner.plan(pairs)
    found: dict[int, Answer] = {}
    for batch in plan:
        answers = score_batch(model, planner, pairs, batch)
        assert sorted(answers) == sorted(batch.pairs) and not answers.keys() & found.keys()
        found |= answers
    return [found[index] for index in range(len(pairs))], plan


def assert_equal(found: list[Answer], expected: list[Answer]) -> None:
    assert [score for score, _ in found] == pytest.approx([s for s, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


# few distinct tokens: prefixes and equal sequences are frequent
tokens = st.lists(st.integers(1, 4), min_size=0, max_size=12)
items = st.lists(
    st.tuples(tokens, st.lists(tokens.filter(bool), min_size=1, max_size=4)), min_size=1, max_size=6
)


@given(
    name=st.sampled_from(FEW),
    items=items,
    batch_tokens=st.sampled_from([1, 13, 60, 1000]),
    read_tokens=st.sampled_from([1, 9, 50, 1000]),
    pass_tokens=st.sampled_from([0, 3, 1000]),
)
@settings(max_examples=25, deadline=None)
def test_scores_equal_one_row_at_a_time(name, items, batch_tokens, read_tokens, pass_tokens):
    model = model_of(name)
    asked = [(context, choice) for context, choices in items for choice in choices]
    pairs = [Pair([5, *context, *choice], len(choice)) for context, choice in asked]
    found, _ = scored(model, pairs, Planner(batch_tokens, read_tokens, pass_tokens))
    assert_equal(found, [naive(model, pair.tokens, pair.count) for pair in pairs])


words = st.text(alphabet="abcd", max_size=MAX_LENGTH + 6)


@given(
    name=st.sampled_from(FEW),
    asked=st.lists(
        st.tuples(words, st.text(alphabet="abcd", min_size=1, max_size=MAX_LENGTH)),
        min_size=1,
        max_size=8,
    ),
    texts=st.lists(st.text(alphabet="abcd", max_size=3 * MAX_LENGTH), max_size=3),
    batch_tokens=st.sampled_from([5, 40, 1000]),
)
@settings(max_examples=25, deadline=None)
def test_requests_equal_explicit_loops(name, asked, texts, batch_tokens):
    """Around max_length: contexts keep their end, an empty one is EOS, texts have windows."""
    model, letters, costs = model_of(name), Letters(), list[int]()
    given = {"max_length": MAX_LENGTH, "batch_tokens": batch_tokens, "on_done": costs.append}
    lm, expected = CanonLM(model, letters, **given), []
    for context, continuation in asked:
        row = (letters.encode(context) or [letters.eos_id]) + letters.encode(continuation)
        expected.append(naive(model, row[-MAX_LENGTH - 1 :], len(continuation)))
    assert_equal(lm.loglikelihood(requests("loglikelihood", asked)), expected)
    rolled = []
    for text in texts:
        row, total = [letters.eos_id, *letters.encode(text)], 0.0
        for first in range(1, len(row), MAX_LENGTH):
            scored_here = min(MAX_LENGTH, len(row) - first)
            # the last window is as long as the others and overlaps with them
            window = row[: first + scored_here][-(MAX_LENGTH + 1) :]
            total += naive(model, window, scored_here)[0]
        rolled.append(total)
    rolling = requests("loglikelihood_rolling", [(t,) for t in texts])
    assert lm.loglikelihood_rolling(rolling) == pytest.approx(rolled, abs=1e-4)
    assert sum(costs) == sum(map(request_cost, requests("loglikelihood", asked) + rolling))


def test_the_context_of_choices_is_read_once():
    model, draw, pairs = model_of("nope ABCD"), random.Random(0), list[Pair]()
    for _ in range(6):
        before = draw.choices(range(3, 40), k=60)
        pairs += [Pair(before + draw.choices(range(3, 40), k=8), 8) for _ in range(4)]
    counts: list[tuple[int, int]] = []
    handle = model.register_forward_hook(
        lambda _, given, logits: counts.append((given[0].numel(), logits.shape[0]))
    )
    scored(model, pairs, Planner(100_000, 100_000))
    handle.remove()
    # the context's last logits score the first token of each choice
    assert [sum(column) for column in zip(*counts, strict=True)] == [
        6 * (60 + 4 * 7),
        6 * (1 + 4 * 7),
    ]


def test_nonfinite_logits_are_an_error():
    model = build(VARIANTS["rope"]).eval()
    with torch.no_grad():
        model.tok_embeddings.weight[7] = math.nan
    planner = Planner(1000, 1000)
    pairs = [Pair([5, 6, 8], 1), Pair([5, 7, 8], 1)]
    assert scored(model, pairs[:1], planner)
    with refused("eval.not_finite"):
        scored(model, pairs, planner)
