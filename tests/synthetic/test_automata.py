"""Automata beside a generator of loops, and their distributions beside walks and counts."""

import math
import random

import numpy as np
import pytest

from canon_pretrain.synthetic.tasks import build_task
from tests.support import refused
from tests.synthetic.distributions import assert_same, counted

SETTINGS = {"states": 5, "symbols": 7, "examples": 3, "example_tokens": 6, "seq_len": 64}


def edges_of(task, number):
    """Return {state: {symbol: next state}} of an automaton."""
    degrees, symbols, targets = task.automata(np.array([number], np.uint64))
    edges = {}
    for state, degree in enumerate(degrees[0].tolist()):
        state_symbols = symbols[0, state, :degree].tolist()
        state_targets = targets[0, state, :degree].tolist()
        edges[state] = dict(zip(state_symbols, state_targets, strict=True))
    return edges


def read(task, ids):
    """Return the number of an instance's automaton and its examples."""
    assert ids[0] == task.symbols + 1
    assert ids[-1] == task.symbols + 2
    number = 0
    for digit in ids[1:9]:
        number = 16 * number + digit - task.symbols - 3

    examples = [[]]
    for token in ids[9:-1]:
        if token == task.symbols + 2:
            examples.append([])
        else:
            examples[-1].append(token)
    return number, examples


def reference(rng, states, symbols, examples, example_tokens):
    """Return an automaton and examples, as the released generator draws them."""
    num_states = rng.randint(4, states)
    alphabet = rng.sample(range(1, symbols + 1), rng.randint(4, symbols))
    edges = {}
    for state in range(num_states):
        degree = rng.randint(1, 3)
        others = [other for other in range(num_states) if other != state]
        symbols_out = rng.sample(alphabet, degree)
        targets = rng.sample(others, degree)
        edges[state] = dict(zip(symbols_out, targets, strict=True))

    texts = []
    for _ in range(rng.randint(math.ceil(examples / 2), examples)):
        state = 0
        text = []
        for _ in range(rng.randint(1, example_tokens)):
            symbol = rng.choice(list(edges[state]))
            text.append(symbol)
            state = edges[state][symbol]
        texts.append(text)
    return edges, texts


def features(edges, texts):
    """Return what is compared between generators, a value per instance and feature."""
    reached = edges[0].values()
    (state, *_) = sorted(reached)
    text = texts[-1]
    return {
        "edges of the root": len(edges[0]),
        "first symbols": tuple(sorted(edges[0]))[:2],
        "reached": tuple(sorted(reached))[:2],
        "edges of a child": len(edges[state]),
        "back to the root": 0 in edges[state].values(),
        "symbols": len({symbol for row in list(edges.values())[:4] for symbol in row}),
        "examples": len(texts),
        "length": len(text),
        "first symbol": text[0],
        "last symbol": text[-1],
        "equal beginnings": texts[0][0] == text[0],
    }


@pytest.mark.parametrize("count", [2000, *counted(20_000)])
def test_instances_are_distributed_as_the_papers(count):
    task = build_task("automata", SETTINGS)
    settings = {key: value for key, value in SETTINGS.items() if key != "seq_len"}
    rng = random.Random(0)
    ids, kinds, ends = task.instances(2, 0, count)
    np.testing.assert_array_equal(kinds == 2, ids <= task.symbols)

    ours = []
    theirs = []
    numbers = set()
    for instance in np.split(ids, ends[:-1]):
        number, texts = read(task, instance.tolist())
        edges = edges_of(task, number)
        numbers.add(number)

        # The examples are walks from the root, and the automaton is one of the paper's.
        for text in texts:
            state = 0
            for symbol in text:
                state = edges[state][symbol]  # every symbol was possible
        for state, row in edges.items():
            assert state not in row.values()
            assert len(set(row.values())) == len(row) <= 3

        ours.append(features(edges, texts))
        theirs.append(features(*reference(rng, **settings)))
    assert len(numbers) >= count - 3  # of 2**32
    assert_same(ours, theirs)


