"""Many (context, continuation) pairs scored: a batch of the plan (score_plan.py) in a few passes.

Between lm.py, which makes pairs of requests, and the model. Logits are made where a token is
scored, and nowhere else. Padding is on the right: the model is causal, so it changes nothing.

Shapes: B rows, T tokens, V vocabulary, M places whose logits are needed, N scored tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from canon_pretrain.core.errors import UserError
from canon_pretrain.model.cache import Cache
from canon_pretrain.model.transformer import Transformer
from eval.model.score_plan import Batch, Pair, Planner, Row, widest

SOFTMAX_ROWS = 128

Answer = tuple[float, bool]
"""(log-likelihood, is every token the likeliest)."""


@torch.inference_mode()
def score_batch(
    model: Transformer, planner: Planner, pairs: Sequence[Pair], batch: Batch
) -> dict[int, Answer]:
    """The answers of a batch's pairs, by their indices in `pairs`.

    Log-softmax in float32 whatever the model's dtype, sums in float64. Raises UserError for logits
    that are not finite.
    """
    found = _Found()
    # what is scored within a prefix is so in the first row of its group
    firsts = [
        Row(group[0].tokens, [member for row in group for member in row.members])
        for group in batch.groups
    ]
    stop = batch.prefix or widest(batch)
    step = max(1, planner.read_tokens // len(firsts))
    cache = None
    if batch.prefix or step < stop:
        cache = Cache(model.args.num_layers, capacity=widest(batch))
    for start in range(0, stop, step):
        found.read(model, pairs, firsts, start, min(start + step, stop), cache)
    if not batch.prefix:
        return found.answers()
    assert cache is not None
    device = model.tok_embeddings.weight.device
    for part in planner.parts(batch):
        branch = cache.branch(torch.tensor([g for g, _ in part], device=device))
        rows = [row for _, row in part]
        found.read(model, pairs, rows, batch.prefix, len(rows[0].tokens), branch)
    return found.answers()


class _Found:
    """What the passes of a batch give for each scored token."""

    def __init__(self) -> None:
        self._owners: list[int] = []
        self._logs: list[Tensor] = []
        self._hits: list[Tensor] = []

    def read(
        self,
        model: Transformer,
        pairs: Sequence[Pair],
        rows: Sequence[Row],
        start: int,
        stop: int,
        cache: Cache | None = None,
    ) -> None:
        """Read the tokens `start` to `stop` of each row, and score what follows from them."""
        device = model.tok_embeddings.weight.device
        width = stop - start
        places: dict[int, int] = {}
        at_N: list[int] = []
        targets_N: list[int] = []
        for number, row in enumerate(rows):
            offset = number * width - start
            for pair, end in row.members:
                tokens, count = pairs[pair].tokens, pairs[pair].count
                # token t + 1 is scored by the logits of token t
                first, last = max(start, end - count), min(stop, end)
                for t in range(first, last):
                    at_N.append(places.setdefault(offset + t, len(places)))
                if first < last:
                    targets_N += tokens[first + 1 : last + 1]
                    self._owners += [pair] * (last - first)
        logits_MV = model(
            padded([row.tokens[start:stop] for row in rows], width, device),
            cache=cache,
            logits_at_M=torch.tensor(list(places), dtype=torch.long, device=device),
        )
        if not at_N:
            return
        at, targets = (torch.tensor(ids, device=device) for ids in (at_N, targets_N))
        norm_M = torch.cat([part.float().logsumexp(-1) for part in logits_MV.split(SOFTMAX_ROWS)])
        self._logs.append(logits_MV[at, targets].float() - norm_M[at])
        self._hits.append(logits_MV.argmax(-1)[at] == targets)

    def answers(self) -> dict[int, Answer]:
        """The answers of all pairs that were scored."""
        logs_N = torch.cat(self._logs).double().cpu()
        hits_N = torch.cat(self._hits).cpu()
        if not logs_N.isfinite().all():
            raise UserError(
                "the model's logits are not finite: its training had diverged, or the dtype does "
                "not hold them (try --dtype float32)"
            )
        owners = sorted(set(self._owners))
        number = {pair: k for k, pair in enumerate(owners)}
        owner_N = torch.tensor([number[pair] for pair in self._owners])
        sums = torch.zeros(len(owners), dtype=torch.float64).index_add_(0, owner_N, logs_N)
        misses = torch.zeros(len(owners), dtype=torch.long).index_add_(0, owner_N, (~hits_N).long())
        scored = zip(owners, sums.tolist(), misses.tolist(), strict=True)
        return {pair: (total, missed == 0) for pair, total, missed in scored}


def padded(rows: Sequence[Sequence[int]], width: int, device: torch.device) -> Tensor:
    """tokens_BT of `width` tokens, int64, zeros on the right."""
    tokens_BT = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.long)
    return tokens_BT.to(device)
