"""Limits and manifests: the stream ends at the very document, whatever was built before."""

import json
import shutil
from itertools import accumulate
from pathlib import Path

import pytest

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.shards import ShardError, TokenShards
from data_prep import finish as finish_module
from data_prep.__main__ import main
from data_prep.build import JobSlice
from data_prep.finish import finish
from data_prep.folder import SPLITS
from data_prep.plan import Limits, is_held_out
from tests.corpora import OPTIONS, build_corpus, corpus_folder, flip, snapshot, stored_texts
from tests.data_folders import tokenizer

UNITS = 5


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, its tokenizer, and `data`, all of it built; its limits are each test's own."""
    return corpus_folder(tmp_path_factory.mktemp("finish"), files=9)


def documents(base: Path, held_out: bool) -> list[list[tuple[str, int]]]:
    """(text, tokens with EOS) of one split's documents in each unit, read from the corpus."""
    units: list[list[tuple[str, int]]] = [[] for _ in range(UNITS)]
    for file in range(9):
        for line in (base / f"corpus/part{file + 1}.jsonl").read_text().splitlines():
            text = json.loads(line)["text"]
            if is_held_out(text.encode(), OPTIONS.holdout) == held_out:
                units[file // 2].append((text, len(tokenizer().encode(text)) + 1))
    return units


def check_limited(base: Path, data: Path, limits: Limits) -> None:
    """The folder holds what the limits leave: computed here from the texts alone."""
    units = documents(base, held_out=False)
    flat = [(unit, *document) for unit, content in enumerate(units) for document in content]
    totals = accumulate(count for *_, count in flat)
    expected = [
        (unit, text)
        for index, ((unit, text, _), total) in enumerate(zip(flat, totals, strict=True))
        if (limits.max_documents is None or index < limits.max_documents)
        and (limits.max_tokens is None or total <= limits.max_tokens)
    ]
    assert stored_texts(data) == [text for _, text in expected]
    reached = max(unit for unit, _ in expected) + 1
    held_out = [text for unit in documents(base, held_out=True)[:reached] for text, _ in unit]
    assert stored_texts(data, "validation") == held_out
    with TokenShards.open(data / "train") as shards, pytest.raises(ValueError, match="which has"):
        shards.read(shards.num_tokens - 1, 2)


def test_the_stream_ends_at_the_document_that_fits(base):
    counts = [count for unit in documents(base, held_out=False) for _, count in unit]
    exact = sum(counts[:50])
    first_unit = len(documents(base, held_out=False)[0])
    limits = [Limits(max_documents=n) for n in (1, first_unit, first_unit + 1, 10**9)]
    edges = (counts[0], exact - 1, exact, exact + 1, sum(counts) - 1, sum(counts))
    limits += [Limits(max_tokens=n) for n in edges]
    limits += [Limits(50, exact + 1000), Limits(51, exact)]
    for each in limits:
        finish(base / "data", each)
        check_limited(base, base / "data", each)
        main(["verify", str(base / "data")])


def test_a_limited_build_makes_what_finish_makes_and_no_more(base, tmp_path):
    counts = [count for unit in documents(base, held_out=False) for _, count in unit]
    limits = Limits(max_tokens=sum(counts) // 2)
    finish(base / "data", limits)
    for workers in (1, 2):
        out = tmp_path / f"data{workers}"
        build_corpus(out, base / "corpus", workers=workers, limits=limits)
        for name in (f"{split}/manifest.json" for split in SPLITS):
            assert (out / name).read_bytes() == (base / "data" / name).read_bytes()
        assert snapshot(out).items() <= snapshot(base / "data").items()
    assert not any("part-00004" in name for name in snapshot(tmp_path / "data1"))

    # and it changes back, or grows, without building again what is there
    build_corpus(tmp_path / "data1", base / "corpus")
    finish(base / "data", Limits())
    assert snapshot(tmp_path / "data1") == snapshot(base / "data")


def test_a_folder_without_byte_ends_goes_on(base, tmp_path, monkeypatch):
    """Built by an earlier program: read, continued and repaired in its own format, not cut."""
    out = tmp_path / "data"
    with monkeypatch.context() as patch:
        patch.setattr("data_prep.planning.VERSION", 2)
        build_corpus(out, base / "corpus")
    finish(base / "data", Limits())
    old, new = snapshot(out), snapshot(base / "data")
    assert json.loads(old["plan.json"])["version"] == 2
    assert all(old[name] == new[name] for name in new if name.endswith((".bin", ".crc")))
    for name in (name for name in new if name.endswith(".docs")):
        assert new[name].startswith(old[name]) and len(new[name]) == 2 * len(old[name])
    plain, other = TokenShards.open(base / "data/train"), TokenShards.open(out / "train")
    assert plain.num_bytes == other.num_bytes and plain.fingerprint != other.fingerprint
    assert plain.document_ends().tolist() == other.document_ends().tolist()

    for path in out.glob("*/part-00003-*"):
        path.unlink()
    build_corpus(out, base / "corpus")
    assert snapshot(out) == old
    (out / "train/part-00001-0.docs").write_bytes(b"")
    main(["verify", str(out), "--repair"])
    assert snapshot(out).items() >= old.items()

    with pytest.raises(UserError, match="into a new folder"):
        finish(out, Limits(max_documents=30))
    # at the end of a part there is nothing to cut
    first = plain.parts[0].entry.documents
    finish(out, Limits(max_documents=first))
    assert len(stored_texts(out)) == first


def test_a_kill_between_the_manifests_leaves_no_pair_of_two_limits(base, monkeypatch):
    finish(base / "data", Limits())
    real = finish_module.write_json

    def killed(path: Path, value: object) -> None:
        if path.parent.name == "validation":
            raise KeyboardInterrupt
        real(path, value)

    with monkeypatch.context() as patch:
        patch.setattr(finish_module, "write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            finish(base / "data", Limits(max_documents=30))
    with pytest.raises(ShardError, match="unfinished"):
        TokenShards.open(base / "data/validation")
    finish(base / "data", Limits(max_documents=30))
    check_limited(base, base / "data", Limits(max_documents=30))


def test_shards_then_finish_names_what_is_missing(base, tmp_path, capsys):
    out = tmp_path / "data"
    build_corpus(out, base / "corpus", shard=JobSlice(1, 2))
    assert f"python -m data_prep finish {out}" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["finish", str(out)])
    assert "unit 1 is not built (2 of 5 are missing)" in capsys.readouterr().err
    with pytest.raises(ShardError, match="unfinished"):
        TokenShards.open(out / "train")
    with pytest.raises(UserError, match=r"no plan\.json"):
        finish(tmp_path, Limits())
    # a limit within the first unit needs no other
    finish(out, Limits(max_documents=5))
    check_limited(base, out, Limits(max_documents=5))


def test_a_cut_is_made_from_whole_files_only(base, tmp_path):
    """A changed mark is not taken for the truth: its unit counts as not built."""
    finish(base / "data", Limits())
    out = Path(shutil.copytree(base / "data", tmp_path / "data"))
    flip(out / "train/part-00000-0.docs", 0)
    with pytest.raises(UserError, match=r"part-00000-0\.docs: damaged"):
        finish(out, Limits(max_documents=2))
    mark = out / "train/part-00002-0.json"
    mark.write_text(mark.read_text().replace('"text_bytes": ', '"text_bytes": 1'))
    with pytest.raises(UserError, match=r"unit 2 is not built \(1 of 5"):
        finish(out, Limits(max_tokens=10**9))


def test_a_limited_shard_builds_what_may_be_needed(base, tmp_path):
    """The first of two shards cannot know the second's units, and stops once its own suffice."""
    in_units = [len(unit) for unit in documents(base, held_out=False)]
    limits = Limits(max_documents=in_units[0] + in_units[2] - 1)
    out = tmp_path / "data"
    build_corpus(out, base / "corpus", shard=JobSlice(1, 2), limits=limits)
    assert {name.split("-")[1] for name in snapshot(out / "train")} == {"00000", "00002"}
    build_corpus(out, base / "corpus", shard=JobSlice(2, 2), limits=limits)
    finish(out, limits)
    check_limited(base, out, limits)
