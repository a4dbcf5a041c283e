"""The suite `validation`: held-out loss of a checkpoint and of count models of the same shards.

The windows and their mean are those of the trainer (data/held_out.py).
"""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from canon_pretrain.data.count_models import CountModels
from canon_pretrain.data.held_out import HeldOutLoss, held_out_loss, split_windows
from canon_pretrain.data.sampler import Order
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.run.results import BITS, COUNT_MODELS, NATS, VALIDATION, Score, TaskResult
from canon_pretrain.stats.noise import MIN_CLUSTERS, Clusters, mean_variance
from eval.harness import Remember, TaskPlan
from eval.model.lm import CanonLM

METRICS = (BITS, NATS)
BASELINE_TOKENS = 20_000_000  # limit for the count models: a few hundred MB of counts


def validation_task(
    train: TokenShards,
    held_out: TokenShards,
    seq_len: int,
    limit: int | None,
    log: Callable[[str], None],
    order: Order = "random",
) -> TaskPlan:
    """Return the suite's one task: losses of the model and of count models of `train`."""

    def evaluate(lm: CanonLM, remember: Remember) -> dict[str, TaskResult]:
        loss, documents = model_loss(lm, held_out, seq_len=seq_len, limit=limit, order=order)
        results = {VALIDATION: _task_result(loss, documents)}
        log("counting the training shards' unigrams and bigrams")
        baselines = baseline_losses(train, held_out, seq_len=seq_len, limit=limit, order=order)
        for name, baseline in baselines.items():
            results[name] = _task_result(baseline, [])
        return results

    description = {
        "version": 3,
        "primary": [NATS],
        "higher_is_better": dict.fromkeys(METRICS, False),
    }
    num_tokens = sum(size for _, size in split_windows(held_out, seq_len, order, limit))
    return TaskPlan(description, num_tokens, evaluate)


def _task_result(loss: HeldOutLoss, documents: list[dict[str, Any]]) -> TaskResult:
    relative = relative_error(documents)
    scores: dict[str, Score] = {}
    for metric in METRICS:
        value: float = getattr(loss, metric)
        scores[metric] = Score(value, None if relative is None else relative * value)
    return TaskResult(scores, loss.num_tokens, documents)


def model_loss(
    lm: CanonLM,
    shards: TokenShards,
    *,
    seq_len: int,
    limit: int | None = None,
    order: Order = "random",
) -> tuple[HeldOutLoss, list[dict[str, Any]]]:
    """Return the model's held-out loss, and records of documents whose sums yield it."""
    # A window is (offset, number of tokens). A window that spans several documents has one score
    # for each of them.
    all_windows = list(split_windows(shards, seq_len, order, limit))
    ends_D = shards.document_ends()
    tokens_by_document = [_tokens_by_document(ends_D, *window) for window in all_windows]

    def plan(budget: int, chosen: Sequence[int]) -> list[Sequence[int]]:
        windows_per_batch = max(1, min(budget, lm.read_tokens or budget) // seq_len)
        return [
            chosen[start : start + windows_per_batch]
            for start in range(0, len(chosen), windows_per_batch)
        ]

    def work(budget: int, batch: Sequence[int]) -> dict[int, list[float]]:
        rows = [shards.read(*all_windows[number]).tolist() for number in batch]
        parts = [list(tokens_by_document[number].values()) for number in batch]
        return dict(zip(batch, lm.score_parts(rows, parts), strict=True))

    scores = lm.map_batches(
        plan=plan,
        members=lambda batch: batch,
        work=work,
        costs=[size for _, size in all_windows],
    )

    # From windows to documents: the negative log-likelihoods and the number of tokens of each.
    nats = defaultdict[int, list[float]](list)
    num_tokens = Counter[int]()
    for tokens_of_window, window_scores in zip(tokens_by_document, scores, strict=True):
        num_tokens.update(tokens_of_window)
        for document, score in zip(tokens_of_window, window_scores, strict=True):
            nats[document].append(-score)

    # The mean over all tokens, as in the trainer.
    total_nats = math.fsum(chain.from_iterable(nats.values()))
    bytes_per_token = shards.num_bytes / shards.num_tokens
    loss = held_out_loss([total_nats], [num_tokens.total()], [bytes_per_token])

    # a token's loss depends on all tokens before it in its window
    source = f"{shards.fingerprint} {seq_len}"
    if order == "documents":
        source = f"{source} {order}"
    question = hashlib.sha256(source.encode()).hexdigest()[:16]
    records: list[dict[str, Any]] = []
    for document, document_nats in sorted(nats.items()):
        start = int(ends_D[document - 1]) if document else 0
        ids = shards.read(start, int(ends_D[document]) - start)
        total = math.fsum(document_nats)
        count = num_tokens[document]
        records.append(
            {
                "doc_id": document,
                "filter": "none",
                "doc_hash": hashlib.sha256(ids.astype("<u4").tobytes()).hexdigest()[:16],
                "prompt_hash": question,
                # sums and their weights
                "nats_per_token": [total, count],
                "bits_per_byte": [-total, count * shards.num_bytes / shards.num_tokens],
            }
        )
    return loss, records


def relative_error(documents: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the standard error of the loss over its value; None below MIN_CLUSTERS documents.

    Tokens of a document are not independent, so it is over the records of documents.
    """
    # Columns: nats, and the number of tokens.
    if len(documents) < MIN_CLUSTERS:
        return None
    sums_D2 = np.array([record["nats_per_token"] for record in documents], float)
    if not np.isfinite(sums_D2).all() or not sums_D2[:, 0].any():
        return None

    clusters = Clusters(*sums_D2.T)
    stderr = math.sqrt(mean_variance(clusters))
    return abs(stderr / clusters.mean)


def _tokens_by_document(ends_D: np.ndarray, offset: int, size: int) -> dict[int, int]:
    """Return the number of scored tokens of a window by document; its first token is not scored."""
    start = offset + 1
    stop = offset + size
    first, last = np.searchsorted(ends_D, [start, stop - 1], side="right").tolist()
    borders = [start, *ends_D[first:last], stop]
    num_tokens = np.diff(borders).tolist()
    return dict(enumerate(num_tokens, first))


def baseline_losses(
    train: TokenShards,
    held_out: TokenShards,
    *,
    seq_len: int,
    limit: int | None = None,
    order: Order = "random",
) -> dict[str, HeldOutLoss]:
    """Return unigram and bigram losses on the tokens of `model_loss`."""
    counted = train.read(0, min(train.num_tokens, BASELINE_TOKENS))
    models = CountModels(counted, train.vocab_size)
    total_nats, num_tokens = models.score(held_out, seq_len, limit, order)
    bytes_per_token = held_out.num_bytes / held_out.num_tokens
    return {
        name: held_out_loss([nats], [num_tokens], [bytes_per_token])
        for name, nats in zip(COUNT_MODELS, total_nats.tolist(), strict=True)
    }
