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
    """The model of a variant."""
    return build(variant(name)).eval()


def naive(model, tokens, count):
    """One row, one pass, one token after another, in float64."""
    with torch.no_grad():
        logits_TV = model(torch.tensor([tokens[:-1]]))[0].double()
    total = 0.0
    is_greedy = True
    for t in range(len(tokens) - 1 - count, len(tokens) - 1):
        total += logits_TV[t].log_softmax(-1)[tokens[t + 1]].item()
        is_greedy &= int(logits_TV[t].argmax()) == tokens[t + 1]
    return total, is_greedy


def assert_equal(answers, expected):
    """Compare answers of a log-likelihood and whether it is greedy."""
    scores = [score for score, _ in answers]
    assert scores == pytest.approx([score for score, _ in expected], abs=1e-4)
    assert [is_greedy for _, is_greedy in answers] == [is_greedy for _, is_greedy in expected]


def texts(max_size, min_size=0):
    """Texts of few letters: common prefixes and equal texts are frequent."""
    return st.text(alphabet="abc", min_size=min_size, max_size=max_size)


# a context may have several continuations
choices = st.lists(texts(LENGTH // 2, 1) | texts(LENGTH, 1), min_size=1, max_size=4)


@given(
    name=st.sampled_from(FEW),
    items=st.lists(st.tuples(texts(12) | texts(LENGTH + 6), choices), min_size=1, max_size=6),
    batch_tokens=st.sampled_from([1, 13, 60, 1000]),
    read_tokens=st.sampled_from([1, 9, 50, 1000]),
    pass_tokens=st.sampled_from([0, 3, 1000]),
)
@settings(max_examples=25, deadline=None)
def test_loglikelihoods_equal_explicit_loops(name, items, batch_tokens, read_tokens, pass_tokens):
    """Around max_length: contexts keep their end, an empty one is EOS."""
    model = model_of(name)
    letters = Letters()
    costs: list[int] = []
    pairs = [(context, choice) for context, choices in items for choice in choices]
    expected = []
    for context, continuation in pairs:
        row = (letters.encode(context) or [letters.eos_id]) + letters.encode(continuation)
        expected.append(naive(model, row[-LENGTH - 1 :], len(continuation)))

    lm = CanonLM(model, letters, max_length=LENGTH, batch_tokens=batch_tokens, on_done=costs.append)
    lm.read_tokens = read_tokens
    batch = requests("loglikelihood", pairs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PASS_TOKENS, "cpu", pass_tokens)
        answers = lm.loglikelihood(batch)

    assert_equal(answers, expected)
    assert sum(costs) == sum(map(request_cost, batch))


def naive_rolling(model, letters, text):
    """The log-likelihood of a text in windows, one after another."""
    row = [letters.eos_id, *letters.encode(text)]
    total = 0.0
    for first in range(1, len(row), LENGTH):
        num_scored = min(LENGTH, len(row) - first)
        # the last window is as long as the others and overlaps with them
        window = row[: first + num_scored][-(LENGTH + 1) :]
        total += naive(model, window, num_scored)[0]
    return total


@given(
    name=st.sampled_from(FEW),
    whole_texts=st.lists(texts(3 * LENGTH), max_size=3),
    batch_tokens=st.sampled_from([1, 13, 60, 1000]),
    read_tokens=st.sampled_from([1, 9, 50, 1000]),
)
@settings(max_examples=25, deadline=None)
def test_rolling_equals_explicit_loops(name, whole_texts, batch_tokens, read_tokens):
    """Around max_length: texts have windows."""
    model = model_of(name)
    letters = Letters()
    costs: list[int] = []
    expected = [naive_rolling(model, letters, text) for text in whole_texts]

    lm = CanonLM(model, letters, max_length=LENGTH, batch_tokens=batch_tokens, on_done=costs.append)
    lm.read_tokens = read_tokens
    batch = requests("loglikelihood_rolling", [(text,) for text in whole_texts])
    answers = lm.loglikelihood_rolling(batch)

    assert answers == pytest.approx(expected, abs=1e-4)
    assert sum(costs) == sum(map(request_cost, batch))


def test_the_context_of_choices_is_read_once():
    model = model_of("nope ABCD")
    draw = random.Random(0)
    pairs: list[Pair] = []
    for _ in range(6):
        context = draw.choices(range(3, 40), k=60)
        pairs += [Pair(context + draw.choices(range(3, 40), k=8), 8) for _ in range(4)]

    num_inputs = 0
    num_logits = 0

    def count(module, inputs, logits):
        nonlocal num_inputs, num_logits
        num_inputs += inputs[0].numel()
        num_logits += logits.shape[0]

    with model.register_forward_hook(count):
        CanonLM(model, None, max_length=80).score_pairs(pairs, [1] * len(pairs))

    # the context's last logits score the first token of each choice
    assert num_inputs == 6 * (60 + 4 * 7)
    assert num_logits == 6 * (1 + 4 * 7)


def test_nonfinite_logits_are_an_error():
    model = build(variant("rope")).eval()
    with torch.no_grad():
        model.tok_embeddings.weight[7] = math.nan
    lm = CanonLM(model, None, max_length=9)
    finite = Pair([5, 6, 8], 1)
    not_finite = Pair([5, 7, 8], 1)

    assert lm.score_pairs([finite], [1])
    with refused("eval.not_finite"):
        lm.score_pairs([finite, not_finite], [1, 1])


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


def scored(lm, pairs):
    """Return the log-likelihoods of pairs of a context and a continuation."""
    return [score for score, _ in lm.loglikelihood(requests("loglikelihood", pairs))]


def generated(lm, prompts):
    """Return the answers to pairs of a context and options."""
    return lm.generate_until(requests("generate_until", prompts))


def test_softmax_is_float32_for_a_bfloat16_model(model):
    half = Transformer(ARGS).eval()
    half.load_state_dict(model.state_dict())
    half.to(torch.bfloat16)
    row = list(range(30))
    with torch.no_grad():
        logits = half(torch.tensor([row[:-1]]))[0].double()[-20:]
    exact = logits.log_softmax(-1)[torch.arange(20), torch.tensor(row[-20:])].sum().item()

    ((score,),) = CanonLM(half, None, max_length=MAX_LENGTH).score_parts([row], [[20]])

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
    assert not lm.failures
    assert all(map(math.isfinite, alone))
    costs.clear()

    batch = requests("loglikelihood", [good[0], (context, continuation), *good[1:]])
    for number, request in enumerate(batch):
        request.metadata = ("task", number, 1)
        request.__post_init__()
    first, failed, *others = [score for score, _ in lm.loglikelihood(batch)]

    assert [first, *others] == pytest.approx(alone, abs=1e-5)
    assert math.isnan(failed)
    assert [*lm.failures] == [1]
    assert sum(costs) == sum(map(request_cost, batch))


@pytest.mark.parametrize("blank", [" ", "\n", "\t ", "\u3000"])
def test_a_context_of_white_space_follows_eos(model, blank):
    """As an empty one; it is the beginning of the continuation, and said once."""
    lines: list[str] = []
    lm = CanonLM(model, Bytes(), max_length=MAX_LENGTH, log=lines.append)
    (expected,) = scored(lm, [("", f"{blank}word")])
    assert not lines

    first, _, again = scored(lm, [(blank, "word"), ("well", " known"), (blank, "word")])

    assert first == again == pytest.approx(expected, abs=1e-5)
    assert not lm.failures
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("options", "temperature"),
    [
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.5}, 0.5),
        ({"do_sample": False}, 0.0),
    ],
    ids=["sample", "temperature", "greedy"],
)
def test_do_sample_alone_samples_at_temperature_1(options, temperature):
    request = generation_request([1, 2], options | {"until": [], "max_gen_toks": 3}, MAX_LENGTH)

    assert request.temperature == temperature


