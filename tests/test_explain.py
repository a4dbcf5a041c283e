"""`canon explain`: windows of a step with documents, texts, losses and gradients."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from canon_pretrain import explain
from canon_pretrain.checkpoint.writer import save_no_dist
from canon_pretrain.core.files import write_json
from canon_pretrain.data.exclusion import read_excluded, write_excluded
from canon_pretrain.data.loader import BatchLoader, samples_digest
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.hf.window_losses import step_losses
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.report.diff import digests_by_step
from canon_pretrain.report.record import RunRecord
from canon_pretrain.report.windows import StepReader
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.stats.outliers import Sample, deviations
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.data import open_data
from canon_pretrain.titan.launch import resolved, run_identity
from tests.data_folders import make_data_folder, sentence, tokenizer
from tests.support import ROOT, canon_stage, command_error, debug_run, refused, train

canon = canon_stage("explain")

DEBUG = str(ROOT / "train_configs/debug.toml")
SEQ_LEN = 48
BATCH = 4
BAD = bytes(random.Random(3).randrange(256) for _ in range(1500)).decode("latin-1")
TEXTS = [sentence(seed, 60 + 7 * seed) for seed in range(30)]
TEXTS.insert(11, BAD)
BAD_DOCUMENT = 11


def write_run(folder, data, *, name="run", **settings):
    """Write the config of a debug run on `data`; return its path and its job."""
    words = ["--config", DEBUG, "--job.dump_folder", "unused"]
    options = {
        "data.path": data,
        "training.seq_len": SEQ_LEN,
        "training.global_batch_size": BATCH,
        "training.local_batch_size": 1,
        "training.steps": 400,
        "validation.enable": False,
    }
    for key, value in (options | settings).items():
        words += [f"--{key}", str(value)]
    job = parse_job(words)
    fingerprint = open_data(job).training.fingerprint
    run = RunFolder(folder / name)
    run.write_config(resolved(job), run_identity(job, fingerprint))
    return run.path, job


def train_on_words(model, steps=60):
    """Train on other texts of the same words."""
    ids = [tokenizer().encode(sentence(seed, 400)) for seed in range(1000, 1008)]
    tokens_BT = torch.from_numpy(np.stack([row[:300] for row in ids]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        start = step % 250
        batch_BT = tokens_BT[:, start : start + SEQ_LEN + 1]
        logits_BTV = model(batch_BT[:, :-1])
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), batch_BT[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on texts of which one is of random bytes, with a trained checkpoint of step 3."""
    folder = tmp_path_factory.mktemp("explain")
    make_data_folder(folder / "data", [TEXTS])
    run, job = write_run(folder, folder / "data")
    torch.manual_seed(0)
    model = Transformer(replace(job.model_args, max_seq_len=SEQ_LEN))
    model.init_weights()
    train_on_words(model)
    save_no_dist(dict(model.named_parameters()), run / "checkpoint" / "step-3", step=3)
    return run


def read(run, step):
    with StepReader(RunRecord(run)) as reader:
        return reader.read(step, tokenizer())


def contents(run, steps):
    record = RunRecord(run)
    with StepReader(record) as reader:
        return list(explain.step_contents(record, reader, tokenizer(), steps))


def labelled(row):
    """Return whether a document has a predicted token in its window."""
    return any(nats is not None for nats in row.nats)