def test_distribution_is_that_of_a_walk():
    task = build_task("automata", SETTINGS | {"seq_len": 128})
    for ids in task.windows(4, 0, 5).ids:
        rows = task.distribution(ids)
        edges = None
        header = []
        for token, row in zip(ids.tolist(), rows, strict=True):
            expected = np.zeros(task.symbols + 1)
            if token == task.symbols + 1:
                header = []
                edges = None
            elif edges is None:
                header.append(token - task.symbols - 3)
                if len(header) == 8:
                    edges = edges_of(task, int("".join(f"{digit:x}" for digit in header), 16))
                    state = 0
            elif token == task.symbols + 2:
                state = 0
            else:
                expected[list(edges[state])] = 1 / len(edges[state])
                state = edges[state][token]
            np.testing.assert_allclose(row, expected)


def test_distribution_is_zero_after_an_impossible_symbol():
    task = build_task("automata", SETTINGS)
    ids = task.windows(0, 0, 1).ids[0]
    _, next_bos, *_ = np.flatnonzero(ids == task.symbols + 1)
    possible = np.flatnonzero(task.distribution(ids)[9])
    ids[9] = min(set(range(1, task.symbols + 1)) - set(possible.tolist()))
    rows = task.distribution(ids)
    assert rows[9].any()
    assert not rows[10:next_bos].any()
    assert rows[next_bos:].any()


def test_walks_take_every_edge_equally_often():
    task = build_task("automata", SETTINGS | {"example_tokens": 9, "seq_len": 64})
    ids = task.windows(5, 0, 400).ids
    rows = np.stack([task.distribution(row) for row in ids])
    is_symbol = rows.any(axis=2)
    p = rows[is_symbol]
    occurs = ids[is_symbol][:, None] == np.arange(task.symbols + 1)
    variance = (p * (1 - p)).sum(axis=0)[1:]
    z = (occurs - p).sum(axis=0)[1:] / np.sqrt(variance)
    assert np.abs(z).max() < 4.5


def test_kl_is_zero_for_the_truth_and_ignores_other_tokens():
    task = build_task("automata", SETTINGS)
    (ids,) = task.windows(6, 0, 1).ids
    spans = task.spans(ids)
    p = task.distribution(ids)
    starts = {span.start for span in spans}
    assert starts == set(np.flatnonzero((ids >= 1) & (ids <= task.symbols)).tolist())
    assert len(task.spans(ids, 5)) == 5 * task.symbols

    # Half of the model's mass is on tokens that are no symbols.
    truth = [math.log(max(0.5 * p[span.start, span.tokens[0]], 1e-30)) for span in spans]
    assert task.score_spans(ids, spans, truth, 1)["kl"] == pytest.approx(0, abs=1e-12)

    uniform = [0.0] * len(spans)
    entropies = [-sum(x * math.log(x) for x in row if x) for row in p[sorted(starts)]]
    expected = math.log(task.symbols) - sum(entropies) / len(starts)
    assert task.score_spans(ids, spans, uniform, 1)["kl"] == pytest.approx(expected)


def test_judge_accepts_every_possible_symbol_and_no_other():
    task = build_task("automata", SETTINGS)
    questions = list(task.questions(7, 0, 30))
    assert len(questions) > 60
    for prompt, _, _ in questions:
        number, examples = read(task, [*prompt, task.symbols + 2])
        edges = edges_of(task, number)
        state = 0
        for symbol in examples[-1]:
            state = edges[state][symbol]
        for symbol in range(1, task.symbols + 1):
            verdict = "right" if symbol in edges[state] else "wrong"
            judged = task.judge(prompt, [symbol])
            assert judged == (verdict, {"valid": float(verdict == "right")})

    for answer, verdict in (([], "empty"), ([1, 1], "too_long"), ([8], "malformed")):
        assert task.judge(prompt, answer).verdict == verdict
    for bad in ([], prompt[1:], prompt[:8], [*prompt[:9], 30, 1]):
        with refused("task.prompt", task="automata"):
            task.judge(bad, [1])


def test_settings_out_of_range_are_refused():
    for key, value in (("states", 3), ("symbols", 3), ("examples", 0), ("seq_len", 15)):
        with refused("task.setting", task="automata", key=key):
            build_task("automata", SETTINGS | {key: value})
