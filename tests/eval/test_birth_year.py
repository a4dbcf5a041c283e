"""The birth-year probes: an independent generator, models that can answer, and sets on disk."""

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from canon_pretrain.data.tokenizer import Tokenizer
from data_prep.planning import train_tokenizer
from eval.harness import quiet_harness
from eval.staged import write_staged
from eval.tasks.birth_year import probes as birth_year
from eval.tasks.birth_year.probes import KINDS, NUM_ITEMS, ends_with_space, make_probe
from eval.tasks.birth_year.task import Corpus, FrozenSets, exact, find_corpus, load
from tests import data_folders
from tests.scripted_lm import ScriptedLM
from tests.support import ROOT, refused

SENTENCES = [f"Sentence number {i} tells of {'nothing ' * (i % 7)}at all." for i in range(300)]
NAMES = list(birth_year.SETS)
CORPUS = Corpus("wikitext of a test", "\n".join(SENTENCES))


class Words:
    """A tokenizer of words, with another space for a test of whole years."""

    def __init__(self, sha256="t", pattern=r"\S+"):
        self.sha256 = sha256
        self.pattern = pattern

    def encode(self, text):
        return re.findall(self.pattern, text)


WORDS = Words()
JUNK = birth_year.Junk(SENTENCES, WORDS)


class Draws:
    """Random integers of a probe, from Philox's words, in exact fractions."""

    def __init__(self, key_text):
        key = hashlib.sha256(key_text.encode()).digest()[:16]
        philox = np.random.Philox(key=int.from_bytes(key, "little"))
        self.words = iter(philox.random_raw(1000).tolist())

    def below(self, bound):
        """Draw an integer from 0 to bound - 1."""
        return int(Fraction(next(self.words), 2**64) * bound)

    def shuffled(self, bound, count):
        """Draw `count` different integers below `bound`, as the first of a Fisher-Yates shuffle."""
        moved: dict[int, int] = {}
        drawn = []
        for i in range(count):
            j = i + self.below(bound - i)
            drawn.append(moved.get(j, j))
            moved[j] = moved.get(i, i)
        return drawn

    def names(self, count):
        """Draw different names of a first, a middle and a last name."""
        names: list[str] = []
        while len(names) < count:
            first = birth_year.FIRST_NAMES[self.below(len(birth_year.FIRST_NAMES))]
            middle = birth_year.MIDDLE_NAMES[self.below(100)]
            last = birth_year.LAST_NAMES[self.below(100)]
            name = f"{first} {middle} {last}"
            if name not in names:
                names.append(name)
        return names

    def junk(self, length):
        """Draw where a text of at most `length` words starts; return its sentences."""
        junk: list[str] = []
        if length == 0:
            return junk
        at = self.below(len(SENTENCES))
        while sum(len(s.split()) for s in [*junk, SENTENCES[at % 300]]) < length:
            junk.append(SENTENCES[at % 300])
            at += 1
        return junk

    def mixed(self, junk, statements):
        """Put the statements at random places of the junk."""
        num_places = len(junk) + len(statements)
        slots = set(self.shuffled(num_places, len(statements)))
        junk_left = iter(junk)
        statements_left = iter(statements)
        return " ".join(
            next(statements_left) if place in slots else next(junk_left)
            for place in range(num_places)
        )


INSTRUCTION_OF_2_HOPS = (
    "You will be asked questions about people's birth years, and the birth year descriptions "
    "are hidden in some random text. Some people's birth years are directly given, while "
    "others are given in the form that `name1' was born in the same year as `name2'.\n\n"
)


