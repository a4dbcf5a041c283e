"""Tasks with `release = true`: their ids, what they refuse, and Capo on a folder that is made here.

tests/synthetic/test_release.py compares them with the author's code.
"""

import dataclasses
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from canon_pretrain.synthetic.capo import ATTRIBUTES, ROLES, draw_people
from canon_pretrain.synthetic.capo_words import TEMPLATES
from canon_pretrain.synthetic.release_words import FOLDER, MONTHS, SOURCE, read_release
from canon_pretrain.synthetic.task import ANSWER
from canon_pretrain.synthetic.tasks import RELEASED, TASKS, build_task
from tests.support import refused
from tests.synthetic.release_stand_in import write_clone, write_tokenizer


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The settings of Capo that name a clone and a tokenizer."""
    folder = write_clone(tmp_path_factory.mktemp("clone"))
    texts = [path.read_text() for path in (folder / FOLDER).rglob("*.*")]
    tokenizer = write_tokenizer(folder / "tokenizer.json", texts)
    return {"release": True, "release_path": str(folder), "release_tokenizer": tokenizer}


@pytest.fixture(scope="module")
def capo(files):
    return build_task("capo", files | {"people": 40})


def ids_of(task, count=400):
    ids, _, ends = task.instances(0, 0, count)
    return [instance.tolist() for instance in np.split(ids, ends[:-1])]


@pytest.mark.parametrize("name", sorted(TASKS.keys() - {"capo"}))
@pytest.mark.parametrize("value", [False, None])
def test_a_task_without_release_has_no_such_setting(name, value):
    if name not in RELEASED and value is not None:
        with refused("task.unknown_setting", task=name, key="release"):
            build_task(name, {"release": value})
        return
    task = build_task(name, {} if value is None else {"release": value})
    assert type(task) is TASKS[name] and "release" not in task.settings
    assert task.fingerprint == TASKS[name]().fingerprint


def test_only_tasks_of_the_release_have_it():
    for name in TASKS.keys() - RELEASED.keys():
        with refused("task.unknown_setting", task=name, key="release"):
            build_task(name, {"release": True})
    with refused("task.unknown_setting", task="capo", key="release_path"):
        build_task("capo", {"release_path": "PhysicsLM4"})


@pytest.mark.parametrize("name", sorted(RELEASED.keys() - {"capo"}))
def test_it_sets_the_quirks_and_refuses_other_values(name):
    task = build_task(name, {"release": True})
    assert type(task) is RELEASED[name]
    assert task.fingerprint != build_task(name, {}).fingerprint
    assert build_task(name, task.settings).fingerprint == task.fingerprint

    quirks = {
        "n_weight": "sqrt(N+n)",
        "last_query": False,
        "synonyms": False,
        **({"vocab": 4} if name == "depo2" else {}),
    }
    for key in quirks.keys() & task.settings.keys():
        with refused("task.setting", task=name, key=key, given=quirks[key]):
            build_task(name, {"release": True, key: quirks[key]})
    for bad in ("no", "some"):
        with refused("task.setting", task=name, key="release"):
            build_task(name, {"release": bad})


@pytest.mark.parametrize(
    ("name", "key", "most"),
    [
        ("depo1", "k", 499),
        ("depo1", "vocab", 4500),
        ("brevo1", "n", 9996),
        ("mano", "l", 499),
        ("mano", "modulus", 4998),
    ],
)
def test_ids_stay_distinct(name, key, most):
    with refused("task.setting", task=name, key=key):
        build_task(name, {"release": True, "seq_len": 1 << 20, key: most + 1})


def test_ids_of_depo():
    settings = {"n": 4, "k": 3, "vocab": 9, "seq_len": 96, "release": True}
    task = build_task("depo1", settings)
    own = build_task("depo1", {key: settings[key] for key in settings if key != "release"})
    marks = {19: 9999, 20: 9500, 21: 9001, 22: 9002, 23: 9003}
    assert ids_of(task) == [[marks.get(token, token) for token in row] for row in ids_of(own)]
    assert task.vocab_size == 10_000
    assert [task.word(token) for token in marks.values()] == [own.word(token) for token in marks]


@pytest.mark.parametrize("name", ["brevo1", "brevo2"])
def test_brevos_answers_end_with_the_query_and_eos(name):
    task = build_task(name, {"n": 7, "seq_len": 224, "release": True})
    for prompt, answer, _ in itertools.islice(task.questions(0, 0, 20), 100):
        start = len(prompt) - prompt[::-1].index(9999)
        query = prompt[start:][prompt[start:].index(9997) + 1 : -1]
        assert prompt[-1] == answer[-1] == 9998
        assert answer[-1 - len(query) : -1] == query
        assert task.judge(prompt, answer).verdict == "right"

        # Without the query, or with it twice
        assert task.judge(prompt, [*answer[: -1 - len(query)], 9998]).verdict == "wrong"
        assert task.judge(prompt, [*answer[:-1], *query, 9998]).verdict != "right"
    assert task.vocab_size == 10_000


def test_brevo_has_a_leaf_less_where_floor_and_ceiling_differ():
    """Of 4 vertices, one is a leaf by the release, one or two by the paper."""
    settings = {"n": 4, "exact_n": True, "seq_len": 64}
    most = {}
    for release in (False, True):
        task = build_task("brevo1", settings | {"last_query": True, "release": release})
        bos, query = (9999, 9997) if release else (5, 6)
        most[release] = 0
        for ids in ids_of(task, 200):
            assert ids[0] == bos
            edges = ids[1 : ids.index(query)]
            most[release] = max(most[release], len(set(edges[::2]) - set(edges[1::2])))
    assert most == {False: 2, True: 1}


def test_ids_of_mano():
    task = build_task("mano", {"l": 3, "seq_len": 64, "release": True})
    own = build_task("mano", {"l": 3, "seq_len": 64, "synonyms": True})
    for released, plain in zip(ids_of(task), ids_of(own), strict=True):
        length = plain[1] - 28 - 8 * (plain[1] > 31)
        words = [own.word(token) for token in plain]
        words[-2] = words[-2].replace("ans", f"ans_{length}")
        assert [task.word(token) for token in released] == words
        assert released[0] in (9998, 9999)
        assert released[1] // 10 == released[-2] // 10 == length
        assert released[1] % 10 in (0, 1) and released[-2] % 10 in (4, 5)
        assert released[-1] == 4999 + plain[-1]

    # 2 - 3 * 3 = -7 = 16, and an <ans> of another length
    prompt = [9998, 20, 2, 5002, 7, 5003, 5003, 25]
    assert task.judge(prompt, [5016]).verdict == "right"
    assert task.judge(prompt, [5017]).verdict == "wrong"
    assert task.judge(prompt, [17]).verdict == "malformed"
    for bad in ([*prompt[:-1], 35], [*prompt[:-1], 4], [*prompt[:-2], 7, 24]):
        with refused("task.prompt", task="mano"):
            task.judge(bad, [5016])


def text_of(task, person, template):
    """Return the text of a person's biography by templates of this project."""
    folder = Path(task.release_path) / FOLDER / "fields"
    lists = {path.stem: path.read_text().splitlines() for path in folder.iterdir()}
    first, middle, last, day, month, year, city, university, major, employer, _ = (
        int(draw[0]) for draw in draw_people(np.array([person], np.uint64))
    )
    company, work_city = lists["company"][employer].split("; ")
    values = [
        f"{MONTHS[month]} {1 + day}, {1900 + year}",
        lists["city"][city],
        lists["university"][university],
        lists["field"][major],
        company,
        work_city,
    ]
    names = [lists["first_name"][first], lists["middle_name"][middle], lists["last_name"][last]]
    pronoun = ("He", "She")[person % 2]

    text = ""
    for sentences, place, value in zip(TEMPLATES.values(), template, values, strict=True):
        sentence = sentences[place].replace(" .", ".").replace("{her}", "their")
        text += " " + sentence.format(name=" ".join(names), She=pronoun, value=value)
    return text


