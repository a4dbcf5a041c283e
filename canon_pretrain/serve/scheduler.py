"""Continuous batching: requests join and leave a running batch between its steps.

    submit -> waiting -> its prompt is read alone, in parts -> rows of the batch -> ended

Each iteration reads some prompt tokens, then one token of every row. No result depends on the other
requests, up to the order of sums: each row is read at its own positions (`model/row_cache.py`) and
has random numbers of its own, those of `canon sample`.

Shapes: B rows, V vocabulary.
"""

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from canon_pretrain.core.errors import UserError
from canon_pretrain.machine.device import to_device
from canon_pretrain.model.cache import Cache
from canon_pretrain.model.decode import Sampling, logits_not_finite, sample, sample_generator
from canon_pretrain.model.row_cache import RowCache
from canon_pretrain.model.transformer import Transformer

READ_TOKENS = {"cpu": 512, "cuda": 8192}
"""Prompt tokens between two steps of the rows, which wait for them."""
MAX_PROMPTS = 16
"""Prompts that are read then: a short one needs a pass of its own too."""

ROW_TOLERANCE = 0.2
"""Of logits, in standard deviations: bfloat16 rounds to a tenth of it."""

Reason = Literal["stop", "length"]


class ScoredToken(NamedTuple):
    """A token and its log-probability by softmax(logits); None of the first token of a prompt.

    `top`: the most likely tokens and their log-probabilities, the most likely first.
    """

    id: int
    logp: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Listener(Protocol):
    """What receives the results of a request; it is called in the scheduler's thread.

    `index`: which of the request's answers.
    """

    def on_prompt(self, tokens: Sequence[ScoredToken]) -> None:
        """Receive the prompt's tokens, if they were asked for; before any other call."""

    def on_token(self, index: int, token: ScoredToken) -> bool:
        """Receive a token, also EOS; return whether the answer continues. It ends after EOS."""

    def on_end(self, index: int, reason: Reason) -> None:
        """Learn that the answer has ended: by EOS or by `on_token` ("stop"), or by its limit."""

    def on_error(self, error: Exception) -> None:
        """Learn that the request has failed: no other call follows."""


@dataclass(eq=False)
class Request:
    """A prompt, and `num_answers` answers of at most `max_tokens` each.

    Answer k is that of `generate` with `sample_generator(seed, k)`. `max_tokens` 0: only the prompt
    is read. `num_top`: the most likely tokens to report with each; None: no log-probabilities.
    `scores_prompt`: report the prompt's tokens too.
    """

    prompt: Sequence[int]
    max_tokens: int
    listener: Listener
    num_answers: int = 1
    sampling: Sampling = Sampling(0.0, 0, 1.0)
    seed: int = 0
    num_top: int | None = None
    scores_prompt: bool = False
    is_cancelled: bool = field(default=False, init=False)


@dataclass
class _Row:
    """An answer that is being generated, in a row of the batch."""

    request: Request
    index: int
    draws: list[float]  # one per token; empty: the most likely tokens
    last_token: int = -1
    num_tokens: int = 0


@dataclass
class _Reading:
    """A request whose prompt is being read, or whose answers wait for rows."""

    request: Request
    cache: Cache
    num_read: int = 0
    logits_1V: Tensor | None = None  # after the last token
    next_index: int = 0  # of the answers that have not begun
    scored: list[ScoredToken] = field(default_factory=list)


