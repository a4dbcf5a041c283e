"""The birth-year probes: their content, and scores of models that can answer them or not."""

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
from data_prep.planning import train_tokenizer
from eval.harness import quiet_harness
from eval.tasks.birth_year import probes as birth_year
from eval.tasks.birth_year.probes import KINDS, NUM_ITEMS, VERSION, ends_with_space, make_probe
from eval.tasks.birth_year.task import exact
from tests.probe_folders import JUNK, NAMES, SENTENCES, freeze, load_tasks
from tests.scripted_lm import ScriptedLM


def reference_probe(kind_index: int, length: int, item: int) -> tuple[str, list[str], str]:
    """An independent generator from spec/eval.md: prompt, years, answer."""
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
        name = birth_year.FIRST_NAMES[below(len(birth_year.FIRST_NAMES))]
        for known in (birth_year.MIDDLE_NAMES, birth_year.LAST_NAMES):
            name += f" {known[below(100)]}"
        names += [name] if name not in names else []
    years = [1950 + y for y in shuffled(60, people)]
    facts = [f"{names[i]} was born in the year of {years[i]}." for i in range(people)]
    asked, answers = names[:people], years
    if hops == 2:
        order = shuffled(people, people)
        asked = names[people:]
        for name, other in zip(asked, order, strict=True):
            facts.append(f"{name} was born in the same year as {names[other]}.")
        answers = [years[k] for k in order]
    junk: list[str] = []
    if length:
        at = below(len(SENTENCES))
        while sum(len(s.split()) for s in [*junk, SENTENCES[at % 300]]) < length:
            junk.append(SENTENCES[at % 300])
            at += 1
    slots = set(shuffled(len(junk) + len(facts), len(facts)))
    left, right = iter(junk), iter(facts)
    places = range(len(junk) + len(facts))
    text = " ".join(next(right) if place in slots else next(left) for place in places)
    who = below(people) if anyone else 0
    question = f"\n\nAnswer me: {asked[who]} was born in the year of "
    instruction = (
        "You will be asked questions about people's birth years, and the birth year descriptions "
        "are hidden in some random text. Some people's birth years are directly given, while "
        "others are given in the form that `name1' was born in the same year as `name2'.\n\n"
    )
    context = f"{text} " if hops == 1 else f"{instruction}<context>{text}</context>"
    return context + question, [str(year) for year in sorted(years)], str(answers[who])


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 2), st.sampled_from([0, 20, 256, 700]), st.integers(0, 999))
def test_probes_equal_an_independent_generator(kind, length, item):
    probe = make_probe(KINDS[kind], length, item, JUNK, space=True)
    prompt, years, answer = reference_probe(kind, length, item)
    assert probe["prompt"] == prompt
    assert (probe["choices"], probe["answer"]) == (years, answer)
    assert years[probe["target"]] == answer
    context = prompt.partition("\n\nAnswer me: ")[0].removeprefix(birth_year.INSTRUCTION)
    assert "\n" not in context
    assert len(set(years)) == len(years) == (3 if kind == 2 else 5)


def first_year(request: Instance) -> str:
    match = re.search(r"year of (\d{4})", request.args[0])
    assert match
    return match[1]


def answering(answer: Callable[[Instance], str]) -> ScriptedLM:
    """A model that generates `answer` of a request and finds it the likeliest."""

    def likelihood(request: Instance) -> float:
        year = request.args[1]
        assert year[0] == " " and year[1:].isdigit()
        return -1.0 * (year.strip() != answer(request))

    return ScriptedLM(lambda request: answer(request) + ".", likelihood)


def score(lm: ScriptedLM, tasks: dict[str, Task]) -> dict[str, float]:
    """The mean of each task's metric over all its items, by lm_eval's evaluator."""
    with quiet_harness():
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


def chance_of(name: str) -> float:
    return 1 / 3 if name.startswith("2-hop") else 1 / 5


@pytest.mark.system
def test_the_suite_is_complete(tmp_path):
    tasks = load_tasks(["birth-year"], **freeze(tmp_path, *NAMES), max_length=8192)
    assert list(tasks) == [name for probe in NAMES for name in (probe, f"{probe}_rank")]
    for name, task in tasks.items():
        about, whole = task.config.metadata, name.removesuffix("_rank")
        assert task.VERSION == VERSION and task.config.dataset_kwargs == {"probe_set": whole}
        assert about["primary"] == ("exact" if name == whole else "rank")
        assert about.get("part_of", name) == whole
        if name != whole:
            assert about["chance"] == pytest.approx(chance_of(name), abs=1e-4)


@pytest.mark.system
def test_who_can_answer(tmp_path):
    """An oracle is right; copying the first year is right on 1-hop, and chance on its control."""
    sets = [f"{kind.name}-512" for kind in KINDS]
    names = [f"{name}{part}" for name in sets for part in ("", "_rank")]
    tasks = load_tasks(names, **freeze(tmp_path, *sets))
    oracle = answering(lambda request: request.doc["answer"])
    assert score(oracle, tasks) == dict.fromkeys(names, 1.0)
    for name, found in score(answering(first_year), tasks).items():
        chance = 1.0 if name.startswith("1-hop-512") else chance_of(name)
        assert abs(found - chance) <= 4 * (chance * (1 - chance) / NUM_ITEMS) ** 0.5


def test_prompts_begin_as_training_texts():
    """SentencePiece with split digits, as Llama's: the space is its own token."""
    texts = [" ".join(SENTENCES), "Ann was born in the year of 1987. " * 9]
    tokenizer = Tokenizer(train_tokenizer(texts, 320), "test")
    assert ends_with_space(tokenizer)
    for kind in KINDS:
        probe = make_probe(kind, 0, 0, JUNK, True)
        ids = tokenizer.encode(probe["prompt"]).tolist()
        whole = tokenizer.encode(f"{probe['prompt']}{probe['answer']}.").tolist()
        assert whole[: len(ids)] == ids
        assert tokenizer.decode(whole[len(ids) - 1 : -1]) == probe["answer"]


def test_whole_year_tokens_get_no_trailing_space():
    class WholeYears:
        sha256 = ""

        def encode(self, text: str) -> list[str]:
            return re.findall(r" ?\w+| ", text)

    assert not ends_with_space(WholeYears())
    for text, right in {" 1987, and": 1, "19871": 1, "198": 0, "the 1987": 0}.items():
        assert exact({"answer": "1987"}, [text]) == {"exact": right}
