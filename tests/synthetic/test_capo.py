"""Capo against a generator of loops, its 100 exposures, its answers, and its bits."""

import math
from itertools import product

import numpy as np
import pytest
from scipy.stats import chisquare

from canon_pretrain.synthetic import capo
from canon_pretrain.synthetic.capo import ATTRIBUTES, NAMES, ROLES, Capo, bits_per_parameter
from canon_pretrain.synthetic.capo_words import LISTS, TEMPLATES
from canon_pretrain.synthetic.task import ANSWER, EVALUATION, TRAINING
from tests.support import refused

WORDS = {
    key: ["".join(word) for word in product(*(row.split(",") for row in rows))]
    for key, rows in LISTS.items()
}


def hashed(*parts):
    """Hash integers by rounds of splitmix64."""
    state = 0
    for part in parts:
        state = ((state ^ part) + 0x9E3779B97F4A7C15) % 2**64
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) % 2**64
        state ^= state >> 31
    return state


def shuffled(number, size, key):
    """Permute `number` below `size` by a Feistel network, again until it is below `size`."""
    a = math.ceil(math.sqrt(size))
    b = math.ceil(size / a)
    while True:
        left, right = divmod(number, b)
        for index in range(0, 8, 2):
            left = (left + hashed(key, index, right)) % a
            right = (right + hashed(key, index + 1, left)) % b
        number = left * b + right
        if number < size:
            return number


