"""Requests, batches and scores of our lm_eval model; test_hf_equal.py compares with lm_eval's."""

import functools
import math
import os
import random
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from canon_pretrain.model.args import FLAVORS, ModelArgs
from canon_pretrain.model.transformer import Transformer
from eval.model.budget import (
    FILE,
    MAX_TOKENS,
    batch_tokens_for,
    find_largest,
    load_or_find,
)
from eval.model.lm import PASS_TOKENS, CanonLM, generation_request, request_cost
from eval.model.ranks import Ranks
from eval.model.score import Pair
from tests.scripted_lm import Bytes, Letters, LimitedMemory, requests
from tests.support import refused
from tests.variants import build, variant

FEW = (
    "rope standard gqa",
    "nope ABCD",
    "nope ABCD k2 no_res act standard documents",
    "alibi BD k2 act qk_full gqa",
    "h_alibi ABCD k3 no_res cst tied documents",
    "partial_rope_b ABCD cst qk_per_head gqa",
    "gla AC conv documents",
    "mamba2 AB",
    "gdn ABC moe",
)
LENGTH = 24


@functools.cache
def model_of(name):
    return build(variant(name)).eval()


def naive(model, tokens, count):
    """One row, one pass, one token after another, in float64."""
    with torch.no_grad():
        logits_TV = model(torch.tensor([tokens[:-1]]))[0].double()
    total, greedy = 0.0, True
    for t in range(len(tokens) - 1 - count, len(tokens) - 1):
        total += logits_TV[t].log_softmax(-1)[tokens[t + 1]].item()
        greedy &= int(logits_TV[t].argmax()) == tokens[t + 1]
    return total, greedy


