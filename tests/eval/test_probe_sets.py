"""The birth-year probes on disk: made once and alike, verified, and read by tasks."""

import hashlib
import json
import threading

from eval.staged import write_staged
from eval.tasks.birth_year.probes import KINDS, NUM_ITEMS, make_probe, split_sentences
from eval.tasks.birth_year.task import Corpus, find_corpus, load
from tests import data_folders
from tests.probe_folders import CORPUS, JUNK, NAMES, SENTENCES, Words, few, freeze
from tests.support import refused


def test_sets_are_made_once_and_alike(tmp_path):
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


def test_texts_and_tokenizers_share_a_folder(tmp_path):
    """Another text is another question; sets with L = 0 do not depend on it (issue 17, item 2)."""
    made: list[str] = []
    first, _ = few(tmp_path).sets(700, made.append)
    other = Corpus("file 2", " ".join(SENTENCES[::-1]))
    again, _ = few(tmp_path, corpus=other).sets(700, made.append)
    assert again[:3] == first[:3] and made == [*(s.name for s in first), *NAMES[3:9]]
    for ours, theirs in zip(first[3:], again[3:], strict=True):
        assert ours.path != theirs.path and ours.read() != theirs.read()
    foreign, _ = few(tmp_path, tokenizer=Words("u")).sets(700, made.append)
    assert not {s.path for s in foreign} & {s.path for s in first}
    assert few(tmp_path).sets(700, made.append)[0] == first and len(made) == 24


def test_concurrent_writers_make_each_set_once(tmp_path):
    made: list[str] = []
    freeze = lambda: few(tmp_path).sets(700, made.append)  # noqa: E731
    threads = [threading.Thread(target=freeze) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == sorted(NAMES[:9])
    # sets of WikiText are read without it, those of a file are not
    assert few(tmp_path, corpus="no text").sets(700, made.append) == freeze()
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
    assert split_sentences(found.text) == sentences


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
            load(**{"probe_set": "1-hop-256", **probes, **changes})  # type: ignore[arg-type]