def reference_probe(kind_index, length, item):
    """An independent generator from spec/eval.md: prompt, years, answer."""
    people, hops, is_anyone = [(5, 1, False), (5, 1, True), (3, 2, False)][kind_index]
    draws = Draws(f"0/{people}/{hops}/{length}/{item}")

    # who was born when: directly, or as someone else
    names = draws.names(people * hops)
    years = [1950 + y for y in draws.shuffled(60, people)]
    statements = [f"{names[i]} was born in the year of {years[i]}." for i in range(people)]
    candidates = names[:people]
    answers = years
    if hops == 2:
        order = draws.shuffled(people, people)
        candidates = names[people:]
        answers = [years[k] for k in order]
        for name, other in zip(candidates, order, strict=True):
            statements.append(f"{name} was born in the same year as {names[other]}.")

    junk = draws.junk(length)
    text = draws.mixed(junk, statements)
    who = draws.below(people) if is_anyone else 0
    question = f"\n\nAnswer me: {candidates[who]} was born in the year of "
    context = f"{text} "
    if hops == 2:
        context = f"{INSTRUCTION_OF_2_HOPS}<context>{text}</context>"
    return context + question, [str(year) for year in sorted(years)], str(answers[who])


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 2), st.sampled_from([0, 20, 256, 700]), st.integers(0, 999))
def test_probes_equal_an_independent_generator(kind, length, item):
    prompt, years, answer = reference_probe(kind, length, item)

    probe = make_probe(KINDS[kind], length, item, JUNK, space=True)

    assert probe["prompt"] == prompt
    assert (probe["choices"], probe["answer"]) == (years, answer)
    assert years[probe["target"]] == answer
    context = prompt.partition("\n\nAnswer me: ")[0].removeprefix(birth_year.INSTRUCTION)
    assert "\n" not in context
    num_people = 3 if kind == 2 else 5
    assert len(years) == num_people
    assert len(set(years)) == num_people


def first_year(request):
    """The answer of a model that copies the first year of the prompt."""
    match = re.search(r"year of (\d{4})", request.args[0])
    assert match
    return match[1]


def answering(answer):
    """A model that generates `answer` of a request and finds it the likeliest."""

    def likelihood(request):
        year = request.args[1]
        assert year[0] == " "
        assert year[1:].isdigit()
        return 0.0 if year.strip() == answer(request) else -1.0

    return ScriptedLM(lambda request: answer(request) + ".", likelihood)


def score(lm, tasks):
    """The mean of each task's metric over all its items, by lm_eval's evaluator."""
    with quiet_harness():
        evaluated = evaluate(lm, {"tasks": dict(tasks)}, bootstrap_iters=0)
    assert evaluated is not None
    options = {"until": [], "max_gen_toks": 5, "do_sample": False}
    assert all(request.args[1] == options for request in lm.asked)

    scores = {}
    for name, items in evaluated["samples"].items():
        (metric,) = items[0]["metrics"]
        assert len(items) == NUM_ITEMS
        assert metric == ("rank" if "_rank" in name else "exact")
        scores[name] = evaluated["results"][name][f"{metric},none"]
        assert scores[name] == pytest.approx(np.mean([item[metric] for item in items]))
    return scores


def chance_of(name):
    """The chance level of a set."""
    return 1 / 3 if name.startswith("2-hop") else 1 / 5


def few(folder, corpus=CORPUS, tokenizer=WORDS):
    """Sets of 7 probes, counted in words."""
    return FrozenSets(folder, tokenizer, lambda: corpus, num_items=7)


def freeze(base, *names):
    """Write whole sets with the tests' tokenizer; return the metadata for them."""
    tokenizer = data_folders.tokenizer()
    (base / tokenizer.file_name).write_bytes(tokenizer.model)
    sets = FrozenSets(base / "probes", tokenizer, lambda: CORPUS)
    for name in names:
        sets.get(name)
    return {"tokenizer": str(base), "probes": str(base / "probes")}


def load_suite(metadata):
    """Load the suite's tasks by name."""
    manager = TaskManager(
        include_path=str(ROOT / "eval" / "tasks"), include_defaults=False, metadata=metadata
    )
    return manager.load(["birth-year"])["tasks"]