def test_a_bad_document_is_first_in_each_step_with_it(trained):
    num_found = 0
    for content in contents(trained, range(4, 44)):
        bad = [row for row in content.documents if row.document == BAD_DOCUMENT and labelled(row)]
        if bad:
            num_found += 1
            assert content.documents[0].document == BAD_DOCUMENT
            for row in bad:  # the window may cut a character
                assert row.text.strip("\ufffd") in BAD
    assert num_found >= 20


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_windows_are_those_of_any_world_size(trained, world_size):
    windows = read(trained, 7)

    rows = []
    data = RunRecord(trained).config["data"]["path"]
    for rank in range(world_size):
        loader = BatchLoader(
            Mixture.open([data]),
            data_seed=0,
            seq_len=SEQ_LEN,
            global_batch_size=BATCH,
            local_batch_size=1,
            dp_rank=rank,
            dp_world_size=world_size,
        )
        num_batches = BATCH // world_size
        batches = [loader.next_batch() for _ in range(7 * num_batches)]
        rows += batches[6 * num_batches :]
    expected = sorted(row.tolist() for row in np.concatenate(rows))
    assert sorted(window.ids.tolist() for window in windows) == expected


@pytest.mark.parametrize("order", ["random", "permute", "documents"])
def test_texts_are_those_of_the_documents(tmp_path, order):
    texts = [f"  {text[:90]} \u00fc\U0001f642 {text[90:]}" for text in TEXTS[:10]]
    make_data_folder(tmp_path / "data", [texts])
    run, _ = write_run(tmp_path, tmp_path / "data", **{"data.order": order})

    parts = [part for step in (1, 2, 3) for window in read(run, step) for part in window.parts]

    encoded = [[*tokenizer().encode(text).tolist(), tokenizer().eos_id] for text in texts]
    for part in parts:
        ids = encoded[part.document]
        end = part.start + len(part.ids)
        assert ids[part.start : end] == part.ids
        assert part.document_tokens == len(ids)
        if end >= len(ids):  # whole characters: bytes are those after a prefix of the text
            tail = tokenizer().decode(ids).encode()[-len(part.text.encode()) :]
            assert part.text.encode() == tail or "\ufffd" in part.text
        assert part.text.strip("\ufffd") in texts[part.document]
    assert any(part.start > 0 for part in parts) == (order != "documents")


def test_losses_and_gradients_are_those_of_the_batch():
    torch.manual_seed(1)
    job = parse_job(["--config", DEBUG, "--model.vocab_size", "64"])
    model = Transformer(replace(job.model_args, max_seq_len=16))
    model.init_weights()
    windows = np.random.default_rng(2).integers(3, 64, (4, 17))

    losses = step_losses(model, list(windows))

    tokens_BT = torch.from_numpy(windows)
    logits_BTV = model(tokens_BT[:, :-1])
    nats_N = F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten(), reduction="none")
    nats_N.mean().backward()
    squares = [weight.grad.double().square().sum() for weight in model.parameters()]
    norm = float(torch.stack(squares).sum().sqrt())
    assert np.ravel(losses.nats) == pytest.approx(nats_N.tolist(), rel=1e-5)
    assert losses.gradient_norm == pytest.approx(norm, rel=1e-5)

    # one window alone
    model.zero_grad()
    nats_N = F.cross_entropy(model(tokens_BT[2:3, :-1])[0], tokens_BT[2, 1:], reduction="none")
    (nats_N.sum() / 64).backward()
    squares = [weight.grad.double().square().sum() for weight in model.parameters()]
    norm = float(torch.stack(squares).sum().sqrt())
    assert losses.gradient_norms[2] == pytest.approx(norm, rel=1e-5)


def test_launches_with_other_batch_sizes(tmp_path):
    """4 windows up to step 5, then 8, then again from step 7 on 2."""
    make_data_folder(tmp_path / "data", [TEXTS])
    events = []
    for segment, (from_step, batch) in enumerate([(0, 4), (5, 6), (9, 3), (7, 2)], 1):
        launch, _ = write_run(
            tmp_path / "run/launches",
            tmp_path / "data",
            name=f"{segment:03}",
            **{"training.global_batch_size": batch},
        )
        kind = "resume" if from_step else "start"
        events.append({"event": kind, "segment": segment, "from_step": from_step})
    write_json(tmp_path / "run/config.json", json.loads((launch / "config.json").read_text()))
    lines = [json.dumps(event) + "\n" for event in events]
    (tmp_path / "run/log.jsonl").write_text("".join(lines))

    samples = {
        step: [window.sample for window in read(tmp_path / "run", step)] for step in (5, 6, 8)
    }

    assert samples == {5: [16, 17, 18, 19], 6: [*range(20, 26)], 8: [32, 33]}


