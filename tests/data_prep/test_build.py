"""Plans, and builds of a small library: the same bytes however they ran, nothing overwritten."""

import hashlib
import importlib.util
import json
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import sentencepiece
import zstandard

from canon_pretrain.core.lock import locked
from canon_pretrain.data.tokenizer import Tokenizer
from data_prep import plan as plans
from data_prep import planning, sources
from data_prep.__main__ import main
from data_prep.build import JobSlice, _check_folder, build
from data_prep.plan import Input, Options, is_held_out, make_input_groups
from data_prep.planning import train_tokenizer
from data_prep.sources import SourceOptions
from tests.bench import data_prep as bench
from tests.checkpoint_folders import kill_at, run_forked
from tests.corpora import snapshot, stored_texts, write_corpus, write_tokenizer
from tests.data_folders import tokenizer
from tests.support import command_error, error_codes, refused

OPTIONS = Options(holdout=0.3, unit_bytes=600, max_part_tokens=700)
TOKENIZER = "train:400"


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory):
    """Replace Python's library by a small one, with a file that is no text and two empty ones."""
    root = tmp_path_factory.mktemp("library")
    (root / "pydoc_data").mkdir()
    topics = {f"t{i}": f"Topic {i}: the quick brown fox, </s> and <s> too.\n" * 3 for i in range(9)}
    (root / "pydoc_data/topics.py").write_text(f"topics = {topics!r}\n")
    for i in range(24):
        function = f"def f{i}(x):\n    return x + {i}\n\n"
        body = f"# module {i}: naïve text\n" + function * (i % 7 + 1)
        (root / f"m{i}.py").write_bytes(body.encode())
    (root / "latin.py").write_bytes("# coding: latin-1\n# é ü".encode("latin-1"))
    (root / "broken.py").write_bytes(b"# \xff\n")
    (root / "empty.py").write_bytes(b"")
    (root / "blank.py").write_bytes(b"  \r\n\t")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "stdlib_root", lambda: root)
        yield root


def build_library(out):
    build(out, SourceOptions("stdlib"), TOKENIZER, OPTIONS, workers=1)


@pytest.fixture(scope="module")
def reference(library, tmp_path_factory):
    """Return the library, built in one go."""
    out = tmp_path_factory.mktemp("reference") / "data"
    build_library(out)
    return out


def test_all_documents_are_stored_in_order(library, reference):
    """Compared with texts read without the code under test."""
    namespace: dict[str, Any] = {}
    exec((library / "pydoc_data/topics.py").read_text(), namespace)
    texts = [namespace["topics"][f"t{i}"] for i in range(9)]
    for name in ["blank.py", "latin.py", *(f"m{i}.py" for i in range(24))]:
        encoding = "latin-1" if name == "latin.py" else "utf-8"
        texts.append((library / name).read_bytes().decode(encoding))
    held_out = [text for text in texts if is_held_out(text.encode(), OPTIONS.holdout)]
    train = [text for text in texts if not is_held_out(text.encode(), OPTIONS.holdout)]
    assert held_out
    assert train

    assert len(list((reference / "train").glob("*.bin"))) > 5
    assert stored_texts(reference) == train
    assert stored_texts(reference, "validation") == held_out


# 0: before plan.json; 1: before the tokenizer; then within and between input groups; at a manifest
@pytest.mark.parametrize("survived", [0, 1, 5, 23, -2])
def test_killed_and_resumed_gives_the_same_bytes(tmp_path, reference, capsys, survived):
    out = tmp_path / "data"
    num_renames = len(snapshot(reference))  # one per file, except for the lock

    killed = run_forked(lambda: (kill_at(survived % num_renames, ["rename"]), build_library(out)))
    assert killed == -signal.SIGKILL
    assert not (out / "validation/manifest.json").exists()
    inodes = {path: path.stat().st_ino for path in out.glob("train/part-00000-0.bin")}
    build_library(out)

    assert snapshot(out) == snapshot(reference)
    if survived == 23:  # finished input groups and the tokenizer are kept
        printed = capsys.readouterr().out
        assert "resuming: 2 of" in printed
        assert "trained" not in printed
        assert inodes
        assert all(path.stat().st_ino == inode for path, inode in inodes.items())