def test_a_biography_is_encoded_as_its_whole_text(files):
    """Also where the dots of a value and of its sentence are one token."""
    task = build_task("capo", files | {"people": 400})
    encoder = tokenizers.Tokenizer.from_file(task.release_tokenizer)
    bits = task._random_bits(3, 0, task.people, 0)
    persons = task.person(bits[:, 0], 3).tolist()
    ids, kinds, ends = task.instances(3, 0, task.people)
    texts = []
    for start, end, person, words in zip([0, *ends[:-1]], ends, persons, bits, strict=True):
        text = text_of(task, person, [word >> 61 for word in words[1:].tolist()])
        encoded = encoder.encode(text)
        assert [task.word(token) for token in ids[start:end]] == ["<bos>", *encoded.tokens]
        texts.append(text)
    joined = "".join(texts)
    assert "D.C.." in joined and "Inc.." in joined and " at Home" in joined
    assert sorted(persons) == list(range(400))


def test_roles_are_those_of_the_generator(capo):
    windows = capo.windows(2, 0, 20)
    roles = capo.token_roles(windows.ids)
    values = [ROLES.index(attribute) for attribute in ATTRIBUTES]
    np.testing.assert_array_equal(np.isin(roles, values), windows.kinds == ANSWER)
    for row, row_roles in zip(windows.ids, roles, strict=True):
        spans = capo.spans(row)
        found = [ROLES[row_roles[span.start]] for span in spans]
        one = ["name", "birth_date", "pronoun", *ATTRIBUTES[1:]]
        assert found == one * capo.per_window
        assert [token for span in spans for token in span.tokens] == row[row_roles > 0].tolist()

    # All is known: each person has the bits of values, and of being one of 40 names.
    losses = [0.0] * len(spans)
    bits = capo.score_spans(row, spans, losses, 40)["bits_per_parameter"]
    assert bits == pytest.approx(np.log2(160_000_000) + 47.59166, rel=1e-6)