class Scheduler:
    """Answers requests with `model`, in at most `max_rows` rows; `max_waiting` answers may wait.

    `submit`, `cancel` and `close` may be called from any thread, `step` and `run` from one. Ids
    from `vocab_size` on only pad the model's vocabulary: none is generated.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        eos_id: int,
        vocab_size: int | None = None,
        max_rows: int = 32,
        max_waiting: int = 1024,
        read_tokens: int | None = None,
    ) -> None:
        self.max_rows = max_rows
        self.max_waiting = max_waiting
        self._model = model
        self._eos_id = eos_id
        self._vocab_size = vocab_size
        self._device = model.tok_embeddings.weight.device
        self._read_tokens = read_tokens or READ_TOKENS.get(self._device.type, 512)

        # Shared with other threads, under the lock.
        self._changed = threading.Condition()
        self._submitted: deque[Request] = deque()
        self._num_waiting = 0  # answers that have no row yet
        self._error: Exception | None = None  # why no request is accepted any more

        # Of the thread that steps.
        self._waiting: deque[Request] = deque()
        self._reading: _Reading | None = None
        self._rows: list[_Row] = []
        self._cache = RowCache(model.args, self._device)

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def error(self) -> Exception | None:
        """Why no request is accepted any more; None if they are."""
        return self._error

    @torch.no_grad()
    def check_rows(self) -> None:
        """Raise UserError if a mixer of the user's own fails or computes other values in a batch.

        Its `context.position` is a tensor [B, 1] there, which a rotation may not expect.
        """
        args = self._model.args
        own_mixers = sorted({kind.mixer for kind in args.kinds.values() if kind.is_own_mixer})
        if not own_mixers:
            return

        # The last of some tokens: by a full pass, and as a row of two lengths.
        texts = [[i % args.vocab_size for i in range(length)] for length in (4, 9)]
        alone_V = []
        caches = []
        for text in texts:
            tokens_1T = to_device(torch.tensor([text]), self._device)
            alone_V.append(self._model(tokens_1T, logits_to_keep=1)[0, -1])
            caches.append(Cache.of(args))
            self._model(tokens_1T[:, :-1], cache=caches[-1])
        rows = RowCache(args, self._device)
        rows.replace([], caches)
        last_B = to_device(torch.tensor([text[-1] for text in texts]), self._device)
        names = " or ".join(own_mixers)
        way_out = (
            "context.position is a tensor [B, 1] there, elsewhere [1] or an int: compute positions "
            "as context.position + torch.arange(num_tokens), as train_configs/mixers/mla.py does"
        )
        try:
            together_BV = rows.read(self._model, last_B).float()
        except Exception as error:  # whatever code of the user's raises
            raise UserError(
                "serve.rows_fail",
                f"the mixer {names} fails in a batch of rows of different lengths ({error!r}): "
                f"{way_out}",
                mixers=own_mixers,
            ) from error

        alone_BV = torch.stack(alone_V).float()
        difference = ((together_BV - alone_BV).abs().max() / alone_BV.std()).item()
        if not difference < ROW_TOLERANCE:  # NaN too
            raise UserError(
                "serve.rows_differ",
                f"in a batch of rows of different lengths, the mixer {names} computes logits that "
                f"differ by {difference:.2g} standard deviations: {way_out}",
                mixers=own_mixers,
                difference=difference,
            )

    # -- from any thread

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue all of `requests`, or raise UserError: "serve.queue_full" if they do not fit."""
        num_answers = sum(request.num_answers for request in requests)
        with self._changed:
            self.check_room(num_answers)
            self._num_waiting += num_answers
            self._submitted.extend(requests)
            self._changed.notify()

    def check_room(self, num_answers: int) -> None:
        """Raise UserError if so many more answers may not wait now."""
        if num_answers > self.max_waiting:
            raise UserError(
                "serve.too_many",
                f"{num_answers:,} answers (prompts times n) at once, expected at most "
                f"{self.max_waiting:,} (--max-waiting of the server)",
                given=num_answers,
                expected=self.max_waiting,
            )
        if self._error is not None:
            raise self._error
        if self._num_waiting + num_answers > self.max_waiting:
            raise UserError(
                "serve.queue_full",
                f"{self._num_waiting:,} answers wait, and {num_answers:,} more would be over "
                f"the limit of {self.max_waiting:,}: try again later, or start the server with "
                "a larger --max-waiting",
                waiting=self._num_waiting,
                limit=self.max_waiting,
            )

    def cancel(self, request: Request) -> None:
        """Drop a request, which may have ended; its listener may be called until the next step."""
        with self._changed:
            request.is_cancelled = True
            self._changed.notify()

    def close(self, error: Exception) -> None:
        """Fail all requests with `error`, also those that come; `run` returns."""
        with self._changed:
            self._error = error
            self._changed.notify()

    # -- from one thread

    def run(self) -> None:
        """Step until `close`; wait for requests where there is nothing to do."""
        try:
            while self._error is None:
                if not self.step():
                    with self._changed:
                        self._changed.wait_for(lambda: self._submitted or self._error is not None)
        except BaseException as error:  # a fault of ours: no request may wait forever
            self._error = UserError("serve.failed", f"the server has failed: {error!r}")
            raise
        finally:
            assert self._error is not None
            self._fail_all(self._error)

    def step(self) -> bool:
        """Read some prompts and a token of each row; return whether there is more to do.

        What a pass raises, such as out of memory, fails the requests that it may have left half
        read.
        """
        self._take_submitted()
        try:
            self._drop_cancelled()
            self._read_prompts()
            if self._rows:
                self._read_rows()
        except (UserError, RuntimeError) as error:
            self._fail_running(error)
        return bool(self._rows or self._reading or self._waiting or self._submitted)

    def _take_submitted(self) -> None:
        with self._changed:
            self._waiting.extend(self._submitted)
            self._submitted.clear()

    def _drop_cancelled(self) -> None:
        """Remove the requests that are cancelled, wherever they are."""
        num_dropped = 0
        for request in [*self._waiting]:
            if request.is_cancelled:
                self._waiting.remove(request)
                num_dropped += request.num_answers

        reading = self._reading
        if reading is not None and reading.request.is_cancelled:
            num_dropped += reading.request.num_answers - reading.next_index
            self._reading = None
        self._count_waiting(-num_dropped)

        leaving = [i for i, row in enumerate(self._rows) if row.request.is_cancelled]
        self._replace_rows(leaving, [], [])

    def _count_waiting(self, change: int) -> None:
        with self._changed:
            self._num_waiting += change

    # -- prompts

    @torch.no_grad()
    def _read_prompts(self) -> None:
        """Read prompts as far as the budget of an iteration goes; answers take free rows."""
        budget = self._read_tokens
        while budget > 0:
            if self._reading is None:
                if not self._waiting or len(self._rows) >= self.max_rows:
                    return
                request = self._waiting.popleft()
                cache = Cache.of(self._model.args, capacity=max(1, len(request.prompt)))
                self._reading = _Reading(request, cache)

            reading = self._reading
            num_left = len(reading.request.prompt) - reading.num_read
            if num_left:
                num_tokens = min(num_left, budget)
                budget -= max(num_tokens, self._read_tokens // MAX_PROMPTS)
                try:
                    self._read_part(reading, num_tokens)
                except (UserError, RuntimeError) as error:  # the rows are as they were
                    self._fail_reading(error)
                    continue
                if num_tokens < num_left:
                    return
                if reading.request.scores_prompt:
                    reading.request.listener.on_prompt(reading.scored)

            self._begin_answers(reading)
            if reading.next_index < reading.request.num_answers:
                return  # there is no free row
            self._reading = None

    def _read_part(self, reading: _Reading, num_tokens: int) -> None:
        """Read the next tokens of a prompt, and score the tokens after them."""
        request = reading.request
        start = reading.num_read
        stop = start + num_tokens
        tokens_BT = torch.tensor([request.prompt[start:stop]])
        logits_BTV = self._model(
            to_device(tokens_BT, self._device),
            cache=reading.cache,
            logits_to_keep=0 if request.scores_prompt else 1,
        )
        reading.num_read = stop
        reading.logits_1V = logits_BTV[:, -1]

        # The first token has nothing before it.
        if request.scores_prompt:
            if not start:
                reading.scored.append(ScoredToken(request.prompt[0]))
            targets = request.prompt[start + 1 : stop + 1]
            num_top = request.num_top or 0
            scored = self._scored(logits_BTV[0, : len(targets)], targets, num_top)
            if any(token.logp is None or math.isnan(token.logp) for token in scored):
                raise logits_not_finite()
            reading.scored += scored

    def _begin_answers(self, reading: _Reading) -> None:
        """Choose the first token of as many answers as there are free rows for."""
        request = reading.request
        assert reading.logits_1V is not None
        rows: list[_Row] = []
        while reading.next_index < request.num_answers:
            if len(self._rows) + len(rows) >= self.max_rows:
                break
            index = reading.next_index
            reading.next_index += 1
            self._count_waiting(-1)
            if not request.max_tokens:
                request.listener.on_end(index, "length")
                continue

            draws: list[float] = []
            if request.sampling.temperature:
                numbers_T = torch.empty(request.max_tokens, dtype=torch.float64)
                draws = numbers_T.uniform_(generator=sample_generator(request.seed, index)).tolist()
            row = _Row(request, index, draws)
            if self._continue([row], reading.logits_1V)[0]:
                rows.append(row)
        self._replace_rows([], rows, [reading.cache] * len(rows))

    # -- rows

    @torch.no_grad()
    def _read_rows(self) -> None:
        """Read the last token of each row, and choose the next one."""
        tokens_B = torch.tensor([row.last_token for row in self._rows])
        logits_BV = self._cache.read(self._model, to_device(tokens_B, self._device))
        is_live = self._continue(self._rows, logits_BV)
        self._replace_rows([i for i, live in enumerate(is_live) if not live], [], [])

    def _replace_rows(
        self, leaving: Sequence[int], rows: Sequence[_Row], caches: Sequence[Cache]
    ) -> None:
        if leaving or rows:
            order = self._cache.replace(leaving, caches)
            self._rows = [self._rows[i] for i in order] + [*rows]

    def _continue(self, rows: Sequence[_Row], logits_BV: Tensor) -> list[bool]:
        """Choose the next token of each row by its logits; return which of them continue."""
        scored = self._choose(rows, logits_BV)
        is_live = []
        for row, token in zip(rows, scored, strict=True):
            listener = row.request.listener
            if row.request.is_cancelled:
                is_live.append(False)
                continue
            if token is None:
                row.request.is_cancelled = True
                listener.on_error(logits_not_finite())
                is_live.append(False)
                continue

            row.last_token = token.id
            row.num_tokens += 1
            reason: Reason | None = None
            if not listener.on_token(row.index, token) or token.id == self._eos_id:
                reason = "stop"
            elif row.num_tokens == row.request.max_tokens:
                reason = "length"
            if reason is not None:
                listener.on_end(row.index, reason)
            is_live.append(reason is None)
        return is_live

    def _choose(self, rows: Sequence[_Row], logits_BV: Tensor) -> list[ScoredToken | None]:
        """Return the next token of each row; None if its logits are not finite."""
        real_BV = logits_BV[:, : self._vocab_size]
        largest_B, tokens_B = real_BV.max(-1)

        # Rows with equal settings are sampled together.
        by_sampling: dict[Sampling, list[int]] = {}
        for i, row in enumerate(rows):
            if row.draws:
                by_sampling.setdefault(row.request.sampling, []).append(i)
        for sampling, members in by_sampling.items():
            draws = [rows[i].draws[rows[i].num_tokens] for i in members]
            draws_B = to_device(torch.tensor(draws, dtype=torch.float64), self._device)
            members_B = to_device(torch.tensor(members), self._device)
            tokens_B[members_B] = sample(real_BV[members_B], draws_B, sampling)[0]

        # The host waits here.
        tokens = tokens_B.tolist()
        is_finite = largest_B.isfinite().tolist()
        scored: list[ScoredToken | None] = []
        for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            if not is_finite[i]:
                scored.append(None)
            elif row.request.num_top is None:
                scored.append(ScoredToken(token))
            else:
                logits_1V = logits_BV[i : i + 1].double()
                scored += self._scored(logits_1V, [token], row.request.num_top)
        return scored

    def _scored(self, logits_TV: Tensor, targets: Sequence[int], num_top: int) -> list[ScoredToken]:
        """Return `targets`, one per row of logits, with their log-probabilities."""
        if not targets:
            return []
        # at least in float32; over all ids, also those that only pad the vocabulary
        dtype = torch.promote_types(logits_TV.dtype, torch.float32)
        logps_TV = F.log_softmax(logits_TV, dim=-1, dtype=dtype)
        targets_T1 = to_device(torch.tensor(targets), self._device)[:, None]
        logps = logps_TV.gather(-1, targets_T1)[:, 0].tolist()

        real_TV = logps_TV[:, : self._vocab_size]
        top_logps, top_ids = real_TV.topk(min(num_top, real_TV.shape[1]))
        tops = zip(top_ids.tolist(), top_logps.tolist(), strict=True)
        return [
            ScoredToken(target, logp, tuple(zip(ids, values, strict=True)))
            for target, logp, (ids, values) in zip(targets, logps, tops, strict=True)
        ]

    # -- failures

    def _fail_reading(self, error: Exception) -> None:
        """Fail the request whose prompt is being read."""
        reading = self._reading
        if reading is not None:
            self._reading = None
            self._count_waiting(reading.next_index - reading.request.num_answers)
            _fail([reading.request], error)

    def _fail_running(self, error: Exception) -> None:
        """Fail what has a row or is being read; go on with an empty batch."""
        failed = [row.request for row in self._rows]
        self._rows = []
        self._cache = RowCache(self._model.args, self._device)
        _fail(failed, error)
        self._fail_reading(error)

    def _fail_all(self, error: Exception) -> None:
        self._take_submitted()
        waiting = [*self._waiting]
        self._waiting.clear()
        self._count_waiting(-sum(request.num_answers for request in waiting))
        self._fail_running(error)
        _fail(waiting, error)


def _fail(requests: Sequence[Request], error: Exception) -> None:
    """Tell each of `requests` once, unless it is cancelled."""
    for request in dict.fromkeys(requests):
        if not request.is_cancelled:
            request.is_cancelled = True
            request.listener.on_error(error)