@pytest.mark.system
def test_the_suite_is_complete_and_who_can_answer(tmp_path):
    """An oracle is right; copying the first year is right on 1-hop, and chance on its control."""
    metadata = freeze(tmp_path, *NAMES) | {"max_length": 8192}
    with quiet_harness():
        tasks = load_suite(metadata)

    assert list(tasks) == [name for probe in NAMES for name in (probe, f"{probe}_rank")]
    for name, task in tasks.items():
        description = task.config.metadata
        probe_set = name.removesuffix("_rank")
        assert task.VERSION == birth_year.VERSION
        assert task.config.dataset_kwargs == {"probe_set": probe_set}
        assert description["primary"] == ("exact" if name == probe_set else "rank")
        assert description.get("part_of", name) == probe_set
        if name != probe_set:
            assert description["chance"] == pytest.approx(chance_of(name), abs=1e-4)

    of_512 = {name: task for name, task in tasks.items() if "-512" in name}
    assert len(of_512) == 6
    oracle = answering(lambda request: request.doc["answer"])
    assert score(oracle, of_512) == dict.fromkeys(of_512, 1.0)

    copier = answering(first_year)
    for name, share in score(copier, of_512).items():
        expected = 1.0 if name.startswith("1-hop-512") else chance_of(name)
        stderr = (expected * (1 - expected) / NUM_ITEMS) ** 0.5
        assert abs(share - expected) <= 4 * stderr


def test_prompts_begin_as_training_texts():
    """With split digits, as Llama's SentencePiece, the space is its own token; not so for tokens
    of whole years."""
    whole_years = Words(pattern=r" ?\w+| ")
    assert not ends_with_space(whole_years)

    texts = [" ".join(SENTENCES), "Ann was born in the year of 1987. " * 9]
    split_digits = Tokenizer(train_tokenizer(texts, 320), "test")
    assert ends_with_space(split_digits)

    for kind in KINDS:
        probe = make_probe(kind, 0, 0, JUNK, True)
        prompt_ids = split_digits.encode(probe["prompt"]).tolist()
        ids = split_digits.encode(f"{probe['prompt']}{probe['answer']}.").tolist()
        assert ids[: len(prompt_ids)] == prompt_ids
        assert split_digits.decode(ids[len(prompt_ids) - 1 : -1]) == probe["answer"]


@pytest.mark.parametrize(
    ("text", "is_exact"), [(" 1987, and", 1), ("19871", 1), ("198", 0), ("the 1987", 0)]
)
def test_an_exact_answer_begins_with_the_year(text, is_exact):
    assert exact({"answer": "1987"}, [text]) == {"exact": is_exact}


# ---- sets on disk


def test_sets_are_made_once_per_text_and_tokenizer(tmp_path):
    made: list[str] = []
    sets, missing = few(tmp_path / "a").sets(700, made.append)

    assert [probe_set.name for probe_set in sets] == NAMES[:9]
    assert made == NAMES[:9]
    assert missing == [f"{', '.join(NAMES[9:])} (max_length 700)"]
    assert sets[3].read()[2] == make_probe(KINDS[0], 256, 2, JUNK, True)
    for probe_set in sets:
        probes = probe_set.read()
        sha256 = hashlib.sha256(probe_set.path.read_bytes()).hexdigest()
        assert len(probes) == 7
        assert probe_set.entry.sha256 == sha256
        assert probe_set.entry.max_tokens == max(len(p["prompt"].split()) for p in probes)

    elsewhere, _ = few(tmp_path / "b").sets(700, made.append)
    assert [probe_set.entry for probe_set in elsewhere] == [probe_set.entry for probe_set in sets]


def test_another_text_or_tokenizer_has_its_own_sets(tmp_path):
    made: list[str] = []
    sets, _ = few(tmp_path).sets(700, made.append)

    # another text is another question; sets with L = 0 do not depend on it (issue 17, item 2)
    made.clear()
    text = Corpus("file 2", " ".join(SENTENCES[::-1]))
    of_text, _ = few(tmp_path, corpus=text).sets(700, made.append)
    assert of_text[:3] == sets[:3]
    assert made == NAMES[3:9]
    for ours, theirs in zip(sets[3:], of_text[3:], strict=True):
        assert ours.path != theirs.path
        assert ours.read() != theirs.read()

    of_tokenizer, _ = few(tmp_path, tokenizer=Words("u")).sets(700, made.append)
    assert not {s.path for s in of_tokenizer} & {s.path for s in sets}

    # the first ones are still there
    num_made = len(made)
    again, _ = few(tmp_path).sets(700, made.append)
    assert again == sets
    assert len(made) == num_made == 15


def test_a_changed_set_is_refused(tmp_path):
    (first, *_), _ = few(tmp_path).sets(200, lambda name: None)
    content = first.path.read_bytes()
    first.path.write_bytes(content.replace(b"was born", b"is born", 1))

    with refused("probes.damaged", path=first.path):
        first.read()