def test_questions_of_the_release(capo):
    questions = list(capo.questions(0, 0, 4))
    assert len(questions) == 4 * capo.per_window * len(ATTRIBUTES)
    for number, (prompt, answer, _) in enumerate(questions):
        name = f"exact_{ATTRIBUTES[number % 6]}"
        verdict, values = capo.judge(prompt, answer)
        assert (verdict, values) == ("right", {"exact": 1, "tokens": 1, name: 1})
        assert capo.judge(prompt, []).verdict == "empty"
        assert capo.judge(prompt, [1, *answer]).verdict in ("malformed", "too_long")
        assert capo.judge(prompt, answer[:-1]).values[name] == 0
        other = questions[(number + 6) % len(questions)].answer
        assert (capo.judge(prompt, other).verdict == "right") == (other == answer)
        assert capo.judge(prompt, [*answer, *[answer[0]] * 20]).verdict == "too_long"

    prompt, answer, _ = questions[0]
    for bad in ([], [1], prompt[:3], prompt[:-1], [*prompt, 2], [1, 2, 3, 4]):
        with refused("task.prompt", task="capo"):
            capo.judge(bad, answer)


def test_a_value_that_begins_another_ends_at_the_token_behind_it(files):
    task = build_task("capo", files | {"people": 3000})
    ends_early = 0
    for prompt, answer, _ in task.questions(0, 0, 300):
        if not task.is_complete(answer):
            ends_early += 1
            period = task.corpus.vocabulary.index(".")
            assert task.is_complete([*answer, period])
            assert task.judge(prompt, [*answer, period]).verdict == "right"
            assert task.judge(prompt, [*answer, period, period]).verdict != "right"
    assert ends_early


def test_the_fingerprint_is_of_the_files_content(files, capo, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(files["release_path"], folder)
    settings = {"people": 40, "release": True, "release_path": str(folder)}
    settings["release_tokenizer"] = str(folder / "tokenizer.json")
    assert build_task("capo", settings).fingerprint == capo.fingerprint
    assert build_task("capo", settings | {"people": 41}).fingerprint != capo.fingerprint

    source = folder / FOLDER / SOURCE
    source.write_text(source.read_text().replace("monthly salary", "weekly salary"))
    read_release.cache_clear()
    assert build_task("capo", settings).fingerprint != capo.fingerprint


@pytest.mark.parametrize("key", ["release_path", "release_tokenizer"])
def test_capo_needs_the_users_files(files, key):
    with refused("task.setting", task="capo", key=key):
        build_task("capo", {name: value for name, value in files.items() if name != key})
    with refused("task.release"):
        build_task("capo", files | {key: "/no/such/folder"})
    with refused("task.release"):
        build_task("capo", files | {key: "a\0b"})


def replace_text(path, old, new):
    path.write_text(path.read_text().replace(old, new))


def damaged(folder, files, name):
    """Copy the files, damage one, and return their settings."""
    shutil.copytree(files["release_path"], folder)
    fields = folder / FOLDER / "fields"
    source = folder / FOLDER / SOURCE
    tokenizer = folder / "tokenizer.json"
    if name == "a line fewer":
        path = fields / "city.txt"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    elif name == "no city":
        path = fields / "company.txt"
        replace_text(path, "; ", ", ")
    elif name == "no templates":
        replace_text(source, "sentence_structures4", "sentences")
    elif name == "no Python":
        source.write_text(source.read_text() + ")")
    elif name == "no literal":
        replace_text(source, "sentence_structures4 = ", "sentence_structures4 = list() or ")
    elif name == "no texts":
        replace_text(source, "sentence_structures4 = [", "sentence_structures4 = [1, ")
    elif name == "no list":
        replace_text(source, "sentence_structures4 = ", "sentence_structures4 = 1 #")
    elif name == "no UTF-8":
        source.write_bytes(source.read_bytes() + b"\xff")
    elif name == "no value":
        replace_text(source, "{field}", "law")
    elif name == "no tokenizer":
        tokenizer.write_text("{}")
    elif name == "another split":
        content = json.loads(tokenizer.read_text())
        content["pre_tokenizer"]["add_prefix_space"] = True
        tokenizer.write_text(json.dumps(content))
    return {"release": True, "release_path": str(folder), "release_tokenizer": str(tokenizer)}


@pytest.mark.parametrize(
    "name",
    [
        "a line fewer",
        "no city",
        "no templates",
        "no Python",
        "no literal",
        "no texts",
        "no list",
        "no UTF-8",
        "no value",
        "no tokenizer",
        "another split",
    ],
)
def test_damaged_files_are_refused(files, tmp_path, name):
    with refused("task.release"):
        build_task("capo", damaged(tmp_path / "clone", files, name))


def test_a_refusal_names_the_file(files, tmp_path):
    with refused("task.release", path=tmp_path / "clone" / FOLDER / "fields" / "company.txt"):
        build_task("capo", damaged(tmp_path / "clone", files, "no city"))


def test_released_settings_survive_a_replacement(capo):
    again = dataclasses.replace(capo, exposures=7)
    assert type(again) is type(capo) and again.vocab_size == capo.vocab_size
