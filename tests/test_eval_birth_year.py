"""The birth-year probes: what they say, who can answer them, and that they stay as they are."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from canon_pretrain.data.tokenizer import Tokenizer
from canon_pretrain.errors import UserError
from data_prep.train_tokenizer import train_tokenizer
from eval import birth_year
from eval.birth_year import (
    FIRST_NAMES,
    KINDS,
    LAST_NAMES,
    MIDDLE_NAMES,
    FrozenSets,
    Junk,
    ends_with_space,
    make_probe,
    split_sentences,
)
from eval.suites import ask, exact_task, rank_task

SENTENCES = [f"Sentence number {i} tells of {'nothing ' * (i % 7)}at all." for i in range(300)]
COUNT = 300  # items a set in these tests


class Words:
    """A tokenizer of words: quick, and as good as any for counting."""

    def encode(self, text: str) -> list[str]:
        return text.split()


JUNK = Junk(SENTENCES, Words())


def again(kind_index: int, length: int, item: int) -> tuple[str, list[str], str]:
    """The probe once more, straight from spec/eval.md: prompt, years, answer."""
    people, hops, anyone = [(5, 1, False), (5, 1, True), (3, 2, False)][kind_index]
    key = hashlib.sha256(f"0/{people}/{hops}/{length}/{item}".encode()).digest()[:16]
    words = iter(np.random.Philox(key=int.from_bytes(key, "little")).random_raw(1000).tolist())

    def below(bound: int) -> int:
        return int(Fraction(next(words), 2**64) * bound)

    def shuffled(bound: int, count: int) -> list[int]:
        moved: dict[int, int] = {}
        drawn = []
        for i in range(count):
            j = i + below(bound - i)
            drawn.append(moved.get(j, j))
            moved[j] = moved.get(i, i)
        return drawn

    names: list[str] = []
    while len(names) < people * hops:
        first, middle = FIRST_NAMES[below(len(FIRST_NAMES))], MIDDLE_NAMES[below(100)]
        name = f"{first} {middle} {LAST_NAMES[below(100)]}"
        names += [name] if name not in names else []
    years = [1950 + y for y in shuffled(60, people)]
    facts = [f"{names[i]} was born in the year of {years[i]}." for i in range(people)]
    asked, answers = names[:people], years
    if hops == 2:
        order = shuffled(people, people)
        asked = names[people:]
        facts += [
            f"{asked[j]} was born in the same year as {names[order[j]]}." for j in range(people)
        ]
        answers = [years[order[j]] for j in range(people)]
    junk: list[str] = []
    if length:
        at = below(len(SENTENCES))
        while sum(len(s.split()) for s in [*junk, SENTENCES[at % 300]]) < length:
            junk.append(SENTENCES[at % 300])
            at += 1
    slots = set(shuffled(len(junk) + len(facts), len(facts)))
    left, right = iter(junk), iter(facts)
    text = " ".join(
        next(right) if place in slots else next(left) for place in range(len(junk) + len(facts))
    )
    who = below(people) if anyone else 0
    question = f"\n\nAnswer me: {asked[who]} was born in the year of "
    if hops == 1:
        prompt = text + " " + question
    else:
        prompt = (
            "You will be asked questions about people's birth years, and the birth year "
            "descriptions are hidden in some random text. Some people's birth years are directly "
            "given, while others are given in the form that `name1' was born in the same year as "
            f"`name2'.\n\n<context>{text}</context>{question}"
        )
    return prompt, [str(year) for year in sorted(years)], str(answers[who])


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 2), st.sampled_from([0, 20, 256, 700]), st.integers(0, 999))
def test_probes_equal_an_independent_generator(kind: int, length: int, item: int) -> None:
    probe = make_probe(KINDS[kind], length, item, JUNK, space=True)
    prompt, years, answer = again(kind, length, item)
    assert probe["prompt"] == prompt
    assert (probe["choices"], probe["answer"]) == (years, answer)
    assert years[probe["target"]] == answer
    context = prompt.partition("\n\nAnswer me: ")[0].removeprefix(birth_year.INSTRUCTION)
    assert "\n" not in context
    assert len(set(years)) == len(years) == (3 if kind == 2 else 5)


def test_names_are_plain_and_many() -> None:
    for group in (FIRST_NAMES, MIDDLE_NAMES, LAST_NAMES):
        assert len(set(group)) == len(group) >= 100
        assert all(re.fullmatch("[A-Z][a-z]+", name) for name in group)


def test_the_control_asks_another_question_about_the_same_text() -> None:
    same = 0
    for item in range(COUNT):
        first, anyone = (make_probe(kind, 100, item, JUNK, True) for kind in KINDS[:2])
        cut = "\n\nAnswer me: "
        assert first["prompt"].partition(cut)[0] == anyone["prompt"].partition(cut)[0]
        same += first["answer"] == anyone["answer"]
    assert is_chance(same / COUNT, 0.2)


def test_junk_is_consecutive_and_below_its_length() -> None:
    for item in range(50):
        probe = make_probe(KINDS[0], 200, item, JUNK, True)
        numbers = [int(n) for n in re.findall(r"number (\d+)", probe["prompt"])]
        assert all((b - a) % 300 == 1 for a, b in zip(numbers, numbers[1:], strict=False))
        total = sum(len(SENTENCES[n].split()) for n in numbers)
        following = SENTENCES[(numbers[-1] + 1) % 300]
        assert total < 200 <= total + len(following.split())


def test_sentences_are_split() -> None:
    text = "One two three.  Four five\nsix! A table:\n\n| 1 | 2 |\n\nToo short. Is this one too?"
    assert split_sentences(text) == [
        "One two three.",
        "Four five six!",
        "A table: | 1 | 2 | Too short.",
        "Is this one too?",
    ]
    assert split_sentences("") == []
    long = " ".join(["word"] * 101) + "."
    assert Junk([long, "A b c."], Words()).sentences == ["A b c."]


def solve(prompt: str) -> str:
    """The answer, by reading."""
    context, _, question = prompt.partition("\n\nAnswer me: ")
    years = dict(re.findall(r"(\w+ \w+ \w+) was born in the year of (\d{4})\.", context))
    same = dict(re.findall(r"(\w+ \w+ \w+) was born in the same year as (\w+ \w+ \w+)\.", context))
    name = question.removesuffix(" ").removesuffix(" was born in the year of")
    return years[same.get(name, name)]


def first_year(prompt: str) -> str:
    match = re.search(r"year of (\d{4})", prompt)
    assert match
    return match[1]


class Answers(LM):
    """Writes what `answer` makes of a prompt, and finds it likelier than all else."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        super().__init__()
        self.answer = answer

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        asked = [request.args for request in requests]
        return [(-1.0 * (y.strip() != self.answer(c)), False) for c, y in asked]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        raise NotImplementedError

    def generate_until(self, requests: list[Instance]) -> list[str]:
        assert all(request.args[1]["max_gen_toks"] == 5 for request in requests)
        return [self.answer(request.args[0]) + "." for request in requests]