def test_an_interrupted_set_is_made_again(tmp_path):
    made: list[str] = []
    manifest_path = tmp_path / "sets.json"
    (first, *_), _ = few(tmp_path).sets(200, lambda name: None)
    content = first.path.read_bytes()

    # as if interrupted after the set's file
    manifest = json.loads(manifest_path.read_text())
    del manifest["sets"][first.path.stem]
    manifest_path.write_text(json.dumps(manifest))
    first.path.write_bytes(content[:99])

    (again, *_), _ = few(tmp_path).sets(200, made.append)
    assert made == [first.name]
    assert again == first
    assert first.path.read_bytes() == content

    manifest_path.write_text(json.dumps({"version": 1}))
    with refused("probes.damaged", path=manifest_path):
        few(tmp_path).sets(200, made.append)


def test_concurrent_writers_make_each_set_once(tmp_path):
    made: list[str] = []
    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(lambda _: few(tmp_path).sets(700, made.append), range(4))

    assert sorted(made) == sorted(NAMES[:9])
    assert others == [first] * 3


def test_only_sets_of_a_file_need_their_text(tmp_path):
    of_wikitext = few(tmp_path).sets(700, print)
    assert few(tmp_path, corpus="no text").sets(700, print) == of_wikitext

    few(tmp_path / "file", corpus=Corpus("file 2", CORPUS.text)).sets(700, print)
    assert few(tmp_path / "file", corpus="no text").get("1-hop-256") == "no text"


def test_the_text_is_wikipedias_prose(tmp_path):
    """The staged WikiText, detokenized and without headings (issue 17, item 2)."""
    assert "--only wikitext" in str(find_corpus(None, tmp_path))
    pages = [
        " = Lamps = \n \n A well @-@ known lamp , of 1 @,@ 000 m . \n = = Use = = \n It shone . \n",
        " = Mirrors = \n \n The end\nof it ! \n",
    ]
    write_staged(tmp_path, "wikitext", [{"page": page} for page in pages], revision="f" * 40)

    corpus = find_corpus(None, tmp_path)

    assert isinstance(corpus, Corpus)
    assert corpus.origin.startswith("wikitext ")
    # sentences of three words at least
    sentences = ["A well-known lamp, of 1,000 m.", "The end of it!"]
    assert birth_year.split_sentences(corpus.text) == sentences


def test_a_task_freezes_and_reads_its_set(tmp_path, monkeypatch):
    monkeypatch.setenv("CANON_EVAL_DATA", str(tmp_path / "staged"))
    frozen = freeze(tmp_path, "1-hop-256")
    junk = tmp_path / "junk.txt"
    junk.write_text(CORPUS.text)
    to_freeze = frozen | {"probes": str(tmp_path / "new"), "junk": str(junk)}

    items = load(probe_set="1-hop-256", **frozen)["test"].to_list()

    assert len(items) == NUM_ITEMS
    assert load(probe_set="1-hop-256", **to_freeze)["test"].to_list() == items

    # the longest prompt, and the five tokens of an answer
    encode = data_folders.tokenizer().encode
    longest = max(len(encode(item["prompt"])) for item in items) + 5
    assert load(probe_set="1-hop-256", **frozen, max_length=longest)
    with refused("eval.prompt_too_long", expected=longest):
        load(probe_set="1-hop-256", **frozen, max_length=longest - 1)


def test_a_task_without_its_files_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CANON_EVAL_DATA", str(tmp_path / "staged"))
    frozen = freeze(tmp_path, "1-hop-256")
    short = tmp_path / "short.txt"
    short.write_text(" ".join(SENTENCES[:20]))
    missing = tmp_path / "nothing.txt"

    for changes, code, fields in (
        ({"probes": None}, "probes.missing", {"path": tmp_path / "staged/probes"}),
        ({"tokenizer": None}, "eval.task_tokenizer", {}),
        ({"junk": str(missing)}, "probes.junk", {"path": str(missing)}),
        ({"junk": str(short), "probe_set": "1-hop-4096"}, "probes.missing", {}),
    ):
        options = {"probe_set": "1-hop-256"} | frozen | changes
        with refused(code, **fields):
            load(**options)
