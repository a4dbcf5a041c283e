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
        self.sha256, self.pattern = sha256, pattern

    def encode(self, text):
        return re.findall(self.pattern, text)


WORDS = Words()
JUNK = birth_year.Junk(SENTENCES, WORDS)


def reference_probe(kind_index, length, item):
    """An independent generator from spec/eval.md: prompt, years, answer."""
    people, hops, anyone = [(5, 1, False), (5, 1, True), (3, 2, False)][kind_index]
    key = hashlib.sha256(f"0/{people}/{hops}/{length}/{item}".encode()).digest()[:16]
    words = iter(np.random.Philox(key=int.from_bytes(key, "little")).random_raw(1000).tolist())

    def below(bound):
        return int(Fraction(next(words), 2**64) * bound)

    def shuffled(bound, count):
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


def first_year(request):
    match = re.search(r"year of (\d{4})", request.args[0])
    assert match
    return match[1]


def answering(answer):
    """A model that generates `answer` of a request and finds it the likeliest."""

    def likelihood(request):
        year = request.args[1]
        assert year[0] == " " and year[1:].isdigit()
        return -1.0 * (year.strip() != answer(request))

    return ScriptedLM(lambda request: answer(request) + ".", likelihood)


def score(lm, tasks):
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


def chance_of(name):
    return 1 / 3 if name.startswith("2-hop") else 1 / 5


def few(folder, corpus=CORPUS, tokenizer=WORDS):
    """Sets of 7 probes, counted in words."""
    return FrozenSets(folder, tokenizer, lambda: corpus, num_items=7)


def freeze(base, *names):
    """Write whole sets with the tests' tokenizer; return the metadata for them."""
    known = data_folders.tokenizer()
    (base / known.file_name).write_bytes(known.model)
    sets = FrozenSets(base / "probes", known, lambda: CORPUS)
    for name in names:
        sets.get(name)
    return {"tokenizer": str(base), "probes": str(base / "probes")}


@pytest.mark.system
def test_the_suite_is_complete_and_who_can_answer(tmp_path):
    """An oracle is right; copying the first year is right on 1-hop, and chance on its control."""
    options = {"include_path": str(ROOT / "eval" / "tasks"), "include_defaults": False}
    metadata = freeze(tmp_path, *NAMES) | {"max_length": 8192}
    with quiet_harness():
        tasks = TaskManager(**options, metadata=metadata).load(["birth-year"])["tasks"]
    assert list(tasks) == [name for probe in NAMES for name in (probe, f"{probe}_rank")]
    for name, task in tasks.items():
        about, whole = task.config.metadata, name.removesuffix("_rank")
        assert task.VERSION == birth_year.VERSION
        assert task.config.dataset_kwargs == {"probe_set": whole}
        assert about["primary"] == ("exact" if name == whole else "rank")
        assert about.get("part_of", name) == whole
        if name != whole:
            assert about["chance"] == pytest.approx(chance_of(name), abs=1e-4)
    asked = {name: task for name, task in tasks.items() if "-512" in name}
    oracle = answering(lambda request: request.doc["answer"])
    assert score(oracle, asked) == dict.fromkeys(asked, 1.0) and len(asked) == 6
    for name, found in score(answering(first_year), asked).items():
        chance = 1.0 if name.startswith("1-hop-512") else chance_of(name)
        assert abs(found - chance) <= 4 * (chance * (1 - chance) / NUM_ITEMS) ** 0.5


def test_prompts_begin_as_training_texts():
    """SentencePiece with split digits, as Llama's: the space is its own token; not so for tokens
    of whole years."""
    assert not ends_with_space(Words(pattern=r" ?\w+| "))
    texts = [" ".join(SENTENCES), "Ann was born in the year of 1987. " * 9]
    tokenizer = Tokenizer(train_tokenizer(texts, 320), "test")
    assert ends_with_space(tokenizer)
    for kind in KINDS:
        probe = make_probe(kind, 0, 0, JUNK, True)
        ids = tokenizer.encode(probe["prompt"]).tolist()
        whole = tokenizer.encode(f"{probe['prompt']}{probe['answer']}.").tolist()
        assert whole[: len(ids)] == ids
        assert tokenizer.decode(whole[len(ids) - 1 : -1]) == probe["answer"]


def test_an_exact_answer_begins_with_the_year():
    for text, right in {" 1987, and": 1, "19871": 1, "198": 0, "the 1987": 0}.items():
        assert exact({"answer": "1987"}, [text]) == {"exact": right}


# ---- sets on disk


