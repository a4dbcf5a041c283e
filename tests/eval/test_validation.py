"""Held-out loss: independent of the batching, with count models as baselines."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from canon_pretrain.core.terminal import Console
from canon_pretrain.data.held_out import windows
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.hf.loading import load_model
from canon_pretrain.model.args import FLAVORS
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.results import (
    VALIDATION,
    Score,
    TaskResult,
    read_results,
    read_samples,
)
from eval.__main__ import main
from eval.model.lm import CanonLM
from eval.run import merge_tasks, print_results
from eval.validation import METRICS, model_loss, relative_error
from tests.support import command_error

CPU = torch.device("cpu")


def held_out(data_folder):
    """Open the held-out shards of a data folder."""
    return TokenShards.open(data_folder / "validation")


@pytest.fixture(scope="module")
def model():
    """An untrained model."""
    model = Transformer(FLAVORS["debug"]).eval()
    model.init_weights()
    return model


def nats_by_document(model, shards, seq_len, limit):
    """Return the number of predicted tokens and their nats by document, a window at a time."""
    ends = shards.document_ends()
    predicted: Counter[int] = Counter()
    nats: Counter[int] = Counter()
    with torch.no_grad():
        for offset, size in windows(shards.num_tokens, seq_len, limit):
            ids = torch.from_numpy(shards.read(offset, size))
            log_softmax = torch.log_softmax(model(ids[None, :-1])[0].double(), -1)
            logs_T = log_softmax.gather(1, ids[1:, None])[:, 0].tolist()
            for at, log in enumerate(logs_T, offset + 1):
                document = int(np.searchsorted(ends, at, side="right"))
                predicted[document] += 1
                nats[document] -= log
    return predicted, nats


@pytest.mark.parametrize("limit", [None, 3])
def test_document_records_sum_to_the_loss(data_folder, model, limit):
    """Each token counts for its document; the sums are the suite's score (issue 17, item 1)."""
    shards = held_out(data_folder)
    predicted, nats = nats_by_document(model, shards, 50, limit)
    lm = CanonLM(model, None, max_length=50, batch_tokens=150)

    loss, records = model_loss(lm, shards, seq_len=50, limit=limit)

    assert len(records) >= 3
    assert len({record["doc_hash"] for record in records}) > 1
    sums = {record["doc_id"]: record["nats_per_token"] for record in records}
    assert {document: count for document, (_, count) in sums.items()} == predicted
    assert {document: total for document, (total, _) in sums.items()} == pytest.approx(
        nats, rel=1e-5
    )

    # bitwise the mean
    total_nats = math.fsum(total for total, _ in sums.values())
    assert total_nats / predicted.total() == loss.nats_per_token
    num_bytes = math.fsum(record["bits_per_byte"][1] for record in records)
    bits_per_byte = total_nats / math.log(2) / num_bytes
    assert bits_per_byte == pytest.approx(loss.bits_per_byte, rel=1e-12)


@pytest.mark.parametrize("limit", [None, 3])
def test_document_records_sum_to_whole_windows(data_folder, model, limit):
    """Bitwise, in the same batches of three."""
    shards = held_out(data_folder)
    lm = CanonLM(model, None, max_length=50, batch_tokens=150)
    rows = [shards.read(*window).tolist() for window in windows(shards.num_tokens, 50, limit)]

    _, records = model_loss(lm, shards, seq_len=50, limit=limit)

    by_window = []
    for k in range(0, len(rows), 3):
        batch = rows[k : k + 3]
        by_window += [score for (score,) in lm.score_parts(batch, [[len(r) - 1] for r in batch])]
    total_nats = math.fsum(record["nats_per_token"][0] for record in records)
    assert -math.fsum(by_window) == total_nats


def test_the_error_of_a_loss_is_over_documents():
    """Equal to a jackknife with a document left out at a time; unknown for few documents."""
    num_documents = 9
    rng = np.random.default_rng(1)
    sums = rng.uniform(100, 900, num_documents)
    counts = rng.integers(20, 300, num_documents)
    pairs = zip(sums.tolist(), counts.tolist(), strict=True)
    records = [{"nats_per_token": [total, count]} for total, count in pairs]

    error = relative_error(records)

    loss = sums.sum() / counts.sum()
    left_out = (sums.sum() - sums) / (counts.sum() - counts)
    variance = (num_documents - 1) / num_documents * ((left_out - loss) ** 2).sum()
    assert error == pytest.approx(math.sqrt(variance) / loss)
    assert relative_error(records[:1]) is None
    assert relative_error([]) is None


@pytest.mark.system
def test_the_command_evaluates_a_checkpoint(runs, data_folder, capsys):
    """12 steps beat the unigram, not the bigram model; the second call reads results.json."""
    checkpoint = runs.straight / "checkpoint" / "step-12"
    words = ["run", "--checkpoint", str(checkpoint), "--suite", "validation", "--must_beat"]
    lm = CanonLM(load_model(checkpoint, CPU), None, max_length=64)
    loss, _ = model_loss(lm, held_out(data_folder), seq_len=64)

    for _ in ("written", "read"):
        main([*words, "unigram"])
        assert command_error(capsys, main, [*words, "bigram"]) == "eval.not_beaten"

    (path,) = (runs.straight / "evals/step-12/validation").glob("*/results.json")
    results = read_results(path)
    nats_per_token = results.scores["validation"]["nats_per_token"].value
    assert nats_per_token == pytest.approx(loss.nats_per_token)
    assert results.num_samples["validation"] == loss.num_tokens
    assert set(results.scores) == {"validation", "unigram", "bigram"}

    (items,) = read_samples(path.parent).values()
    total_nats = math.fsum(item["nats_per_token"][0] for item in items)
    num_tokens = math.fsum(item["nats_per_token"][1] for item in items)
    assert total_nats / num_tokens == nats_per_token
    # the weights are the trained ones: far from ln 512, near the training loss
    assert nats_per_token == pytest.approx(5.9, abs=0.15)


@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_the_number_of_documents_is_stored_and_printed(count, capsys):
    documents = [
        {
            "doc_id": k,
            "filter": "none",
            "doc_hash": f"{k}",
            "prompt_hash": "x",
            "nats_per_token": [10.0 + k, 4],
        }
        for k in range(count)
    ]
    error = relative_error(documents)
    assert (error is None) == (count < 8)
    scores = {name: Score(2.5, None if error is None else 2.5 * error) for name in METRICS}
    question = {"suite": VALIDATION, "tasks": {}}
    answers = {VALIDATION: TaskResult(scores, 4 * count, documents)}

    results, samples = merge_tasks(question, answers)

    assert results.num_sources == {VALIDATION: count}
    assert len(samples[VALIDATION]) == count
    print_results(Console(), "x", results)
    assert f"{count} document" in capsys.readouterr().out

    # results of an older version
    print_results(Console(), "x", replace(results, num_sources={}))
    assert "document" not in capsys.readouterr().out