def assert_equal(found, expected):
    assert [score for score, _ in found] == pytest.approx([s for s, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def words(max_size, min_size=0):
    """Texts of few letters: common prefixes and equal texts are frequent."""
    return st.text(alphabet="abc", min_size=min_size, max_size=max_size)


# a context may have several continuations
choices = st.lists(words(LENGTH // 2, 1) | words(LENGTH, 1), min_size=1, max_size=4)


@given(
    name=st.sampled_from(FEW),
    items=st.lists(st.tuples(words(12) | words(LENGTH + 6), choices), min_size=1, max_size=6),
    texts=st.lists(words(3 * LENGTH), max_size=3),
    batch_tokens=st.sampled_from([1, 13, 60, 1000]),
    read_tokens=st.sampled_from([1, 9, 50, 1000]),
    pass_tokens=st.sampled_from([0, 3, 1000]),
)
@settings(max_examples=25, deadline=None)
def test_requests_equal_explicit_loops(name, items, texts, batch_tokens, read_tokens, pass_tokens):
    """Around max_length: contexts keep their end, an empty one is EOS, texts have windows."""
    model, letters, costs = model_of(name), Letters(), list[int]()
    asked = [(context, choice) for context, choices in items for choice in choices]
    given = {"max_length": LENGTH, "batch_tokens": batch_tokens, "on_done": costs.append}
    lm, expected = CanonLM(model, letters, **given), []
    lm.read_tokens = read_tokens
    for context, continuation in asked:
        row = (letters.encode(context) or [letters.eos_id]) + letters.encode(continuation)
        expected.append(naive(model, row[-LENGTH - 1 :], len(continuation)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PASS_TOKENS, "cpu", pass_tokens)
        assert_equal(lm.loglikelihood(requests("loglikelihood", asked)), expected)
    rolled = []
    for text in texts:
        row, total = [letters.eos_id, *letters.encode(text)], 0.0
        for first in range(1, len(row), LENGTH):
            scored_here = min(LENGTH, len(row) - first)
            # the last window is as long as the others and overlaps with them
            window = row[: first + scored_here][-(LENGTH + 1) :]
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
    count = lambda _, given, logits: counts.append((given[0].numel(), logits.shape[0]))  # noqa: E731
    with model.register_forward_hook(count):
        CanonLM(model, None, max_length=80).score_pairs(pairs, [1] * len(pairs))
    # the context's last logits score the first token of each choice
    num_inputs, num_logits = map(sum, zip(*counts, strict=True))
    assert (num_inputs, num_logits) == (6 * (60 + 4 * 7), 6 * (1 + 4 * 7))


def test_nonfinite_logits_are_an_error():
    model = build(variant("rope")).eval()
    with torch.no_grad():
        model.tok_embeddings.weight[7] = math.nan
    lm, pairs = CanonLM(model, None, max_length=9), [Pair([5, 6, 8], 1), Pair([5, 7, 8], 1)]
    assert lm.score_pairs(pairs[:1], [1])
    with refused("eval.not_finite"):
        lm.score_pairs(pairs, [1, 1])


# ---- requests and memory

ARGS = ModelArgs(
    vocab_size=257, num_layers=2, dim=32, num_heads=4, ffn_dim=48, max_seq_len=64, position="rope"
)
MAX_LENGTH = 40
TEXT = "Now is better than never; though never is often better than *right* now, as is well known."


@pytest.fixture(scope="module")
def model():
    """A model with distinct logits, so that rounding changes no greedy answer; it writes text."""
    model = Transformer(ARGS)
    model.init_weights()
    assert model.output is not None
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 10 if weight.ndim == 2 else 1
        model.output.weight[[i for i in range(257) if not 32 < i < 127]] = 0.0
    return model.eval()


def scored(lm, given):
    return [score for score, _ in lm.loglikelihood(requests("loglikelihood", given))]


def generated(lm, given):
    return lm.generate_until(requests("generate_until", given))


def test_softmax_is_float32_for_a_bfloat16_model(model):
    half = Transformer(ARGS).eval()
    half.load_state_dict(model.state_dict())
    half.to(torch.bfloat16)
    row = list(range(30))
    ((score,),) = CanonLM(half, None, max_length=MAX_LENGTH).score_parts([row], [[20]])
    with torch.no_grad():
        logits = half(torch.tensor([row[:-1]]))[0].double()[-20:]
    exact = logits.log_softmax(-1)[torch.arange(20), torch.tensor(row[-20:])].sum().item()
    assert score == pytest.approx(exact, rel=1e-6)  # bfloat16 would be off by 1e-2


def test_impossible_requests_are_refused(model):
    lm = CanonLM(model, Bytes(), max_length=MAX_LENGTH, batch_tokens=150)
    for code, options in (
        ("eval.generation_options", {"num_beams": 4}),
        ("eval.generation_options", {"repetition_penalty": 1.2}),
        ("eval.max_length", {"max_gen_toks": MAX_LENGTH}),
    ):
        with refused(code):
            generated(lm, [("x", options)])
    for length in (0, 65):
        with refused("eval.max_length", given=length, expected=64):
            CanonLM(model, Bytes(), max_length=length)


class Pairs(Letters):
    """One token per letter, but "ab" is one."""

    def encode(self, text):
        return [39 if part == "ab" else super(Pairs, self).encode(part)[0]
                for part in re.findall("ab|.", text, re.DOTALL)]  # fmt: skip


@pytest.mark.parametrize(
    ("context", "continuation"),
    [("xa", "b"), ("ca", "b"), ("a", "b"), ("x", ""), ("", ""), ("x", "y" * (LENGTH + 1))],
)
def test_a_request_that_cannot_be_scored_stops_no_other(context, continuation):
    """A token across the boundary, no continuation, one longer than max_length."""
    costs: list[int] = []
    lm = CanonLM(model_of(FEW[1]), Pairs(), max_length=LENGTH, on_done=costs.append)
    good = [("xa", "cb"), ("c", "ab"), ("xac", "b")]
    alone = scored(lm, good)
    assert not lm.failures and all(map(math.isfinite, alone))
    costs.clear()
    asked = [good[0], (context, continuation), *good[1:]]
    given = requests("loglikelihood", asked)
    for number, request in enumerate(given):
        request.metadata = ("task", number, 1)
        request.__post_init__()
    first, failed, *others = (score for score, _ in lm.loglikelihood(given))
    assert [first, *others] == pytest.approx(alone, abs=1e-5) and math.isnan(failed)
    assert [*lm.failures] == [1]
    assert sum(costs) == sum(map(request_cost, given))


@pytest.mark.parametrize("blank", [" ", "\n", "\t ", "\u3000"])
def test_a_context_of_white_space_follows_eos(model, blank):
    """As an empty one; it is the beginning of the continuation, and said once."""
    lines: list[str] = []
    lm = CanonLM(model, Bytes(), max_length=MAX_LENGTH, log=lines.append)
    (expected,) = scored(lm, [("", f"{blank}word")])
    assert not lines
    asked = [(blank, "word"), ("well", " known"), (blank, "word")]
    found = scored(lm, asked)
    assert found[0] == found[2] == pytest.approx(expected, abs=1e-5)
    assert not lm.failures and len(lines) == 1


def test_do_sample_alone_samples_at_temperature_1():
    for options, expected in (
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.5}, 0.5),
        ({"do_sample": False}, 0.0),
    ):
        options |= {"until": [], "max_gen_toks": 3}
        assert generation_request([1, 2], options, MAX_LENGTH).temperature == expected


def test_out_of_memory_halves_the_budget(model):
    lines: list[str] = []
    limited: Any = LimitedMemory(model, 120)
    lm = CanonLM(limited, Bytes(), max_length=MAX_LENGTH, batch_tokens=2000, log=lines.append)
    reference = CanonLM(model, Bytes(), max_length=MAX_LENGTH)
    pairs = [(TEXT[n : n + 20], TEXT[n + 20 : n + k]) for n in range(40) for k in (22, 24)]
    assert scored(lm, pairs) == pytest.approx(scored(reference, pairs), abs=1e-4)
    assert len(lines) == 1 and lm.batch_tokens < 250
    prompts = [(TEXT[n : 2 * n], {"until": [], "max_gen_toks": 5}) for n in range(3, 30)]
    lm.batch_tokens = 2000
    assert generated(lm, prompts) == generated(reference, prompts)
    assert len(lines) == 2
    before = limited.refused
    generated(lm, prompts)  # the smaller budget is kept
    assert limited.refused == before
    too_small = CanonLM(LimitedMemory(model, 5), Bytes(), max_length=MAX_LENGTH, log=lines.append)
    with refused("eval.out_of_memory"):
        scored(too_small, [(TEXT[:20], "ab"), (TEXT[:20], "cd"), (TEXT[:3], "e")])


# ---- the token budget of a batch


def test_the_budget_is_found_once_per_model(tmp_path):
    lines: list[str] = []

    def found(key, tokens):
        lines.clear()
        return load_or_find(tmp_path / FILE, key, lambda: tokens, lines.append)

    assert found("a", 1000) == 1000
    assert found("b", 2000) == 2000 and str(tmp_path / FILE) in lines[0]
    assert found("a", 3000) == 1000 and not lines
    for damage in ("", '{"version": 2, "entries": []}', '{"a": -3}'):
        (tmp_path / FILE).write_text(damage)
        assert found("a", 1002) == found("a", 1003) == 1002


def test_a_cpu_budget_counts_the_states_of_short_rows(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 2**26, "SC_PAGE_SIZE": 2**12}.get)
    args = replace(FLAVORS["1b3"], mixer="gla", position="nope", num_heads=4, num_layers=200)
    model = SimpleNamespace(args=args, tok_embeddings=SimpleNamespace(weight=torch.empty(0)))
    tokens = batch_tokens_for(SimpleNamespace(model=model, ranks=Ranks()), tmp_path, print)
    state, logits = 4 * 4 * 256 * 512 * 200, 2 * 32000 * 4
    assert tokens == pytest.approx(2**35 / (state / 64 + logits), rel=1e-3)


def test_a_gpu_budget_is_doubled():
    assert find_largest(lambda n: 1 + n / 1e5 if n <= 5000 else None) == 4096  # memory is full
    # 8192 takes 0.092 s; doubling saves 6 % per token, the next 3 %
    assert find_largest(lambda n: 0.01 + n / 1e5) == 16384
    assert find_largest(lambda n: 1e6 + n / 1e5) == MAX_TOKENS
    with refused("eval.out_of_memory"):
        find_largest(lambda tokens: None)