def score(lm: LM, kind: int, length: int, space: bool = True) -> dict[str, float]:
    items = range(COUNT)
    probes = [make_probe(KINDS[kind], length, item, JUNK, space) for item in items]
    documents = datasets.Dataset.from_list(probes)
    tasks = {"x/exact": exact_task("x", documents), "x/rank": rank_task("x", documents)}
    scores, counts, samples = ask(lm, tasks, None)
    assert counts == {"x": COUNT} and len(samples["x"]) == COUNT
    for metric, found in scores["x"].items():
        values = [sample[metric] for sample in samples["x"]]
        assert found.value == pytest.approx(np.mean(values))
        assert found.stderr == pytest.approx(np.std(values, ddof=1) / COUNT**0.5)
    return {metric: found.value for metric, found in scores["x"].items()}


def is_chance(share: float, chance: float) -> bool:
    return abs(share - chance) < 4 * (chance * (1 - chance) / COUNT) ** 0.5


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize(("length", "space"), [(0, True), (300, True), (0, False)])
def test_an_oracle_is_always_right(kind: int, length: int, space: bool) -> None:
    assert score(Answers(solve), kind, length, space) == {"exact": 1, "rank": 1}


def test_copying_the_first_year_is_right_on_1_hop_and_chance_on_its_control() -> None:
    assert score(Answers(first_year), 0, 300) == {"exact": 1, "rank": 1}
    for kind, chance in ((1, 1 / 5), (2, 1 / 3)):
        found = score(Answers(first_year), kind, 300)
        assert is_chance(found["exact"], chance) and is_chance(found["rank"], chance)


@pytest.mark.parametrize(("kind", "chance"), [(0, 1 / 5), (1, 1 / 5), (2, 1 / 3)])
def test_no_opinion_is_chance_on_rank(kind: int, chance: float) -> None:
    found = score(Answers(lambda prompt: "none"), kind, 0)
    assert found["exact"] == 0
    assert is_chance(found["rank"], chance)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = [" ".join(SENTENCES), "Ann was born in the year of 1987. " * 9]
    return Tokenizer(train_tokenizer(texts, 320), "test")