def slow_biography(task, seed, domain, position):
    """Return the text of a biography, a word at a time."""
    # Who it is, and the full name
    exposure, number = divmod(position + domain * (task.people << 32), task.people)
    person = shuffled(number, task.people, hashed(seed, exposure))
    name = shuffled(person, NAMES, hashed(0xB105))
    first = WORDS["first"][name // 400_000]
    middle = WORDS["middle"][name // 1000 % 400]
    last = WORDS["last"][name % 1000]

    # The six values: day, month and year make one; the employer is in a city.
    sizes = (28, 12, 200, 200, 300, 100, 263, 2)
    draws = [(hashed(0xB106, person, k) >> 32) * size >> 32 for k, size in enumerate(sizes)]
    lists = ("day", "month", "year", "city", "university", "major", "employer")
    drawn = [WORDS[key][draw] for key, draw in zip(lists, draws, strict=False)]
    working_city = WORDS["city"][(61 * draws[6] + 17) % 200]
    values = [" ".join(drawn[:3]), *drawn[3:], working_city]
    she, her = [("She", "her"), ("He", "his")][draws[7]]

    # A template of eight per sentence
    generator = np.random.Philox(key=[seed, domain], counter=(2 * position - 1) % 2**256)
    _, *template_words = generator.random_raw(7)
    text = ["<bos>"]
    for templates, value, word in zip(TEMPLATES.values(), values, template_words, strict=True):
        template = templates[int(word) >> 61]
        full_name = f"{first} {middle} {last}"
        text.append(template.format(name=full_name, She=she, her=her, value=value))
    return " ".join(text)


@pytest.mark.parametrize("domain", [TRAINING, EVALUATION])
def test_windows_equal_loops_over_people(domain):
    task = Capo(people=23)
    windows = task.windows(7, 1, 5, domain)
    for row, (ids, kinds) in enumerate(zip(*windows, strict=True), 1):
        positions = range(row * task.per_window, (row + 1) * task.per_window)
        text = " ".join(slow_biography(task, 7, domain, position) for position in positions)
        assert " ".join(map(task.word, ids[task.is_counted(kinds)])) == text
        assert (ids[~task.is_counted(kinds)] == 1).all() and kinds[-1] == capo.PADDING
    np.testing.assert_array_equal(windows.ids[3], task.windows(7, 4, 1, domain).ids[0])


def test_everyone_is_seen_as_often_in_new_orders_and_words():
    task = Capo(people=12, exposures=40)
    num_windows = 12 * 40 // task.per_window
    assert num_windows == 60
    ids, kinds = task.windows(3, 0, num_windows)
    roles = task.token_roles(ids)
    counts = np.bincount(roles[kinds != capo.PADDING], minlength=9)[1:]
    np.testing.assert_array_equal(counts, 480 * np.array([3, 3, 1, 1, 1, 1, 1, 1]))
    np.testing.assert_array_equal((roles >= 2) & (roles <= 7), kinds == ANSWER)

    # 40 exposures show the same 12 people in 40 orders.
    orders = ids[roles == ROLES.index("name")].reshape(40, 12, 3).tolist()
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len({str(order) for order in orders}) == 40
    assert len(set(map(str, orders[0]))) == 12

    # No biography of training or evaluation has the words of another; <bos> is chr(1).
    windows = np.concatenate([ids, task.windows(3, 0, 60, EVALUATION).ids])
    biographies = set()
    for row in windows:
        biographies |= set("".join(map(chr, row)).strip(chr(1)).split(chr(1)))
    assert len(biographies) == 2 * 480


def test_people_are_distinct_uniform_and_work_in_one_city():
    slots = capo._slots(np.arange(20_000, dtype=np.uint64))
    full_names = set(map(tuple, slots[:, :3].tolist()))
    assert len(full_names) == len(slots)

    # Each value is uniform, also day and gender together; cities and "her" follow from others.
    drawn = np.delete(slots, [10, 12], axis=1) - capo.STARTS
    day_and_gender = 2 * drawn[:, 3] + drawn[:, 10]
    columns = zip([*drawn.T, day_and_gender], [*capo.SIZES, 2, 56], strict=True)
    counts = [np.bincount(column, minlength=size) for column, size in columns]
    assert min(chisquare(count).pvalue for count in counts) > 0.01 / len(counts)

    jobs = set(map(tuple, slots[:, 9:11].tolist()))
    assert len(jobs) == 263
    assert len({city for _, city in jobs}) == 200


def test_a_value_holds_nothing_about_templates():
    for sentences in TEMPLATES.values():
        for template, other in product(map(str.split, sentences), repeat=2):
            start = template.index("{value}")
            assert other[:start] != template[:start] or other[start] == "{value}"


def test_judge_accepts_only_the_truth():
    task = Capo(people=1000)
    questions = list(task.questions(0, 2, 20))
    assert len(questions) == 20 * 8 * 6

    for number, (prompt, answer, _) in enumerate(questions):
        values = {"exact": 1, "tokens": 1, f"exact_{ATTRIBUTES[number % 6]}": 1}
        assert task.judge(prompt, answer) == ("right", values)
        # another last token of the same kind
        wrong = [*answer[:-1], answer[-1] - 1 if answer[-1] % 2 else answer[-1] + 1]
        for ids in (wrong, answer[:-1], answer + answer, [*answer, 2], [9] * len(answer)):
            assert task.judge(prompt, ids).values["exact"] == 0
        assert task.judge(prompt, wrong).values["tokens"] == pytest.approx(1 - 1 / len(answer))


def test_verdicts_and_bad_prompts():
    task = Capo(people=1000)
    prompt, answer, _ = next(iter(task.questions(0, 2, 20)))
    for ids, verdict in (
        ([], "empty"),
        (answer[:2], "malformed"),
        (answer * 2, "too_long"),
        ([*answer[:2], 5000], "malformed"),
        ([*answer[:2], 1 ^ answer[2]], "wrong"),
    ):
        assert task.judge(prompt, ids).verdict == verdict

    for bad in ([], prompt[:3], prompt[:-1], [*prompt, 2], [1, 3, 403, 803]):
        with refused("task.prompt", task="capo"):
            task.judge(bad, answer)


def test_bits_of_no_and_of_all_knowledge():
    nothing = [9.0, *map(math.log, (160_000_000, 28 * 12 * 200, 200, 300, 100, 263, 200, 2))]
    assert bits_per_parameter(nothing, 50_000, 1000) == pytest.approx(0, abs=1e-9)

    everything = [9.0, math.log(50_000), *[0] * 7]
    highest = math.log2(NAMES / 50_000) + 47.59166
    assert bits_per_parameter(everything, 50_000, 50_000) == pytest.approx(highest, rel=1e-6)


def test_settings_out_of_range_are_refused():
    for settings in ({"people": 0}, {"exposures": 0}, {"people": NAMES + 1}):
        with refused("task.setting", task="capo", key=next(iter(settings))):
            Capo(**settings)
    with refused("task.too_long", longest=64, seq_len=63):
        Capo(seq_len=63)


def test_all_full_names_can_be_taken():
    task = Capo(people=NAMES, seq_len=64, loss_on="answers")
    ids, kinds = task.windows(0, 0, 3)
    assert task.per_window == 1 and ids.max() < task.vocab_size == 3071
    np.testing.assert_array_equal(task.is_counted(kinds), kinds == ANSWER)
