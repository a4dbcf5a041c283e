"""Limits and manifests: the stream ends at the exact document, whatever was built before."""

import json
from itertools import accumulate

import pytest

from canon_pretrain.data.shards import TokenShards
from data_prep import finish as finish_module
from data_prep.__main__ import main
from data_prep.build import JobSlice
from data_prep.finish import finish
from data_prep.folder import SPLITS
from data_prep.plan import Limits, Options, is_held_out
from tests.corpora import (
    OPTIONS,
    build_corpus,
    corpus_folder,
    flip,
    snapshot,
    stored_texts,
    write_corpus,
    write_tokenizer,
)
from tests.data_folders import tokenizer
from tests.support import refused


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return a corpus, its tokenizer, and `data`, which each test finishes with its own limits."""
    return corpus_folder(tmp_path_factory.mktemp("finish"), files=9)


def documents(base, held_out):
    """Return (text, tokens with EOS) of a split's documents by input group, from the corpus."""
    groups: list[list[tuple[str, int]]] = [[] for _ in range(5)]
    for file in range(9):
        for line in (base / f"corpus/part{file + 1}.jsonl").read_text().splitlines():
            text = json.loads(line)["text"]
            if is_held_out(text.encode(), OPTIONS.holdout) == held_out:
                groups[file // 2].append((text, len(tokenizer().encode(text)) + 1))
    return groups


def check_limited(base, data, limits):
    groups = documents(base, held_out=False)
    flat = [(group, *document) for group, content in enumerate(groups) for document in content]
    totals = accumulate(count for *_, count in flat)
    expected = [
        (group, text)
        for index, ((group, text, _), total) in enumerate(zip(flat, totals, strict=True))
        if (limits.max_documents is None or index < limits.max_documents)
        and (limits.max_tokens is None or total <= limits.max_tokens)
    ]
    assert stored_texts(data) == [text for _, text in expected]
    reached = max(group for group, _ in expected) + 1
    held_out = [text for group in documents(base, held_out=True)[:reached] for text, _ in group]
    assert stored_texts(data, "validation") == held_out
    with TokenShards.open(data / "train") as shards, pytest.raises(ValueError):
        shards.read(shards.num_tokens - 1, 2)


def test_the_stream_ends_at_the_last_document_that_fits(base):
    counts = [count for group in documents(base, held_out=False) for _, count in group]
    exact = sum(counts[:50])
    first_group = len(documents(base, held_out=False)[0])
    limits = [Limits(max_documents=n) for n in (1, first_group, first_group + 1, 10**9)]
    edges = (counts[0], exact - 1, exact, exact + 1, sum(counts) - 1, sum(counts))
    limits += [Limits(max_tokens=n) for n in edges]
    limits += [Limits(50, exact + 1000), Limits(51, exact)]
    for each in limits:
        finish(base / "data", each)
        check_limited(base, base / "data", each)
        main(["verify", str(base / "data")])


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.system)])
def test_a_limited_build_equals_finish_and_builds_no_more(base, tmp_path, workers):
    counts = [count for group in documents(base, held_out=False) for _, count in group]
    limits = Limits(max_tokens=sum(counts) // 2)
    finish(base / "data", limits)
    out = tmp_path / "data"
    build_corpus(out, base / "corpus", workers=workers, limits=limits)
    for name in (f"{split}/manifest.json" for split in SPLITS):
        assert (out / name).read_bytes() == (base / "data" / name).read_bytes()
    assert snapshot(out).items() <= snapshot(base / "data").items()
    assert workers > 1 or not any("part-00004" in name for name in snapshot(out))

    # without limits, it continues with what is there
    build_corpus(out, base / "corpus")
    finish(base / "data", Limits())
    assert snapshot(out) == snapshot(base / "data")


def test_a_folder_of_version_2_is_continued(base, tmp_path, monkeypatch):
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

    with refused("data.old_format"):
        finish(out, Limits(max_documents=30))
    # a limit at the end of a shard needs no cut
    first = plain.shards[0].entry.documents
    finish(out, Limits(max_documents=first))
    assert len(stored_texts(out)) == first


def test_a_kill_between_the_manifests_leaves_no_mixed_pair(base, monkeypatch):
    finish(base / "data", Limits())
    real = finish_module.write_json

    def killed(path, value):
        if path.parent.name == "validation":
            raise KeyboardInterrupt
        real(path, value)

    with monkeypatch.context() as patch:
        patch.setattr(finish_module, "write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            finish(base / "data", Limits(max_documents=30))
    with refused("shard.unfinished"):
        TokenShards.open(base / "data/validation")
    finish(base / "data", Limits(max_documents=30))
    check_limited(base, base / "data", Limits(max_documents=30))


def test_finish_reports_missing_and_damaged_groups(base, tmp_path):
    out = tmp_path / "data"
    build_corpus(out, base / "corpus", job_slice=JobSlice(1, 2))
    with refused("data.not_built", input_group=1, missing=2):
        finish(out, Limits())
    with refused("shard.unfinished"):
        TokenShards.open(out / "train")
    with refused("plan.missing"):
        finish(tmp_path, Limits())
    # a limit within the first input group needs no other
    finish(out, Limits(max_documents=5))
    check_limited(base, out, Limits(max_documents=5))
    flip(out / "train/part-00000-0.docs", 0)  # needed for the cut
    with refused("shard.damaged", path=out / "train/part-00000-0.docs"):
        finish(out, Limits(max_documents=2))
    build_corpus(out, base / "corpus", job_slice=JobSlice(2, 2))
    flip(out / "train/part-00002-0.json", 60)
    with refused("data.not_built", input_group=2, missing=1):
        finish(out, Limits(max_tokens=10**9))


def test_a_limited_job_builds_what_may_be_needed(base, tmp_path):
    """The first of two jobs does not know the second's sizes; it stops when its own suffice."""
    sizes = [len(group) for group in documents(base, held_out=False)]
    limits = Limits(max_documents=sizes[0] + sizes[2] - 1)
    out = tmp_path / "data"
    build_corpus(out, base / "corpus", job_slice=JobSlice(1, 2), limits=limits)
    assert {name.split("-")[1] for name in snapshot(out / "train")} == {"00000", "00002"}
    build_corpus(out, base / "corpus", job_slice=JobSlice(2, 2), limits=limits)
    finish(out, limits)
    check_limited(base, out, limits)


@pytest.mark.parametrize(("files", "holdout"), [(9, 0.02), (9, 0.0), (2, 0.02), (20, 0.1)])
def test_few_held_out_documents_have_a_way_out(tmp_path, capsys, files, holdout):
    """The advised share holds out 20 documents or more, of at least 100."""
    write_corpus(tmp_path / "corpus", files=files, words=4)
    write_tokenizer(tmp_path / "tokenizer.model")

    def warnings(out, share):
        options = Options(holdout=share, unit_files=20)
        build_corpus(tmp_path / out, tmp_path / "corpus", options=options)
        printed = capsys.readouterr().out.splitlines()
        return [line for line in printed if line.startswith("WARNING")]

    found = warnings("first", holdout)
    assert bool(found) == (0 < holdout < 0.1)
    for line in found:
        words = line.split()
        advised = float(words[words.index("--holdout") + 1])
        again = warnings("second", advised)
        assert bool(again) == (files == 2)
        assert (
            advised == 0.2 if again else len(stored_texts(tmp_path / "second", "validation")) >= 20
        )