def test_the_command_again_and_with_other_options(tmp_path, capsys):
    out = tmp_path / "deep" / "data"
    command = ["build", "--source", "stdlib", "--tokenizer", TOKENIZER, "--out", str(out),
               "--holdout", "0.2", "--workers", "1"]  # fmt: skip
    main(command)
    assert "1 empty, 1 undecodable" in capsys.readouterr().out
    before = snapshot(out)

    # again: nothing to do
    main(command)
    assert capsys.readouterr().out.count("\n") == 1
    main(["verify", str(out)])

    # with other options
    for options in (["--holdout", "0.1"], ["--tokenizer", "train:401"]):
        assert command_error(capsys, main, [*command, *options]) == "plan.changed"
    assert snapshot(out) == before

    # with another tokenizer
    write_tokenizer(out / "tokenizer.model")
    assert command_error(capsys, main, command) == "tokenizer.changed"


def test_a_plan_written_meanwhile_is_not_another_file(tmp_path, monkeypatch):
    iterdir = Path.iterdir

    def write_plan_while_listing(folder):
        (folder / plans.PLAN).write_text("{}")
        return list(iterdir(folder))

    monkeypatch.setattr(Path, "iterdir", write_plan_while_listing)
    _check_folder(tmp_path)


@pytest.mark.parametrize(
    ("code", "source", "requested_tokenizer"),
    [
        ("config.unknown_choice", "pile", TOKENIZER),
        ("tokenizer.unreadable", "stdlib", "/no/tokenizer.model"),
        ("option.invalid", "stdlib", "train:many"),
        ("tokenizer.training", "stdlib", "train:10"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, code, source, requested_tokenizer):
    with refused(code):
        build(tmp_path / "data", SourceOptions(source), requested_tokenizer, OPTIONS, 1)
    assert set(snapshot(tmp_path)) <= {"data/build.lock"}


@pytest.mark.parametrize("shard", ["0/3", "4/3"])
def test_bad_slices_of_a_job_are_refused(shard):
    with refused("option.invalid", option="--shard"):
        JobSlice.parse(shard)


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"mine")
    with refused("data.other_files", path=tmp_path / "tokenizer.model"):
        build_library(tmp_path)
    assert snapshot(tmp_path) == {"tokenizer.model": b"mine"}


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--tokenizer", "none.model"], "tokenizer.unreadable"),
        (["--tokenizer", "train:x"], "option.invalid"),
        (["--holdout", "2"], "option.invalid"),
        (["--max-document-bytes", "1"], "option.invalid"),
        (["--source", "nobody"], "config.unknown_choice"),
        (["--source", "local"], "option.missing"),
        (["--source", "local", "--files", "none"], "input.none"),
        (["--source", "fineweb-edu", "--text-field", "x"], "option.conflict"),
        (["--out", "other"], "data.other_files"),
        (["--shard", "1/2"], "option.conflict"),
    ],
)
def test_what_a_job_would_refuse_is_refused_before_the_queue(
    options, code, tmp_path, monkeypatch, capsys
):
    """By the command of slurm/data_prep.sh, which writes nothing, and asks no hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a file").touch()
    command = ["build", "--unbuilt-of", "2", "--source", "stdlib", "--tokenizer", "train:400",
               "--out", "x"]  # fmt: skip

    with pytest.raises(SystemExit, match="2"):
        main([*command, *options])
    printed = capsys.readouterr()
    assert error_codes(printed.err) == [code]
    assert not printed.out
    assert not (tmp_path / "x").exists()

    # without the bad option it names the unbuilt slices
    main(command)
    assert capsys.readouterr().out == "1,2\0x\0x\0"


def test_a_second_run_at_the_same_time_is_refused(tmp_path, reference, monkeypatch, capsys):
    monkeypatch.setattr("data_prep.folder.PLAN_LOCK_TIMEOUT_S", 0.2)
    monkeypatch.setattr("data_prep.folder.INPUT_GROUP_LOCK_TIMEOUT_S", 0.2)

    # while another run plans
    with locked(tmp_path / "build.lock", "x"):
        with refused("lock.held"):
            build_library(tmp_path)
    assert "waiting: " in capsys.readouterr().out

    # while another run builds an input group
    build_library(tmp_path)
    for path in tmp_path.glob("*/part-00001-*"):
        path.unlink()
    with locked(tmp_path / "locks/unit-00001.lock", "x"):
        with refused("lock.held"):
            build_library(tmp_path)
        assert not list(tmp_path.glob("*/part-00001-*"))

    build_library(tmp_path)
    assert snapshot(tmp_path) == snapshot(reference)


def test_building_again_repairs_damage(tmp_path, reference):
    out = Path(shutil.copytree(reference, tmp_path / "data"))
    manifest = out / "train/manifest.json"
    record = out / "train/part-00001-0.json"
    for damage in (
        lambda: [path.unlink() for path in out.glob("train/part-00001-*")],
        lambda: (out / "validation/part-00002-0.crc").write_bytes(b"longer than it was"),
        lambda: manifest.unlink(),
        lambda: manifest.write_text("{"),
        lambda: (out / "tokenizer.model").unlink(),
        lambda: record.write_text(record.read_text().replace('"text_bytes": ', '"text_bytes": 1')),
    ):
        damage()
        build_library(out)
        assert snapshot(out) == snapshot(reference)


def test_groups_and_repaired_texts_are_counted(tmp_path):
    texts = {"one \ud800 half": "ArXiv", "a </s> b": "C4", "": "C4", "c": "C4"}
    for number in (2, 10):
        path = tmp_path / f"copy/train/chunk{number}/example_train_0.jsonl.zst"
        path.parent.mkdir(parents=True)
        lines = [
            json.dumps({"text": text, "meta": {"redpajama_set_name": group}})
            for text, group in texts.items()
        ]
        path.write_bytes(zstandard.compress("\n".join(lines).encode()))
    out = tmp_path / "data"
    model = str(write_tokenizer(tmp_path / "tokenizer.model"))

    build(out, SourceOptions("slimpajama", [tmp_path / "copy"]), model, Options(holdout=0.0), 1)

    stored = ["one \ufffd half", "a </s> b", "c"]
    assert stored_texts(out) == 2 * stored
    record = json.loads((out / "train/part-00000-0.json").read_text())
    # documents, tokens and bytes
    lengths = [len(tokenizer().encode(text)) + 1 for text in stored]
    assert record["groups"] == {
        "ArXiv": [2, 2 * lengths[0], 2 * 12],
        "C4": [4, 2 * sum(lengths[1:]), 2 * 9],
    }
    assert record["repaired"] == {"lone surrogate": 2}
    assert record["skipped"] == {"empty": 2}


def test_tiny_stories_as_the_ablation_has_them(tmp_path):
    """Files of the dataset's schema: a document per story, in order, up to the limit."""
    mirror = tmp_path / "mirror" / "data"
    mirror.mkdir(parents=True)
    stories = []
    for file in range(2):
        texts = [f"{file}.{n} One day, Lily saw a cat.\n" * (n % 3) for n in range(7)]
        name = f"train-0000{file}-of-00002-{file:016x}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), mirror / name)
        stories += [text for text in texts if text]  # one without text is no document
    name = f"validation-00000-of-00001-{9:016x}.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["The end.", "Another."]}), mirror / name)
    model = write_tokenizer(tmp_path / "tokenizer.model")

    for source, out, limit in (("tinystories", "a", 6), ("tinystories-validation", "b", 1)):
        words = f"build --source {source} --holdout 0 --max-documents {limit}"
        paths = ["--files", mirror, "--tokenizer", model, "--out", tmp_path / out]
        main([*words.split(), *map(str, paths)])

    assert stored_texts(tmp_path / "a") == stories[:6]
    assert stored_texts(tmp_path / "b") == ["The end."]


