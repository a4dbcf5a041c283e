"""Held-out loss: independent of the batching, with count models as baselines."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from canon_pretrain.core.terminal import Console
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
from eval.validation import METRICS, model_loss, relative_error, windows
from tests.support import error_codes

CPU = torch.device("cpu")


def held_out(data_folder):
    return TokenShards.open(data_folder / "validation")


@pytest.mark.parametrize("limit", [None, 3])
def test_document_records_sum_to_the_loss(data_folder, limit):
    """Each token counts for its document; the sums are the suite's score (issue 17, item 1)."""
    model = Transformer(FLAVORS["debug"]).eval()
    model.init_weights()
    shards, ends = held_out(data_folder), held_out(data_folder).document_ends()
    predicted: Counter[int] = Counter()
    nats: Counter[int] = Counter()
    whole = []  # of each window, as one sum
    with torch.no_grad():
        for offset, size in windows(shards.num_tokens, 50, limit):
            ids = torch.from_numpy(shards.read(offset, size))
            logs = torch.log_softmax(model(ids[None, :-1])[0].double(), -1)
            logs_T = logs.gather(1, ids[1:, None])[:, 0].tolist()
            whole.append(ids.tolist())
            for at, log in enumerate(logs_T, offset + 1):
                document = int(np.searchsorted(ends, at, side="right"))
                predicted[document] += 1
                nats[document] -= log
    lm = CanonLM(model, None, max_length=50, batch_tokens=150)
    loss, records = model_loss(lm, shards, seq_len=50, limit=limit)
    assert {r["doc_id"]: r["nats_per_token"][1] for r in records} == predicted
    assert {r["doc_id"]: r["nats_per_token"][0] for r in records} == pytest.approx(nats, rel=1e-5)
    assert len({r["doc_hash"] for r in records}) > 1 and len(records) >= 3
    # bitwise the mean, and the sum over whole windows in the same batches of three
    total = math.fsum(r["nats_per_token"][0] for r in records)
    assert total / predicted.total() == loss.nats_per_token
    by_window = []
    for k in range(0, len(whole), 3):
        rows = whole[k : k + 3]
        by_window += [score for (score,) in lm.score_parts(rows, [[len(r) - 1] for r in rows])]
    assert -math.fsum(by_window) == total
    of_bytes = math.fsum(r["bits_per_byte"][1] for r in records)
    assert total / math.log(2) / of_bytes == pytest.approx(loss.bits_per_byte, rel=1e-12)


def test_the_error_of_a_loss_is_over_documents():
    """Equal to a jackknife with a document left out at a time; unknown for few documents."""
    rng = np.random.default_rng(1)
    sums, counts = rng.uniform(100, 900, 9), rng.integers(20, 300, 9)
    pairs = zip(sums.tolist(), counts.tolist(), strict=True)
    records = [{"nats_per_token": [*pair]} for pair in pairs]
    left = [(sums.sum() - s) / (counts.sum() - n) for s, n in zip(sums, counts, strict=True)]
    loss = sums.sum() / counts.sum()
    expected = math.sqrt(8 / 9 * sum((value - loss) ** 2 for value in left)) / loss
    assert relative_error(records) == pytest.approx(expected)
    assert relative_error(records[:1]) is None and relative_error([]) is None


@pytest.mark.system
def test_the_command_evaluates_a_checkpoint(runs, data_folder, capsys):
    """12 steps beat the unigram, not the bigram model; the second call reads results.json."""
    checkpoint = runs.straight / "checkpoint" / "step-12"
    words = ["run", "--checkpoint", str(checkpoint), "--suite", "validation", "--must_beat"]
    for _ in range(2):
        main([*words, "unigram"])
        with pytest.raises(SystemExit) as left:
            main([*words, "bigram"])
        assert left.value.code == 2
        assert error_codes(capsys.readouterr().err) == ["eval.not_beaten"]
    (path,) = (runs.straight / "evals/step-12/validation").glob("*/results.json")
    results = read_results(path)
    lm = CanonLM(load_model(checkpoint, CPU), None, max_length=64)
    loss, _ = model_loss(lm, held_out(data_folder), seq_len=64)
    found = results.scores["validation"]["nats_per_token"].value
    assert found == pytest.approx(loss.nats_per_token)
    assert results.num_samples["validation"] == loss.num_tokens
    assert set(results.scores) == {"validation", "unigram", "bigram"}
    (items,) = read_samples(path.parent).values()
    total, count = (math.fsum(item["nats_per_token"][k] for item in items) for k in (0, 1))
    assert total / count == found
    # the weights are the trained ones: far from ln 512, near the training loss
    assert found == pytest.approx(5.9, abs=0.15)


@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_the_number_of_documents_is_stored_and_printed(count, capsys):
    documents = [
        {"doc_id": k, "filter": "none", "doc_hash": f"{k}", "prompt_hash": "x"}
        | {"nats_per_token": [10.0 + k, 4]}
        for k in range(count)
    ]
    relative = relative_error(documents)
    assert (relative is None) == (count < 8)
    scores = {name: Score(2.5, relative and 2.5 * relative) for name in METRICS}
    asked = {"suite": VALIDATION, "tasks": {}}
    answers = {VALIDATION: TaskResult(scores, 4 * count, documents)}
    results, samples = merge_tasks(asked, answers)
    assert results.num_sources == {VALIDATION: count} and len(samples[VALIDATION]) == count
    print_results(Console(), "x", results)
    assert f"{count} document" in capsys.readouterr().out
    print_results(Console(), "x", replace(results, num_sources={}))  # of an older version
    assert "document" not in capsys.readouterr().out
