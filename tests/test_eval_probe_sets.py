"""The probes on disk: made once, alike and whole; read by tasks, which say what is missing."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from canon_pretrain.data.shards import TokenShards
from canon_pretrain.errors import UserError
from data_prep.train_tokenizer import train_tokenizer
from eval.tasks.birth_year.frozen import Corpus, open_probes
from eval.tasks.birth_year.probes import KINDS, NUM_ITEMS, make_probe
from eval.tasks.birth_year.task import load
from tests import data_folders
from tests.probe_folders import JUNK, NAMES, SENTENCES, few, freeze_all, load_tasks


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return freeze_all(tmp_path_factory.mktemp("probes"))


def test_sets_are_made_once_and_alike(tmp_path: Path) -> None:
    made: list[str] = []
    sets, missing = few(tmp_path / "a").sets(700, made.append)
    names = [f"{kind.name}-{length}" for length in (0, 256, 512) for kind in KINDS]
    assert [s.name for s in sets] == made == names
    assert missing == ["L = 1024", "L = 2048", "L = 4096"]
    assert sets[3].read()[2] == make_probe(KINDS[0], 256, 2, JUNK, True)
    assert len(sets[3].read()) == 7

    def never() -> Iterator[str]:
        raise AssertionError("the corpus is read again")

    again, _ = few(tmp_path / "a", corpus=Corpus("a test", never)).sets(700, made.append)
    assert again == sets and made == names
    other, _ = few(tmp_path / "b").sets(700, made.append)
    assert [s.sha256 for s in other] == [s.sha256 for s in sets]
    for one in sets:
        assert one.sha256 == hashlib.sha256(one.path.read_bytes()).hexdigest()
        longest = max(len(p["prompt"].split()) for p in one.read())
        assert one.max_tokens == longest


def test_what_does_not_fit_is_left_out(tmp_path: Path) -> None:
    made: list[str] = []
    sets, missing = few(tmp_path, corpus=Corpus("a test", lambda: SENTENCES[:20])).sets(
        300, made.append
    )
    assert [s.name for s in sets] == ["1-hop-0", "1-hop-random-0", "2-hop-0"]
    assert re.fullmatch(r"1-hop-256 \(the text to hide in has only \d+ tokens\)", missing[0])
    sets, missing = few(tmp_path).sets(100, made.append)
    assert [s.name for s in sets] == ["1-hop-0", "1-hop-random-0"]
    assert re.fullmatch(r"2-hop-0 \(prompts of up to \d+ tokens\)", missing[0])


def test_a_changed_set_is_refused(tmp_path: Path) -> None:
    (first, *_), _ = few(tmp_path).sets(200, lambda name: None)
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
        (
            {"corpus": Corpus("another", lambda: SENTENCES)},
            "frozen with junk 'a test', asked for is 'another'",
        ),
    ],
)
def test_sets_of_something_else_are_refused(tmp_path: Path, changes: dict, message: str) -> None:
    few(tmp_path).sets(200, lambda name: None)
    with pytest.raises(UserError, match=f"{message}.*--out"):
        few(tmp_path, **changes).sets(200, lambda name: None)
    (tmp_path / "sets.json").write_text(json.dumps({"version": 1}))
    with pytest.raises(UserError, match="sets.json is damaged: delete"):
        few(tmp_path).sets(200, lambda name: None)


def test_sets_are_made_once_by_many_at_once(tmp_path: Path) -> None:
    made: list[str] = []
    threads = [
        threading.Thread(target=lambda: few(tmp_path).sets(700, made.append)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == sorted(NAMES[:9])
    for one in few(tmp_path, corpus=None).sets(700, made.append)[0]:
        one.read()


def test_what_was_interrupted_is_made_anew(tmp_path: Path) -> None:
    (first, *_), _ = few(tmp_path).sets(200, lambda name: None)
    content = first.path.read_bytes()
    manifest = json.loads((tmp_path / "sets.json").read_text())
    del manifest["sets"][first.name]  # as the set's file was written and the process ended
    (tmp_path / "sets.json").write_text(json.dumps(manifest))
    first.path.write_bytes(content[:99])
    made: list[str] = []
    (again, *_), _ = few(tmp_path).sets(200, made.append)
    assert made == [first.name] and again == first and first.path.read_bytes() == content


def test_frozen_sets_are_read_without_their_text_and_without_writing(tmp_path: Path) -> None:
    known, _ = few(tmp_path).sets(700, lambda name: None)
    (tmp_path / ".lock").unlink()
    found, _ = few(tmp_path, corpus=None).sets(700, lambda name: None)
    assert found == known and not (tmp_path / ".lock").exists()
    known[0].path.unlink()
    with pytest.raises(UserError, match=r"was changed after it was frozen \(sha256 unreadable"):
        found[0].read()
    assert few(tmp_path / "none", corpus=None).get(KINDS[0], 0) == (
        "not frozen there, and no text to hide statements in is given"
    )


def test_a_task_names_the_way_out(
    tmp_path: Path, probes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"1-hop-0 are not in .*/none: not frozen .* `probes` "):
        load(probe_set="1-hop-0", **(probes | {"probes": str(tmp_path / "none")}))
    monkeypatch.setenv("CANON_EVAL_DATA", str(tmp_path / "staged"))
    with pytest.raises(UserError, match=r"1-hop-0 are not in .*/staged/probes: not frozen"):
        load(probe_set="1-hop-0", tokenizer=probes["tokenizer"])
    with pytest.raises(UserError, match="needs the evaluated model's tokenizer"):
        load(probe_set="1-hop-0", probes=probes["probes"])
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.model").write_bytes(train_tokenizer([" ".join(SENTENCES)], 290))
    with pytest.raises(UserError, match="frozen with tokenizer_sha256 .*metadata `probes`"):
        load(probe_set="1-hop-0", **(probes | {"tokenizer": str(other)}))
    junk = tmp_path / "junk.txt"
    junk.write_text(" ".join(SENTENCES[:20]))
    with pytest.raises(UserError, match="frozen with junk 'a test', asked for is 'file "):
        load(probe_set="1-hop-0", **probes, junk=str(junk))
    with pytest.raises(UserError, match="junk .*nothing.txt: cannot be read: No such file"):
        load(probe_set="1-hop-0", **probes, junk=str(tmp_path / "nothing.txt"))
    short = {"tokenizer": probes["tokenizer"], "probes": str(tmp_path / "new"), "junk": str(junk)}
    with pytest.raises(UserError, match=r"text to hide in has only [\d,]+ tokens.*longer text"):
        load(probe_set="1-hop-4096", **short)
    with pytest.raises(UserError, match="max_length 'many': expected a number"):
        load(probe_set="1-hop-0", **probes, max_length="many")


def test_a_task_refuses_what_would_be_cut(probes: dict[str, str]) -> None:
    tokenizer = data_folders.tokenizer()
    items = load(probe_set="2-hop-512", **probes)["test"]
    longest = max(len(tokenizer.encode(prompt)) for prompt in items["prompt"])
    assert len(load(probe_set="2-hop-512", **probes, max_length=longest + 5)["test"]) == NUM_ITEMS
    with pytest.raises(UserError, match=rf"2-hop-512: prompts of up to {longest} tokens and an"):
        load(probe_set="2-hop-512", **probes, max_length=longest + 4)


def test_a_task_freezes_with_a_given_text(tmp_path: Path, probes: dict[str, str]) -> None:
    junk = tmp_path / "junk.txt"
    junk.write_text("\n".join(SENTENCES))
    given = {"tokenizer": probes["tokenizer"], "probes": str(tmp_path / "new"), "junk": str(junk)}
    made = load(probe_set="1-hop-256", **given)["test"]
    assert made.to_list() == load(probe_set="1-hop-256", **probes)["test"].to_list()
    again = load(probe_set="1-hop-256", tokenizer=given["tokenizer"], probes=given["probes"])
    assert again["test"].to_list() == made.to_list()


def test_a_run_freezes_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = [" ".join(SENTENCES[at : at + 9]) for at in range(0, 300, 9)]
    data_folders.plant_data(tmp_path / "data", [["some text"]], text)
    shards = TokenShards.open(tmp_path / "data" / "validation")
    known = data_folders.tokenizer()
    subject = SimpleNamespace(tokenizer=known, evals=tmp_path / "evals", held_out_shards=shards)
    asked = SimpleNamespace(out=None, staged=None, junk=None)

    def freeze(max_length: int) -> tuple[Path, list[str], list[str]]:
        return open_probes(subject, asked, Console(), max_length)  # type: ignore[arg-type]

    folder, names, left_out = freeze(700)
    assert folder == tmp_path / "evals" / "probes"
    assert names == [name for probe in [*NAMES[:5]] for name in (probe, f"{probe}_rank")]
    assert [words.split(" (")[0] for words in left_out] == [
        "2-hop-256", *NAMES[6:9], "L = 1024", "L = 2048", "L = 4096"
    ]  # fmt: skip
    assert "freezing the probes 1-hop-256 in" in capsys.readouterr().out
    tokenizer = str(tmp_path / "data")
    tasks = load_tasks(names, probes=str(folder), tokenizer=tokenizer, max_length=700)
    assert list(tasks) == names
    assert freeze(700) == (folder, names, left_out) and not capsys.readouterr().out
    with pytest.raises(UserError, match="no set of birth-year fits max_length 20: raise it"):
        freeze(20)
    asked.junk = tmp_path / "binary"
    asked.junk.write_bytes(b"\xff")
    with pytest.raises(UserError, match="junk .*binary: cannot be read as UTF-8 text"):
        freeze(700)

    class Exported(SimpleNamespace):
        @property
        def held_out_shards(self) -> None:
            raise UserError("no data here: give --data")

    asked.junk = None
    subject = Exported(tokenizer=known, evals=None)
    with pytest.raises(UserError, match="no data here: give --data. Or give --junk FILE.txt"):
        freeze(700)