# ---- training a tokenizer

TEXTS = ["def f(x):\n    return x + 2024\n", "the cat sat on the mat, then the end\n" * 5]


def test_a_small_vocabulary_has_the_frequent_characters():
    characters = [chr(0x4E00 + k) for k in range(2000)]
    # the k-th character is drawn with a weight of 1 / (k + 1)
    weights = [1 / (k + 1) for k in range(2000)]
    text = "".join(random.Random(0).choices(characters, weights, k=60_000))
    texts = [text, "a\nb"]

    model = train_tokenizer(texts, 600)

    assert model == train_tokenizer(iter(texts), 600)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert processor.vocab_size() == 600
    assert processor.decode(processor.encode(text)) == text

    # frequent characters are pieces, rare ones bytes
    pieces = {processor.id_to_piece(k) for k in range(600)}
    assert set(characters[:100]) <= pieces
    assert not set(characters[500:]) & pieces
    utf8 = [f"<0x{byte:02X}>" for byte in characters[1999].encode()]
    assert processor.encode(characters[1999], out_type=str)[-3:] == utf8


def test_a_tokenizer_is_trained_on_all_but_the_held_out(tmp_path):
    texts = write_corpus(tmp_path / "corpus", files=30)
    selection = sources.select(SourceOptions("local", [tmp_path / "corpus"]))

    training_texts = list(planning.training_texts(selection, Options(holdout=0.2)))

    assert training_texts == [text for text in texts if not is_held_out(text.encode(), 0.2)]
    assert len(training_texts) < len(texts)


