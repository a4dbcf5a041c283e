"""Lano and its grammars beside enumeration, a plain recursive parser and a recursive generator."""

import functools
import itertools
import random
import time

import numpy as np
import pytest
from scipy import stats

from canon_pretrain.synthetic.grammar import Grammar
from canon_pretrain.synthetic.lano import Lano
from tests.support import refused
from tests.synthetic.distributions import counted

BOS = 4
AMBIGUOUS = "6 -> 5 5 | 5 5 5\n5 -> 4 4 | 4 4 4\n4 -> 1 1 | 1 1 1 | 1 2 | 2 1 3"
# cfg3f below symbol 16, read from figure 18; letters are symbols: j = 10, ... p = 16
CFG3F = (
    "p oo mom nm nn,m kl lkl jlk,n jl ljl lk jll,o jkk kkj jj llk,"
    "j 899 979 799,k 88 97 977,l 797 98 889,"
    "7 221 322 312 32,8 311 12 331,9 121 33 11,6 55 555,5 44 444,4 11 111 12 213"
)
RULES = {line[0]: line[2:].split() for line in CFG3F.split(",")}
PLACES = 28


def derivations(symbol):
    """Return the codes, lengths and probabilities of all derivations; a token is two bits of
    the code, the first token the highest two of 56."""
    if symbol not in RULES:
        return np.array([int(symbol) << 2 * (PLACES - 1)]), np.array([1]), np.ones(1)
    by_rule = []
    for rule in RULES[symbol]:
        codes = np.zeros(1, int)
        lengths = np.zeros(1, int)
        weights = np.ones(1) / len(RULES[symbol])
        # All combinations of what was derived so far and of what the next child derives
        for child_codes, child_lengths, child_weights in map(derivations, rule):
            codes = (codes[:, None] + (child_codes >> 2 * lengths[:, None])).ravel()
            lengths = (lengths[:, None] + child_lengths).ravel()
            weights = (weights[:, None] * child_weights).ravel()
        by_rule.append((codes, lengths, weights))
    return tuple(map(np.concatenate, zip(*by_rule, strict=True)))


def is_derived(rules, root, text):
    """Return whether `root` derives the text, by plain recursive descent."""

    @functools.cache
    def ends(symbol, start):
        if symbol not in rules:
            return {start + 1} if text[start : start + 1] == (symbol,) else set()
        all_ends = set()
        for rule in rules[symbol]:
            rule_ends = {start}
            for child in rule:
                rule_ends = {end for begin in rule_ends for end in ends(child, begin)}
            all_ends |= rule_ends
        return all_ends

    return len(text) in ends(root, 0)


def derive(symbol, draw):
    """Derive a text from a symbol by recursion."""
    if symbol not in RULES:
        return symbol
    return "".join([derive(child, draw) for child in draw.choice(RULES[symbol])])


def sentences(task, count):
    """Return sentences of a task, without <bos>."""
    instances = task.instances(0, 0, count)
    return [instance[1:] for instance in np.split(instances.ids, instances.ends[:-1])]


@pytest.mark.parametrize("root, symbol, count", [(10, "j", 9), (13, "m", 1), (6, "6", 2)])
def test_distribution_equals_enumeration(root, symbol, count):
    grammar = Grammar(AMBIGUOUS) if root == 6 else Lano(root=root).language
    codes, _, weights = derivations(symbol)
    words = np.random.default_rng(root).integers(2**64, size=(count, 4), dtype=np.uint64)
    tokens, ends = grammar.sample(words)
    for sentence in np.split(tokens, ends[:-1]):
        rows = grammar.next_tokens(np.append(BOS, sentence))

        # The derivations that begin as the sentence does; 0 follows the end of one.
        is_possible = np.ones(len(codes), bool)
        for k, row in enumerate(rows):
            next_token = codes >> 2 * (PLACES - 1 - k) & 3
            total = np.bincount(next_token[is_possible], weights[is_possible], 4)
            total /= weights[is_possible].sum()
            np.testing.assert_allclose(row, [0, *total[1:], total[0]], rtol=0, atol=1e-9)
            is_possible &= next_token == np.append(sentence, 0)[k]
        assert grammar.accepts(sentence)


@pytest.mark.parametrize("grammar", ["cfg3f", "cfg3j", "cfg3k"])
def test_long_windows_are_calibrated_and_fast(grammar):
    task = Lano(grammar=grammar, seq_len=1536)
    ids = task.windows(1, 0, 12).ids
    rows = task.distribution(ids)
    np.testing.assert_allclose(rows.sum(axis=2), 1)

    # In each bin of probabilities, tokens occur as often as predicted: z scores of the sums.
    p = rows[:, :-1].ravel()
    occurs = (ids[:, 1:, None] == np.arange(5)).ravel()
    bins = np.digitize(p, [1e-9, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 1 - 1e-9])
    excess = np.bincount(bins, occurs - p)[1:-1]
    variance = np.bincount(bins, p * (1 - p))[1:-1]
    assert np.abs(excess / np.sqrt(variance)).max() < 4.5
    assert not occurs[bins == 0].any()
    assert occurs[bins == 8].all()

    distribution_times = []
    validity_times = []
    for sentence in sentences(task, 12):
        start = time.process_time()
        task.distribution(np.append(BOS, sentence))
        middle = time.process_time()
        assert task.language.accepts(sentence)
        distribution_times.append(middle - start)
        validity_times.append(time.process_time() - middle)
    distribution_ms = 1000 * np.median(distribution_times)
    validity_ms = 1000 * np.median(validity_times)
    print(f"{grammar}: distribution {distribution_ms:.1f} ms, validity {validity_ms:.1f} ms")
    assert max(distribution_ms, validity_ms) < (200 if grammar == "cfg3f" else 1200)