def test_other_windows_than_the_log_has_are_refused(trained, tmp_path):
    data = RunRecord(trained).config["data"]["path"]
    run, _ = write_run(tmp_path, data)
    rows = np.stack([window.ids for window in read(run, 2)])
    right = f"{samples_digest(rows):016x}"
    for digest in (right, "0" * 16):
        event = {"event": "step", "step": 2, "tokens": 1, "data_digests": [digest]}
        (run / "log.jsonl").write_text(json.dumps(event) + "\n")
        if digest == right:
            assert len(read(run, 2)) == BATCH
        else:
            with refused("explain.other_windows", step=2):
                read(run, 2)


def test_the_data_may_have_moved_but_not_changed(trained, tmp_path, capsys):
    data = RunRecord(trained).config["data"]["path"]
    run, _ = write_run(tmp_path, data)
    config = json.loads((run / "config.json").read_text())
    config["config"]["data"]["path"] = str(tmp_path / "nowhere")
    write_json(run / "config.json", config)
    assert command_error(capsys, canon, [str(run), "--step", "2"]) == "hf.no_tokenizer"

    canon([str(run), "--step", "2", "--data", data, "--json"])
    (step,) = json.loads(capsys.readouterr().out)["steps"]
    assert (step["checkpoint"], step["loss"]) == (None, None)
    assert {row["nats_per_token"] for row in step["documents"]} == {None}

    make_data_folder(tmp_path / "other", [TEXTS[:20]])
    words = [str(run), "--step", "2", "--data", str(tmp_path / "other")]
    assert command_error(capsys, canon, words) in ("explain.other_data", "hf.other_tokenizer")


def test_bad_steps_and_runs_are_refused(trained, tmp_path, capsys):
    assert command_error(capsys, canon, [str(trained), "--step", "401"]) == "explain.step"
    assert command_error(capsys, canon, [str(trained), "--step", "0"]) == "cli.usage"
    assert command_error(capsys, canon, [str(tmp_path), "--step", "1"]) == "run.not_a_run"
    config = json.loads((trained / "config.json").read_text())
    config["config"]["data"]["task"] = {"name": "mano"}
    (tmp_path / "task").mkdir()
    write_json(tmp_path / "task/config.json", config)
    assert command_error(capsys, canon, [str(tmp_path / "task"), "--step", "1"]) == "explain.task"


def test_the_page_and_the_steps_before(trained, tmp_path, capsys):
    page = tmp_path / "pages/page.html"
    canon(
        [str(trained), "--step", "9", "--around", "2", "--json", "--top", "3", "--out", str(page)]
    )

    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [step["step"] for step in steps] == [7, 8, 9]
    for step in steps:
        assert step["checkpoint"] == 3
        by_window = {row["sample"]: row["gradient_share"] for row in step["documents"]}
        assert len(by_window) == step["num_windows"] == BATCH
        assert sum(by_window.values()) == pytest.approx(1)
        order = [row["deviations"] for row in step["documents"] if row["deviations"] is not None]
        assert order == sorted(order, reverse=True)
        nats = [nats for row in step["documents"] for nats in row["nats"] if nats is not None]
        assert len(nats) == BATCH * SEQ_LEN
        assert np.mean(nats) == pytest.approx(step["loss"])
    text = page.read_text()
    assert text.count("<article") == 9
    assert len(text) < 200_000