def test_training_settings_and_determinism(capfd):
    model = train_tokenizer(TEXTS, 330)
    assert model == train_tokenizer(iter(TEXTS), 330)
    assert capfd.readouterr().err == ""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert [processor.id_to_piece(i) for i in range(4)] == ["<unk>", "<s>", "</s>", "<0x00>"]
    assert processor.encode("\n", out_type=str) == ["▁", "<0x0A>"]
    assert processor.encode("2024", out_type=str) == ["▁", "2", "0", "2", "4"]
    assert {"▁▁", "▁the"} <= {processor.id_to_piece(i) for i in range(330)}


def test_a_tokenizer_is_trained_on_all_of_a_large_source(tmp_path, monkeypatch):
    texts = write_corpus(tmp_path / "corpus", files=30)
    selection = sources.select(SourceOptions("local", [tmp_path / "corpus"]))
    monkeypatch.setattr(planning, "TRAIN_BYTES", 20_000)
    monkeypatch.setattr(planning, "TRAIN_INPUTS", 6)

    chosen = list(planning.training_texts(selection, Options(holdout=0.2)))

    assert {text.partition(".")[0] for text in chosen} == {"0", "5", "10", "15", "20", "25"}
    assert set(chosen) < {text for text in texts if not is_held_out(text.encode(), 0.2)}
    assert 20_000 <= sum(len(text.encode()) for text in chosen) < 26_000


# ---- the benchmark


@pytest.mark.system
def test_every_row_is_of_the_same_tokens(tmp_path, monkeypatch):
    texts = [*TEXTS, *(f"def f{k}(x): return x[{k}:]\n" for k in range(300))]
    model = Tokenizer(train_tokenizer(texts, 330), "test")
    count = bench.count_tokens
    token_counts = []

    def record_count(out):
        token_counts.append(count(out))
        return token_counts[0]

    monkeypatch.setattr(bench, "count_tokens", record_count)
    rows = [
        *bench.measure_encoding(model, texts, 2),
        *bench.measure_builds(model, texts, tmp_path / "builds", 1),
        *bench.measure_reading(tmp_path / "reading", 1, tokens=1 << 17, batches=20),
        *bench.measure_start(tmp_path / "start", 1, shards=3, tokens=3_000_000),
    ]

    assert len(token_counts) >= 2
    assert set(token_counts) == {sum(len(model.encode(text)) + 1 for text in texts)}  # an EOS each
    values = {row["what"]: row["value"] for row in rows}
    assert len(values) == len(rows)
    assert set(bench.TARGETS) < set(values)
    missing = {name for name, value in values.items() if value is None}
    has_datatrove = importlib.util.find_spec("datatrove") is not None
    assert len(missing) == (0 if has_datatrove else 1)
    assert all("datatrove" in name for name in missing)
    assert all(value > 0 for name, value in values.items() if name not in missing)


