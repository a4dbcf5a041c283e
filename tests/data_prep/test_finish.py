"""Limits and manifests: the stream ends at the exact document, whatever was built before."""

import json

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


def limited_documents(base, limits):
    """Return (input group, text) of the training documents before the first one past a limit."""
    kept = []
    num_tokens = 0
    for group, content in enumerate(documents(base, held_out=False)):
        for text, count in content:
            num_tokens += count
            if limits.max_documents is not None and len(kept) >= limits.max_documents:
                return kept
            if limits.max_tokens is not None and num_tokens > limits.max_tokens:
                return kept
            kept.append((group, text))
    return kept


def check_limited(base, data, limits):
    """The splits of `data` end where the limits say."""
    kept = limited_documents(base, limits)
    assert stored_texts(data) == [text for _, text in kept]

    # the validation split ends with the last input group that training reaches
    num_groups = max(group for group, _ in kept) + 1
    held_out = []
    for group in documents(base, held_out=True)[:num_groups]:
        held_out += [text for text, _ in group]
    assert stored_texts(data, "validation") == held_out

    with TokenShards.open(data / "train") as shards, pytest.raises(ValueError):
        shards.read(shards.num_tokens - 1, 2)


def test_the_stream_ends_at_the_last_document_that_fits(base):
    groups = documents(base, held_out=False)
    counts = [count for group in groups for _, count in group]
    first_group = len(groups[0])
    first_50 = sum(counts[:50])
    all_limits = [
        Limits(max_documents=1),
        Limits(max_documents=first_group),
        Limits(max_documents=first_group + 1),
        Limits(max_documents=10**9),
        Limits(max_tokens=counts[0]),
        Limits(max_tokens=first_50 - 1),
        Limits(max_tokens=first_50),
        Limits(max_tokens=first_50 + 1),
        Limits(max_tokens=sum(counts) - 1),
        Limits(max_tokens=sum(counts)),
        Limits(50, first_50 + 1000),
        Limits(51, first_50),
    ]
    for limits in all_limits:
        finish(base / "data", limits)
        check_limited(base, base / "data", limits)
        main(["verify", str(base / "data")])


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.system)])
def test_a_limited_build_equals_finish_and_builds_no_more(base, tmp_path, workers):
    counts = [count for group in documents(base, held_out=False) for _, count in group]
    limits = Limits(max_tokens=sum(counts) // 2)
    finish(base / "data", limits)
    out = tmp_path / "data"

    build_corpus(out, base / "corpus", workers=workers, limits=limits)

    for split in SPLITS:
        manifest = f"{split}/manifest.json"
        assert (out / manifest).read_bytes() == (base / "data" / manifest).read_bytes()
    assert snapshot(out).items() <= snapshot(base / "data").items()
    assert workers > 1 or not any("part-00004" in name for name in snapshot(out))

    # without limits, it continues with what is there
    build_corpus(out, base / "corpus")
    finish(base / "data", Limits())
    assert snapshot(out) == snapshot(base / "data")


@pytest.fixture
def version_2(base, tmp_path, monkeypatch):
    """Return the corpus built in the format of version 2."""
    out = tmp_path / "data"
    with monkeypatch.context() as patch:
        patch.setattr("data_prep.planning.VERSION", 2)
        build_corpus(out, base / "corpus")
    finish(base / "data", Limits())
    return out


def test_a_folder_of_version_2_has_the_same_documents(base, version_2):
    old = snapshot(version_2)
    new = snapshot(base / "data")
    assert json.loads(old["plan.json"])["version"] == 2
    for name, content in new.items():
        if name.endswith((".bin", ".crc")):
            assert old[name] == content
        if name.endswith(".docs"):  # it has no sizes of texts
            assert content.startswith(old[name])
            assert len(content) == 2 * len(old[name])

    old_split = TokenShards.open(version_2 / "train")
    new_split = TokenShards.open(base / "data/train")
    assert old_split.num_bytes == new_split.num_bytes
    assert old_split.fingerprint != new_split.fingerprint
    assert old_split.document_ends().tolist() == new_split.document_ends().tolist()


def test_a_folder_of_version_2_is_continued_and_repaired(base, version_2):
    before = snapshot(version_2)

    for path in version_2.glob("*/part-00003-*"):
        path.unlink()
    build_corpus(version_2, base / "corpus")
    assert snapshot(version_2) == before

    (version_2 / "train/part-00001-0.docs").write_bytes(b"")
    main(["verify", str(version_2), "--repair"])
    assert snapshot(version_2).items() >= before.items()


def test_a_folder_of_version_2_cannot_be_cut(version_2):
    with refused("data.old_format"):
        finish(version_2, Limits(max_documents=30))

    # a limit at the end of a shard needs no cut
    first_shard = TokenShards.open(version_2 / "train").shards[0].entry.documents
    finish(version_2, Limits(max_documents=first_shard))
    assert len(stored_texts(version_2)) == first_shard


def test_a_kill_between_the_manifests_leaves_no_mixed_pair(base, monkeypatch):
    finish(base / "data", Limits())
    write_json = finish_module.write_json

    def killed(path, value):
        if path.parent.name == "validation":
            raise KeyboardInterrupt
        write_json(path, value)

    with monkeypatch.context() as patch:
        patch.setattr(finish_module, "write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            finish(base / "data", Limits(max_documents=30))

    with refused("shard.unfinished"):
        TokenShards.open(base / "data/validation")
    finish(base / "data", Limits(max_documents=30))
    check_limited(base, base / "data", Limits(max_documents=30))


def test_finish_reports_missing_and_damaged_groups(base, tmp_path):
    with refused("plan.missing"):
        finish(tmp_path, Limits())

    # every second input group
    out = tmp_path / "data"
    build_corpus(out, base / "corpus", job_slice=JobSlice(1, 2))
    with refused("data.not_built", input_group=1, missing=2):
        finish(out, Limits())
    with refused("shard.unfinished"):
        TokenShards.open(out / "train")

    # a limit within the first input group needs no other
    finish(out, Limits(max_documents=5))
    check_limited(base, out, Limits(max_documents=5))

    # needed for the cut
    flip(out / "train/part-00000-0.docs", 0)
    with refused("shard.damaged", path=out / "train/part-00000-0.docs"):
        finish(out, Limits(max_documents=2))

    # all input groups, one of them damaged
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

    first_warnings = warnings("first", holdout)

    assert bool(first_warnings) == (0 < holdout < 0.1)
    for line in first_warnings:
        _, _, advice = line.partition("--holdout ")
        advised_share = float(advice.split()[0])
        second_warnings = warnings("second", advised_share)
        assert bool(second_warnings) == (files == 2)
        if second_warnings:
            assert advised_share == 0.2
        else:
            assert len(stored_texts(tmp_path / "second", "validation")) >= 20
