"""The probes on disk: made once, alike and whole; read by tasks, which say what is missing."""

import hashlib
import json
import threading

import pytest

from canon_pretrain.core.errors import UserError
from eval.staged import write_staged
from eval.tasks.birth_year.probes import KINDS, NUM_ITEMS, make_probe, split_sentences
from eval.tasks.birth_year.task import Corpus, find_corpus, load
from tests import data_folders
from tests.probe_folders import CORPUS, JUNK, NAMES, SENTENCES, Words, few, freeze_all


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return freeze_all(tmp_path_factory.mktemp("probes"))


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
    with pytest.raises(UserError, match=r"1-hop-0-\w+.jsonl was changed after .* delete "):
        first.read()
    manifest = json.loads((tmp_path / "sets.json").read_text())
    del manifest["sets"][first.path.stem]  # as the set's file was written and the process ended
    (tmp_path / "sets.json").write_text(json.dumps(manifest))
    first.path.write_bytes(content[:99])
    (again, *_), _ = few(tmp_path).sets(200, made.append)
    assert made == [first.name] and again == first and first.path.read_bytes() == content
    (tmp_path / "sets.json").write_text(json.dumps({"version": 1}))
    with pytest.raises(UserError, match="sets.json is damaged.* delete"):
        few(tmp_path).sets(200, made.append)


def test_sets_of_several_texts_and_tokenizers_share_a_folder(tmp_path):
    """Issue 17, item 2: another text is another question; L = 0 does not depend on it."""
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


def test_many_at_once_make_them_once_and_they_are_read_without_their_text(tmp_path):
    made: list[str] = []
    freeze = lambda: few(tmp_path).sets(700, made.append)  # noqa: E731
    threads = [threading.Thread(target=freeze) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == sorted(NAMES[:9])
    assert few(tmp_path, corpus="no text").sets(700, made.append) == freeze()
    # those of a file are not what is asked for without one
    few(tmp_path / "file", corpus=Corpus("file 2", CORPUS.text)).sets(700, made.append)
    assert few(tmp_path / "file", corpus="no text").get("1-hop-256") == "no text"


def test_the_text_is_wikipedias_prose(tmp_path):
    """Issue 17, item 2: the staged WikiText, without headings and as it is written."""
    assert "stage --suite discriminative --only wikitext" in str(find_corpus(None, tmp_path))
    pages = [
        " = Lamps = \n \n A well @-@ known lamp , of 1 @,@ 000 m . \n = = Use = = \n It shone . \n",
        " = Mirrors = \n \n The end\nof it ! \n",
    ]
    write_staged(tmp_path, "wikitext", [{"page": page} for page in pages], revision="f" * 40)
    found = find_corpus(None, tmp_path)
    assert isinstance(found, Corpus) and found.origin.startswith("wikitext ")
    sentences = ["A well-known lamp, of 1,000 m.", "The end of it!"]
    assert split_sentences(found.text) == sentences  # of three words at least


def test_a_task_freezes_reads_and_names_the_way_out(tmp_path, probes, monkeypatch):
    monkeypatch.setenv("CANON_EVAL_DATA", str(tmp_path / "staged"))
    junk, short = tmp_path / "junk.txt", tmp_path / "short.txt"
    junk.write_text(CORPUS.text)
    short.write_text(" ".join(SENTENCES[:20]))
    new = probes | {"probes": str(tmp_path / "new"), "junk": str(junk)}
    items = [load(probe_set="1-hop-256", **given)["test"].to_list() for given in (new, probes)]
    assert items[0] == items[1] and len(items[0]) == NUM_ITEMS
    encode = data_folders.tokenizer().encode
    longest = max(len(encode(item["prompt"])) for item in items[0])
    assert load(probe_set="1-hop-256", **probes, max_length=longest + 5)
    for changes, message in (
        ({"max_length": longest + 4}, f"1-hop-256: prompts of up to {longest} tokens and an"),
        ({"probes": None}, "1-hop-256 are not in .*/staged/probes: .*not staged.*probes"),
        ({"tokenizer": None}, "needs the evaluated model's tokenizer"),
        ({"junk": str(tmp_path / "nothing.txt")}, "junk .*nothing.txt: cannot be read.*No such"),
        ({"junk": str(short), "probe_set": "1-hop-4096"}, "text to hide in has only [0-9,]+ tok"),
    ):
        with pytest.raises(UserError, match=message):
            load(**{"probe_set": "1-hop-256", **probes, **changes})  # type: ignore[arg-type]