def test_deviations_by_hand():
    typical = [Sample(mean, 2.0, 100) for mean in (2.9, 3.0, 3.1, 3.2, 2.8)]
    short = Sample(9.0, float("nan"), 1)
    long = Sample(9.0, 2.0, 100)

    found = deviations([*typical, short, long])

    # center and tau are of 2.8, 2.9, 3.0, 3.1, 3.2, 9.0
    tau = 1.4826 * np.median([0.25, 0.15, 0.05, 0.05, 0.15, 5.95])
    assert found[5] == pytest.approx((9 - 3.05) / np.hypot(tau, 2.0))
    assert found[6] == pytest.approx((9 - 3.05) / np.hypot(tau, 0.2))
    assert deviations([Sample(1.0, float("nan"), 1)]) == [0.0]
    assert deviations([Sample(1.0, 0.0, 20)] * 4) == [0.0] * 4
    assert deviations([]) == []


def test_outliers_are_excluded(trained, tmp_path, capsys):
    file = tmp_path / "lists/bad.json"
    words = [str(trained), "--step", "12", "--around", "6", "--exclude", str(file)]
    assert command_error(capsys, canon, [*words, "--deviations", "1e6"]) == "explain.no_outlier"
    canon([*words, "--deviations", "4"])

    data = RunRecord(trained).config["data"]["path"]
    fingerprint = Mixture.open([data]).fingerprint
    assert read_excluded(file).documents == {fingerprint: (BAD_DOCUMENT,)}

    # what is in the file remains
    write_excluded(file, {fingerprint: [2]})
    canon([*words, "--deviations", "4"])
    assert read_excluded(file).documents == {fingerprint: (2, BAD_DOCUMENT)}
    run, _ = write_run(tmp_path, data, **{"data.exclude": file})
    parts = [part for step in range(1, 30) for window in read(run, step) for part in window.parts]
    assert {2, BAD_DOCUMENT} & {part.document for part in parts} == set()


@pytest.mark.system
def test_a_run_leaves_out_what_is_excluded(tmp_path):
    """From step 6 on; the list is part of the identity, and ranks do not matter."""
    data = tmp_path / "data"
    make_data_folder(data, [TEXTS])
    file = tmp_path / "list.json"
    write_excluded(file, {Mixture.open([data]).fingerprint: [BAD_DOCUMENT]})
    runs = [tmp_path / "one", tmp_path / "two"]
    digests = []
    for ranks, run in enumerate(runs, 1):
        words = [*debug_run(data, run), "--validation.enable", "False"]
        train(*words, "--run.stop_at", 6, ranks=ranks)
        resumed = [*words, "--data.exclude", file]
        if run is runs[0]:
            assert "error[run.changed]" in train(*resumed, check=False).stderr
        train(*resumed, "--run.allow_changes", "data.exclude", ranks=ranks)

        assert RunRecord(run).identity["data.exclude"] == read_excluded(file).sha256
        digests.append(digests_by_step(RunRecord(run).events))

        # the digests of the log are those of the windows, before and after
        documents = {}
        for step in range(1, 13):
            parts = [part for window in read(run, step) for part in window.parts]
            documents[step] = {part.document for part in parts}
        assert [step for step in documents if BAD_DOCUMENT in documents[step]] == [1, 2, 3, 4, 5, 6]

    # it may not be dropped unnoticed either
    assert "error[run.changed]" in train(*words, check=False).stderr
    assert digests[0] == digests[1]
    assert len(digests[0]) == 12


@pytest.mark.system
def test_losses_and_gradients_are_those_that_training_logged(tmp_path):
    """In the step after a checkpoint, on two ranks."""
    data = tmp_path / "data"
    make_data_folder(data, [TEXTS])
    run = tmp_path / "run"
    train(*debug_run(data, run), "--validation.enable", "False", ranks=2)

    (content,) = contents(run, range(7, 8))

    assert content.checkpoint == 6
    assert content.loss == pytest.approx(content.logged_loss, rel=1e-5)
    assert content.gradient_norm == pytest.approx(content.logged_gradient_norm, rel=1e-4)
