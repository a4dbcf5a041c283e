"""The birth-year probes: what they say, who can answer them, and that they stay as they are."""

import functools
import hashlib
import re
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate

from canon_pretrain.data.tokenizer import Tokenizer
from data_prep.settle import train_tokenizer
from eval.harness import harness
from eval.tasks.birth_year import probes as birth_year
from eval.tasks.birth_year.probes import (
    FIRST_NAMES,
    KINDS,
    LAST_NAMES,
    MIDDLE_NAMES,
    NUM_ITEMS,
    VERSION,
    Junk,
    ends_with_space,
    make_probe,
    split_sentences,
)
from eval.tasks.birth_year.task import exact, without_space
from tests.probe_folders import JUNK, NAMES, SENTENCES, Words, freeze_all, load_tasks
from tests.scripted_lm import ScriptedLM

COUNT = 300


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


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.sampled_from(KINDS), st.sampled_from([0, 30, 256, 1000]), st.integers(0, 999))
def test_a_probe_is_what_its_text_says(kind: birth_year.Kind, length: int, item: int) -> None:
    probe = make_probe(kind, length, item, JUNK, space=True)
    stated, asked = read(probe["prompt"].rstrip())
    first, second = stated[: kind.people], stated[kind.people :]
    names = [name for name, _ in stated]
    years = [year for _, year in first]
    assert len(set(names)) == len(names) == kind.people * kind.hops
    assert len(set(years)) == kind.people and all(1950 <= int(year) <= 2009 for year in years)
    # those who are equated come after those whose years are stated, with one of them each
    assert sorted(other for _, other in second) == sorted(names[: kind.people] * (kind.hops - 1))
    last_group = names[-kind.people :]
    assert asked in last_group if kind.asks_anyone else asked == last_group[0]
    assert probe["choices"] == sorted(years)
    assert probe["answer"] == solve(probe["prompt"]) == probe["choices"][probe["target"]]
    context = probe["prompt"].partition("\n\nAnswer me: ")[0]
    context = context.removeprefix(birth_year.INSTRUCTION)
    if kind.hops == 2:
        assert context.startswith("<context>") and context.endswith("</context>")
    left = STATED.sub(".", context.removeprefix("<context>").removesuffix("</context>"))
    tells = [words for words in left.split(".") if "Sentence number" in words]
    told = sum(len(words.split()) for words in tells)
    assert told < length or told == length == 0


def test_every_slot_is_as_likely_for_a_statement() -> None:
    """Where 5 statements stand among 5 + n sentences: each place has one with 5 in 5 + n."""
    junk = Junk([f"Sentence number {i} has words." for i in range(50)], Words())
    places: dict[int, int] = {}
    for item in range(1000):
        context = make_probe(KINDS[0], 51, item, junk, True)["prompt"].partition("\n\n")[0]
        sentences = [words for words in context.split(".") if words.strip()]
        assert len(sentences) == 15
        for place, words in enumerate(sentences):
            places[place] = places.get(place, 0) + (" was born" in words)
    assert sum(places.values()) == 5000 and len(places) == 15
    assert all(is_chance(count / 1000, 1 / 3, 1000) for count in places.values())


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
    assert is_chance(same / COUNT, 0.2, COUNT)


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


STATED = re.compile(r" was born in the (?:year of (\d{4})|same year as (\w+ \w+ \w+))\.")


@functools.lru_cache(maxsize=1)
def read(prompt: str) -> tuple[list[tuple[str, str]], str]:
    """What a prompt's text says: (name, year or other name) as stated, and the name asked about."""
    context, _, question = prompt.partition("\n\nAnswer me: ")
    context = context.removeprefix(birth_year.INSTRUCTION).removeprefix("<context>")
    stated = []
    for match in STATED.finditer(context):
        before = context[max(0, match.start() - 99) : match.start()]
        stated.append((" ".join(before.split()[-3:]), match[1] or match[2]))
    return stated, question.removesuffix(" ").removesuffix(" was born in the year of")


def solve(prompt: str) -> str:
    """The answer, by reading."""
    stated, name = read(prompt.rstrip())
    said = dict(stated)
    while not name.isdigit():
        name = said[name]
    return name


def first_year(prompt: str) -> str:
    match = re.search(r"year of (\d{4})", prompt)
    assert match
    return match[1]