def test_sets_are_made_once_per_text_and_tokenizer(tmp_path):
    made: list[str] = []
    sets, missing = few(tmp_path / "a").sets(700, made.append)
    assert [s.name for s in sets] == made == NAMES[:9]
    assert missing == [f"{', '.join(NAMES[9:])} (max_length 700)"]
    assert sets[3].read()[2] == make_probe(KINDS[0], 256, 2, JUNK, True)
    other, _ = few(tmp_path / "b").sets(700, made.append)
    assert [s.entry for s in other] == [s.entry for s in sets]
    for one in sets:
        assert one.entry.sha256 == hashlib.sha256(one.path.read_bytes()).hexdigest()
        longest = max(len(p["prompt"].split()) for p in one.read())
        assert one.entry.max_tokens == longest and len(one.read()) == 7
    # another text is another question; sets with L = 0 do not depend on it (issue 17, item 2)
    made.clear()
    text = Corpus("file 2", " ".join(SENTENCES[::-1]))
    again, _ = few(tmp_path / "a", corpus=text).sets(700, made.append)
    assert again[:3] == sets[:3] and made == NAMES[3:9]
    for ours, theirs in zip(sets[3:], again[3:], strict=True):
        assert ours.path != theirs.path and ours.read() != theirs.read()
    foreign, _ = few(tmp_path / "a", tokenizer=Words("u")).sets(700, made.append)
    assert not {s.path for s in foreign} & {s.path for s in sets}
    assert few(tmp_path / "a").sets(700, made.append)[0] == sets and len(made) == 15


def test_a_changed_or_interrupted_set(tmp_path):
    (first, *_), _ = few(tmp_path).sets(200, lambda name: None)
    content, made = first.path.read_bytes(), list[str]()
    first.path.write_bytes(content.replace(b"was born", b"is born", 1))
    with refused("probes.damaged", path=first.path):
        first.read()
    manifest = json.loads((tmp_path / "sets.json").read_text())
    del manifest["sets"][first.path.stem]  # as if interrupted after the set's file
    (tmp_path / "sets.json").write_text(json.dumps(manifest))
    first.path.write_bytes(content[:99])
    (again, *_), _ = few(tmp_path).sets(200, made.append)
    assert made == [first.name] and again == first and first.path.read_bytes() == content
    (tmp_path / "sets.json").write_text(json.dumps({"version": 1}))
    with refused("probes.damaged", path=tmp_path / "sets.json"):
        few(tmp_path).sets(200, made.append)


def test_concurrent_writers_make_each_set_once(tmp_path):
    made: list[str] = []
    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(lambda _: few(tmp_path).sets(700, made.append), range(4))
    assert sorted(made) == sorted(NAMES[:9]) and others == [first] * 3
    # sets of WikiText are read without it, those of a file are not
    assert few(tmp_path, corpus="no text").sets(700, made.append) == first
    few(tmp_path / "file", corpus=Corpus("file 2", CORPUS.text)).sets(700, made.append)
    assert few(tmp_path / "file", corpus="no text").get("1-hop-256") == "no text"


def test_the_text_is_wikipedias_prose(tmp_path):
    """The staged WikiText, detokenized and without headings (issue 17, item 2)."""
    assert "--only wikitext" in str(find_corpus(None, tmp_path))
    pages = [
        " = Lamps = \n \n A well @-@ known lamp , of 1 @,@ 000 m . \n = = Use = = \n It shone . \n",
        " = Mirrors = \n \n The end\nof it ! \n",
    ]
    write_staged(tmp_path, "wikitext", [{"page": page} for page in pages], revision="f" * 40)
    found = find_corpus(None, tmp_path)
    assert isinstance(found, Corpus) and found.origin.startswith("wikitext ")
    # sentences of three words at least
    sentences = ["A well-known lamp, of 1,000 m.", "The end of it!"]
    assert birth_year.split_sentences(found.text) == sentences


def test_a_task_freezes_and_reads_its_set(tmp_path, monkeypatch):
    probes = freeze(tmp_path, "1-hop-256")
    monkeypatch.setenv("CANON_EVAL_DATA", str(tmp_path / "staged"))
    junk, short = tmp_path / "junk.txt", tmp_path / "short.txt"
    junk.write_text(CORPUS.text)
    short.write_text(" ".join(SENTENCES[:20]))
    new = probes | {"probes": str(tmp_path / "new"), "junk": str(junk)}
    items = [load(probe_set="1-hop-256", **given)["test"].to_list() for given in (new, probes)]
    assert items[0] == items[1] and len(items[0]) == NUM_ITEMS
    encode = data_folders.tokenizer().encode
    needed = max(len(encode(item["prompt"])) for item in items[0]) + 5
    assert load(probe_set="1-hop-256", **probes, max_length=needed)
    missing = tmp_path / "nothing.txt"
    for changes, code, fields in (
        ({"max_length": needed - 1}, "eval.prompt_too_long", {"expected": needed}),
        ({"probes": None}, "probes.missing", {"path": tmp_path / "staged/probes"}),
        ({"tokenizer": None}, "eval.task_tokenizer", {}),
        ({"junk": str(missing)}, "probes.junk", {"path": str(missing)}),
        ({"junk": str(short), "probe_set": "1-hop-4096"}, "probes.missing", {}),
    ):
        with refused(code, **fields):
            load(**{"probe_set": "1-hop-256", **probes, **changes})