def test_extreme_sentences():
    for grammar, pick in itertools.product(["cfg3f", "cfg3j", "cfg3k"], [min, max]):
        language = Lano(grammar=grammar).language
        sentence = [22 if grammar == "cfg3f" else 25]
        while sentence[0] > 3:
            rules = [pick(language.rules[symbol], key=len) for symbol in sentence]
            sentence = [child for rule in rules for child in rule]

        rows = language.next_tokens(np.array([BOS, *sentence]))
        np.testing.assert_allclose(rows.sum(axis=1), 1)
        assert language.accepts(np.array(sentence))
        assert rows[-1, BOS] > 0


def test_nothing_follows_an_impossible_prefix():
    rows = Lano(root=10).language.next_tokens(np.array([BOS, 3, 3, 3, 2, 2, 2, 2, 1, BOS, 3]))
    assert rows.sum(axis=1).round(12).tolist() == [1] * 6 + [0] * 3 + [1] * 2


@pytest.mark.parametrize("grammar, root", [("cfg3f", 10), ("cfg3f", 14), ("cfg3k", 25)])
def test_judge_agrees_with_a_plain_parser(grammar, root):
    task = Lano(grammar=grammar, root=root, seq_len=2000)
    rng = random.Random(root)
    verdicts = []
    for sentence in sentences(task, 2 if root == 25 else 50):
        # the sentence, and others of which some are sentences too
        good = sentence.tolist()
        k = rng.randrange(len(good))
        other = rng.choice([1, 2, 3])
        answers = (
            good,
            [*good[:k], other, *good[k + 1 :]],
            [*good[:k], *good[k + 1 :]],
            good[::-1],
            [*good[:k], other, *good[k:]],
            good + good,
        )

        for answer in answers:
            verdict, values = task.judge([BOS], [*answer, BOS])
            assert values == {"valid": verdict == "right"}
            assert values["valid"] == is_derived(task.language.rules, root, tuple(answer))
            verdicts.append(verdict)
        assert verdicts[-len(answers)] == "right"

    assert {"right", "wrong"} <= set(verdicts)


def test_verdicts_and_settings():
    task = Lano(root=7)
    answers = {"right": [3, 2, 4], "wrong": [2, 3, 4], "empty": [], "too_long": [3] * 29 + [4]}
    for verdict, answer in answers.items():
        assert task.judge([BOS, 1, BOS], answer).verdict == verdict
    for answer in ([3, 2], [3, 0, 4], [3, 5, 4], [4, 3, 2, 4], [3, 2, 4, 4]):
        assert task.judge([BOS], answer) == ("malformed", {"valid": 0})
    with refused("task.prompt", task="lano"):
        task.judge([BOS, 1], [3, 2, 4])
    for key, value in {"grammar": "cfg3x", "root": 3, "seq_len": 1, "loss_on": "some"}.items():
        with refused("task.setting", key=key, given=value):
            Lano(**{key: value})


def test_a_question_is_the_first_whole_sentence():
    task = Lano(grammar="cfg3k", seq_len=600)
    windows = task.windows(3, 5, 8, 1).ids
    questions = list(task.questions(3, 5, 8))
    assert 0 < len(questions) < 8
    for prompt, answer, number in questions:
        assert windows[number - 5][: len(answer) + 1].tolist() == [BOS, *answer]
        assert prompt == [BOS] and task.judge(prompt, answer).verdict == "right"


def test_sentences_have_their_probabilities():
    codes, _, weights = derivations("j")
    ids, _, ends = Lano(root=10).instances(0, 0, 100_000)

    # Sentences as codes, two bits per token; <bos> adds nothing.
    starts = np.append(0, ends[:-1])
    positions = np.arange(len(ids)) - np.repeat(starts, ends - starts)
    digits = np.where(ids == BOS, 0, ids) << 2 * (PLACES - positions)
    drawn_codes, counts = np.unique(np.add.reduceat(digits, starts), return_counts=True)

    # A sentence may have several derivations.
    distinct_codes, index = np.unique(codes, return_inverse=True)
    probabilities = np.bincount(index, weights)
    assert drawn_codes.tolist() == distinct_codes.tolist()
    assert stats.chisquare(counts, 100_000 * probabilities).pvalue > 0.01

    part = Lano(root=10).instances(0, 40_000, 2)
    assert part.ids.tolist() == ids[ends[39_999] : ends[40_001]].tolist()


@pytest.mark.parametrize("count", counted(20_000))
def test_generator_equals_a_recursive_one(count):
    start = time.process_time()
    tokens = len(Lano().instances(0, 0, 4000).ids)
    print(f"{tokens / (time.process_time() - start) / 1e6:.1f}M tokens/s")

    rng = random.Random(0)
    ours = ["".join(map(str, sentence)) for sentence in sentences(Lano(root=16), count)]
    theirs = [derive("p", rng) for _ in range(count)]
    p_values = [stats.ks_2samp(list(map(len, ours)), list(map(len, theirs))).pvalue]
    for feature in (
        len,
        lambda text: text[:5],
        lambda text: text[len(text) // 2 :][:4],
        lambda text: text.count("2"),
        lambda text: int(text) % 101,
        lambda text: text[-5:],
    ):
        # Rows are the generators, columns the values that are not rare.
        values, index = np.unique([feature(text) for text in ours + theirs], return_inverse=True)
        our_index, their_index = np.split(index, 2)
        table = np.array(
            [
                np.bincount(our_index, minlength=len(values)),
                np.bincount(their_index, minlength=len(values)),
            ]
        )
        is_frequent = table.sum(axis=0) >= 20
        p_values.append(stats.chi2_contingency(table[:, is_frequent]).pvalue)
    assert len(p_values) * min(p_values) > 0.01  # Holm
