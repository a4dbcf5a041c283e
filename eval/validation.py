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
from canon_pretrain.data.held_out import HeldOutLoss, held_out_loss, windows
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.run.results import BITS, COUNT_MODELS, NATS, VALIDATION, Score, TaskResult
from canon_pretrain.stats.noise import MIN_CLUSTERS, Clusters, mean_variance
from eval.harness import Remember, TaskPlan, no_memory
from eval.model.lm import CanonLM

METRICS = (BITS, NATS)
BASELINE_TOKENS = 20_000_000  # limit for the count models: a few hundred MB of counts


def validation_task(
    train: TokenShards,
    held_out: TokenShards,
    seq_len: int,
    limit: int | None,
    log: Callable[[str], None],
) -> TaskPlan:
    """Return the suite's one task: losses of the model and of count models of `train`."""

    def evaluate(lm: CanonLM, remember: Remember = no_memory) -> dict[str, TaskResult]:
        loss, documents = model_loss(lm, held_out, seq_len=seq_len, limit=limit)
        log("counting the training shards' unigrams and bigrams")
        baselines = baseline_losses(train, held_out, seq_len=seq_len, limit=limit)
        answers = {}
        for name, found in {VALIDATION: loss, **baselines}.items():
            samples = documents if name == VALIDATION else []
            relative = relative_error(samples)
            values = {metric: getattr(found, metric) for metric in METRICS}
            scores = {x: Score(value, relative and relative * value) for x, value in values.items()}
            answers[name] = TaskResult(scores, found.num_tokens, samples)
        return answers

    better = dict.fromkeys(METRICS, False)
    description = {"version": 3, "primary": [NATS], "higher_is_better": better}
    cost = sum(size for _, size in windows(held_out.num_tokens, seq_len, limit))
    return TaskPlan(description, cost, evaluate)


def model_loss(
    lm: CanonLM, shards: TokenShards, *, seq_len: int, limit: int | None = None
) -> tuple[HeldOutLoss, list[dict[str, Any]]]:
    """Return the model's held-out loss, and records of documents whose sums yield it."""
    places = list(windows(shards.num_tokens, seq_len, limit))
    ends_D = shards.document_ends()

    def plan(budget: int, chosen: Sequence[int]) -> list[Sequence[int]]:
        count = max(1, min(budget, lm.read_tokens or budget) // seq_len)
        return [chosen[start : start + count] for start in range(0, len(chosen), count)]

    sizes = [_by_document(ends_D, *place) for place in places]

    def work(budget: int, batch: Sequence[int]) -> dict[int, list[float]]:
        rows = [shards.read(*places[number]).tolist() for number in batch]
        scores = lm.score_parts(rows, [list(sizes[number].values()) for number in batch])
        return dict(zip(batch, scores, strict=True))

    scores = lm.map_batches(plan, lambda batch: batch, work, [size for _, size in places])
    nats, tokens = defaultdict[int, list[float]](list), Counter[int]()
    for known, parts in zip(sizes, scores, strict=True):
        tokens.update(known)
        for document, score in zip(known, parts, strict=True):
            nats[document].append(-score)
    total_nats = math.fsum(chain.from_iterable(nats.values()))
    bytes_per_token = shards.num_bytes / shards.num_tokens
    loss = held_out_loss([total_nats], [tokens.total()], [bytes_per_token])
    # a token's loss depends on all tokens before it in its window
    question = hashlib.sha256(f"{shards.fingerprint} {seq_len}".encode()).hexdigest()[:16]
    records: list[dict[str, Any]] = []
    for document, parts in sorted(nats.items()):
        start = int(ends_D[document - 1]) if document else 0
        content = shards.read(start, int(ends_D[document]) - start).astype("<u4").tobytes()
        total, count = math.fsum(parts), tokens[document]
        records.append(
            {
                "doc_id": document,
                "filter": "none",
                "doc_hash": hashlib.sha256(content).hexdigest()[:16],
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
    sums = np.array([record["nats_per_token"] for record in documents], float).reshape(-1, 2)
    if len(sums) < MIN_CLUSTERS or not np.isfinite(sums).all() or not sums[:, 0].any():
        return None
    clusters = Clusters(*sums.T)
    return abs(math.sqrt(mean_variance(clusters)) / clusters.mean)


def _by_document(ends_D: np.ndarray, offset: int, size: int) -> dict[int, int]:
    first, stop = offset + 1, offset + size
    low, high = np.searchsorted(ends_D, [first, stop - 1], side="right").tolist()
    sizes = np.diff([first, *ends_D[low:high], stop]).tolist()
    return dict(zip(range(low, high + 1), sizes, strict=True))


def baseline_losses(
    train: TokenShards, held_out: TokenShards, *, seq_len: int, limit: int | None = None
) -> dict[str, HeldOutLoss]:
    """Return unigram and bigram losses on the tokens of `model_loss`."""
    models = CountModels(train.read(0, min(train.num_tokens, BASELINE_TOKENS)), train.vocab_size)
    totals, count = models.score(held_out, seq_len, limit)
    bytes_per_token = held_out.num_bytes / held_out.num_tokens
    losses = [held_out_loss([total], [count], [bytes_per_token]) for total in totals.tolist()]
    return dict(zip(COUNT_MODELS, losses, strict=True))