def answers(answer: Callable[[str], str]) -> ScriptedLM:
    """A model that writes what `answer` makes of a prompt, and finds it likelier than all else."""

    def likelihood(request: Instance) -> float:
        context, year = request.args
        assert year[0] == " " and year[1:].isdigit()
        return -1.0 * (year.strip() != answer(context))

    return ScriptedLM(lambda request: answer(request.args[0]) + ".", likelihood)


def score(lm: ScriptedLM, tasks: dict[str, Task]) -> dict[str, float]:
    """The mean of each task's metric over all its items, by the harness's evaluator."""
    with harness():
        found = evaluate(lm, {"tasks": dict(tasks)}, bootstrap_iters=0)
    assert found is not None
    options = {"until": [], "max_gen_toks": 5, "do_sample": False}
    assert all(request.args[1] == options for request in lm.asked)
    scores = {}
    for name, items in found["samples"].items():
        (metric,) = items[0]["metrics"]
        assert len(items) == NUM_ITEMS and metric == ("rank" if "_rank" in name else "exact")
        scores[name] = found["results"][name][f"{metric},none"]
        assert scores[name] == pytest.approx(np.mean([item[metric] for item in items]))
    return scores


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return freeze_all(tmp_path_factory.mktemp("probes"))


def is_chance(share: float, chance: float, count: int = NUM_ITEMS) -> bool:
    return abs(share - chance) < 4 * (chance * (1 - chance) / count) ** 0.5


def chance_of(name: str) -> float:
    return 1 / 3 if name.startswith("2-hop") else 1 / 5


def test_the_suite_is_complete(probes: dict[str, str]) -> None:
    tasks = load_tasks(["birth-year"], **probes, max_length=8192)
    assert list(tasks) == [name for probe in NAMES for name in (probe, f"{probe}_rank")]
    for name, task in tasks.items():
        about = task.config.metadata
        assert task.VERSION == about["version"] == VERSION
        assert task.config.dataset_kwargs == {"probe_set": name.removesuffix("_rank")}
        if name.endswith("_rank"):
            assert (about["primary"], about["part"]) == ("rank", "rank")
            assert about["part_of"] == name.removesuffix("_rank")
            assert about["chance"] == pytest.approx(chance_of(name), abs=1e-4)
        else:
            assert about["primary"] == "exact" and "part_of" not in about


@pytest.mark.slow
def test_an_oracle_is_always_right(probes: dict[str, str]) -> None:
    """The suite, complete: 18,000 probes, asked twice."""
    scores = score(answers(solve), load_tasks(["birth-year"], **probes))
    assert len(scores) == 36 and set(scores.values()) == {1.0}


@pytest.mark.parametrize("length", [0, 512])
def test_copying_the_first_year_is_right_on_1_hop_and_chance_on_its_control(
    probes: dict[str, str], length: int
) -> None:
    names = [f"{kind.name}-{length}" for kind in KINDS]
    scores = score(
        answers(first_year), load_tasks([*names, *(f"{name}_rank" for name in names)], **probes)
    )
    assert scores[names[0]] == scores[f"{names[0]}_rank"] == 1
    for name in names[1:]:
        assert is_chance(scores[name], chance_of(name))
        assert is_chance(scores[f"{name}_rank"], chance_of(name))


def test_no_opinion_and_a_random_one_are_chance_on_rank(probes: dict[str, str]) -> None:
    draw = np.random.default_rng(7).random
    names = [f"{kind.name}-256{part}" for kind in KINDS for part in ("", "_rank")]
    tasks = load_tasks(names, **probes)
    for lm in (
        ScriptedLM(lambda request: "none", lambda request: -draw()),
        answers(lambda prompt: "none"),
    ):
        for name, found in score(lm, tasks).items():
            assert is_chance(found, chance_of(name)) if "_rank" in name else found == 0


def test_an_answer_is_its_first_four_characters() -> None:
    for text, right in {
        "1987.": 1,
        " 1987, and": 1,
        "19871": 1,
        "1986": 0,
        "198": 0,
        "": 0,
        "the 1987": 0,
        "1 987": 0,
    }.items():
        assert exact({"answer": "1987"}, [text]) == {"exact": right}


def test_a_space_of_the_prompt_goes_to_the_choices() -> None:
    for prompt in ("in the year of ", "in the year of"):
        assert without_space({"prompt": prompt}) == "in the year of"


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