def test_out_of_memory_halves_the_budget(model):
    lines: list[str] = []
    limited: Any = LimitedMemory(model, 120)
    lm = CanonLM(limited, Bytes(), max_length=MAX_LENGTH, batch_tokens=2000, log=lines.append)
    reference = CanonLM(model, Bytes(), max_length=MAX_LENGTH)

    pairs = [(TEXT[n : n + 20], TEXT[n + 20 : n + k]) for n in range(40) for k in (22, 24)]
    assert scored(lm, pairs) == pytest.approx(scored(reference, pairs), abs=1e-4)
    assert len(lines) == 1
    assert lm.batch_tokens < 250

    prompts = [(TEXT[n : 2 * n], {"until": [], "max_gen_toks": 5}) for n in range(3, 30)]
    lm.batch_tokens = 2000
    assert generated(lm, prompts) == generated(reference, prompts)
    assert len(lines) == 2

    # the smaller budget is kept
    num_refused = limited.refused
    generated(lm, prompts)
    assert limited.refused == num_refused


# ---- the token budget of a batch


def test_memory_for_no_row_is_an_error(model):
    lm = CanonLM(LimitedMemory(model, 5), Bytes(), max_length=MAX_LENGTH, log=print)

    with refused("eval.out_of_memory"):
        scored(lm, [(TEXT[:20], "ab"), (TEXT[:20], "cd"), (TEXT[:3], "e")])


def test_the_budget_is_found_once_per_model(tmp_path):
    lines: list[str] = []
    path = tmp_path / FILE

    def budget_of(key, tokens):
        """Return the stored budget of a model, or `tokens`."""
        lines.clear()
        return load_or_find(path, key, lambda: tokens, lines.append)

    assert budget_of("a", 1000) == 1000
    assert budget_of("b", 2000) == 2000
    assert str(path) in lines[0]
    assert budget_of("a", 3000) == 1000
    assert not lines

    for damage in ("", '{"version": 2, "entries": []}', '{"a": -3}'):
        path.write_text(damage)
        assert budget_of("a", 1002) == 1002
        assert budget_of("a", 1003) == 1002


def test_a_cpu_budget_counts_the_states_of_short_rows(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 2**26, "SC_PAGE_SIZE": 2**12}.get)
    args = replace(FLAVORS["1b3"], mixer="gla", position="nope", num_heads=4, num_layers=200)
    model = SimpleNamespace(args=args, tok_embeddings=SimpleNamespace(weight=torch.empty(0)))

    tokens = batch_tokens_for(SimpleNamespace(model=model, ranks=Ranks()), tmp_path, print)

    memory_bytes = 2**38
    state_bytes = 4 * 4 * 256 * 512 * 200  # per row, of 64 tokens at least
    logits_bytes = 2 * 32000 * 4
    budget = memory_bytes / 8
    assert tokens == pytest.approx(budget / (state_bytes / 64 + logits_bytes), rel=1e-3)


def test_a_gpu_budget_is_doubled():
    assert find_largest(lambda n: 1 + n / 1e5 if n <= 5000 else None) == 4096  # memory is full
    # 8192 takes 0.092 s; doubling saves 6 % per token, the next 3 %
    assert find_largest(lambda n: 0.01 + n / 1e5) == 16384
    assert find_largest(lambda n: 1e6 + n / 1e5) == MAX_TOKENS
    with refused("eval.out_of_memory"):
        find_largest(lambda tokens: None)