def test_the_prompt_is_the_beginning_of_what_training_saw(tokenizer: Tokenizer) -> None:
    """SentencePiece with split digits, as Llama's: the space is a token of its own."""
    assert ends_with_space(tokenizer)
    for kind in KINDS:
        probe = make_probe(kind, 0, 0, JUNK, True)
        ids = tokenizer.encode(probe["prompt"]).tolist()
        whole = tokenizer.encode(f"{probe['prompt']}{probe['answer']}.").tolist()
        assert whole[: len(ids)] == ids
        assert tokenizer.decode(whole[len(ids) - 1 : -1]) == probe["answer"]


def test_a_tokenizer_with_whole_years_gets_no_trailing_space() -> None:
    class WholeYears:
        def encode(self, text: str) -> list[str]:
            return re.findall(r" ?\w+| ", text)

    assert not ends_with_space(WholeYears())
    probe = make_probe(KINDS[0], 0, 0, JUNK, ends_with_space(WholeYears()))
    assert probe["prompt"].endswith(" was born in the year of")


def frozen(folder: Path, **changes: object) -> FrozenSets:
    options = {
        "tokenizer": Words(),
        "tokenizer_sha256": "t",
        "origin": "a test",
        "load_junk": lambda: SENTENCES,
        "num_items": 7,
    }
    return FrozenSets(folder, **(options | changes))  # type: ignore[arg-type]


def test_sets_are_made_once_and_alike(tmp_path: Path) -> None:
    made: list[str] = []
    sets, missing = frozen(tmp_path / "a").sets(700, made.append)
    names = [f"{kind.name}-{length}" for length in (0, 256, 512) for kind in KINDS]
    assert [s.name for s in sets] == made == names
    assert missing == ["L = 1024", "L = 2048", "L = 4096"]
    assert sets[3].read()[2] == make_probe(KINDS[0], 256, 2, JUNK, True)
    assert len(sets[3].read()) == 7

    def never() -> Iterator[str]:
        raise AssertionError("the corpus is read again")

    again, _ = frozen(tmp_path / "a", load_junk=never).sets(700, made.append)
    assert again == sets and made == names
    other, _ = frozen(tmp_path / "b").sets(700, made.append)
    assert [s.sha256 for s in other] == [s.sha256 for s in sets]
    for one in sets:
        assert one.sha256 == hashlib.sha256(one.path.read_bytes()).hexdigest()
        longest = max(len(p["prompt"].split()) for p in one.read())
        assert one.max_tokens == longest


def test_what_does_not_fit_is_left_out(tmp_path: Path) -> None:
    made: list[str] = []
    sets, missing = frozen(tmp_path, load_junk=lambda: SENTENCES[:20]).sets(300, made.append)
    assert [s.name for s in sets] == ["1-hop-0", "1-hop-random-0", "2-hop-0"]
    assert re.fullmatch(r"1-hop-256 \(the text to hide in has only \d+ tokens\)", missing[0])
    sets, missing = frozen(tmp_path).sets(100, made.append)
    assert [s.name for s in sets] == ["1-hop-0", "1-hop-random-0"]
    assert re.fullmatch(r"2-hop-0 \(prompts of up to \d+ tokens\)", missing[0])


def test_a_changed_set_is_refused(tmp_path: Path) -> None:
    (first, *_), _ = frozen(tmp_path).sets(200, lambda name: None)
    content = first.path.read_bytes()
    first.path.write_bytes(content.replace(b"was born", b"is born", 1))
    with pytest.raises(UserError, match=r"1-hop-0.jsonl was changed after .* delete "):
        first.read()
    first.path.unlink()
    with pytest.raises(UserError, match="1-hop-0.jsonl was changed after"):
        first.read()
    first.path.write_bytes(content)
    first.read()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer_sha256": "u"}, "frozen with tokenizer_sha256 't', asked for is 'u'"),
        ({"origin": "another"}, "frozen with junk 'a test', asked for is 'another'"),
    ],
)
def test_sets_of_something_else_are_refused(tmp_path: Path, changes: dict, message: str) -> None:
    frozen(tmp_path).sets(200, lambda name: None)
    with pytest.raises(UserError, match=f"{message}.*--out"):
        frozen(tmp_path, **changes).sets(200, lambda name: None)
    (tmp_path / "sets.json").write_text(json.dumps({"version": 1}))
    with pytest.raises(UserError, match="sets.json is damaged: delete"):
        frozen(tmp_path).sets(200, lambda name: None)