# ---- plans


def test_input_groups_cover_the_inputs_in_order():
    inputs = tuple(Input(f"f{i}.py", 10 * i, f"{i:064x}") for i in range(12))

    def groups(inputs, **rule):
        return make_input_groups(inputs, Options(holdout=0.1, **rule))

    assert groups(inputs, unit_bytes=100) == ((0, 5), (5, 7), (7, 9), (9, 11), (11, 12))
    assert groups(inputs, unit_bytes=10**9) == ((0, 12),)
    assert groups(inputs[5:], unit_bytes=1) == tuple((i, i + 1) for i in range(7))
    assert groups((), unit_bytes=1) == ()
    assert groups((), unit_files=1) == ()
    assert groups(inputs, unit_files=5) == ((0, 5), (5, 10), (10, 12))
    assert groups(inputs, unit_files=5, unit_bytes=1) == groups(inputs, unit_files=5)


def test_held_out_by_hash():
    texts = [f"document {i}".encode() for i in range(4000)]
    held_out = [text for text in texts if is_held_out(text, 0.1)]
    assert 330 < len(held_out) < 470
    assert set(held_out) < {text for text in texts if is_held_out(text, 0.2)}
    assert not any(is_held_out(text, 0.0) for text in texts)

    # exactly those whose hash is below the share
    share = int(hashlib.sha256(b"holdout" + texts[0]).hexdigest()[:16], 16) / 2**64
    assert is_held_out(texts[0], share + 1e-9)
    assert not is_held_out(texts[0], share - 1e-9)


def test_a_plan_is_read_as_it_was_written(tmp_path, reference):
    plan = plans.load_plan(reference)
    plans.save_plan(tmp_path, plan)
    assert plans.load_plan(tmp_path) == plan
    assert (tmp_path / "plan.json").read_text() == (reference / "plan.json").read_text()


def test_a_missing_plan_is_refused(tmp_path):
    with refused("plan.missing"):
        plans.load_plan(tmp_path)


def test_a_damaged_plan_is_refused(tmp_path, reference):
    path = tmp_path / "plan.json"
    good = (reference / "plan.json").read_text()
    damaged = [good[:-20], "[]"]
    for change in ({"version": 7}, {"source": "x"}, {"options": {"holdout": 3}}, {"units": [[1]]}):
        damaged.append(json.dumps({**json.loads(good), **change}))

    for content in damaged:
        path.write_text(content)
        with refused("plan.damaged", path=path):
            plans.load_plan(tmp_path)


def test_one_long_file_of_plain_text_is_cut_and_held_out_from(tmp_path):
    text = "".join(f"Paragraph {i} of one long naïve text.\n\n" for i in range(900))
    (tmp_path / "book.md").write_text(text)
    out = tmp_path / "data"
    source = SourceOptions("local", [tmp_path / "book.md"], text_suffixes=[".md"])

    build(out, source, "train:300", Options(holdout=0.2, max_document_bytes=500), workers=1)

    train = stored_texts(out)
    held_out = stored_texts(out, "validation")
    assert len(train) > 4 * len(held_out) / 2 > 0
    assert len(train) + len(held_out) > 60
    parts = sorted([*train, *held_out], key=text.index)
    assert "".join(parts) == text

    # the size is part of the plan, unless it is the default
    with refused("plan.changed"):
        build(out, source, "train:300", Options(holdout=0.2), workers=1)
    plan = plans.load_plan(out)
    assert plan.options.max_document_bytes == 500
    default = plans.replace(plan, options=Options(holdout=0.2)).record()["options"]
    assert "max_document_bytes" not in default


def test_tiny_documents_are_no_option():
    with refused("option.invalid", option="--max-document-bytes"):
        Options(holdout=0.2, max_document_bytes=9)
