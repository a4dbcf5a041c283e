"""Batched generation of tokens with a `Cache`; the results equal those of full forward passes.

Rows of a batch are padded on the left; a row that has ended is removed. On a GPU a step is a CUDA
graph, tokens stay on the device and are read in blocks (`TOKENS_PER_READ`): callbacks come late.

The cache holds 2 L G K numbers per token (keys and values) and L C K float32 numbers per row
(Canon's sums; C channels of all sites of a block, K taps). For `1b3` that is 384 KiB per token in
float32, half of it in bfloat16, so 3 GiB at the default `batch_tokens`, and 7.8 MiB per row.

Shapes: B rows, T tokens, V vocabulary, N prompts, S steps between two reads of the host.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from canon_pretrain.core.errors import UserError
from canon_pretrain.machine.device import to_device
from canon_pretrain.model.cache import Cache
from canon_pretrain.model.transformer import Transformer

BATCH_TOKENS = 8192
TOKENS_PER_READ = {"cuda": 16}
"""Tokens of each row that are generated before the host reads them, by device (others: 1)."""
FIXED_DEVICES = ("cuda",)
"""Where steps are written in place, into a cache of fixed size, so that they can be captured."""
IDS_PER_BLOCK = 128
"""In which the likeliest token is searched for, on a CPU."""
MIN_FIXED_STEPS = 32
"""A capture takes about as long as some tens of steps save."""


# not inference_mode: a model may generate between training steps, and backward refuses its tensors
@torch.no_grad()
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    eos_id: int | None = None,
    stop: Callable[[int, list[int]], bool] | None = None,
    on_end: Callable[[int], None] | None = None,
    on_token: Callable[[int, int, float], None] | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    vocab_size: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    read_tokens: int | None = None,
) -> list[list[int]]:
    """Return the tokens that `model` generates after each prompt, in the order of the prompts.

    An answer ends after `max_new_tokens` (one number, or one per prompt), before `eos_id`, or with
    the first token for which `stop(i, tokens)` is true of prompt i's answer so far; then
    `on_end(i)` is called. Before that, `on_token(i, token, logp)` is called for each token as it
    comes, also `eos_id`, with its log-probability by softmax(logits). `temperature` 0: the most
    likely token, the lowest id among equals. Above 0: a sample of softmax(logits / temperature)
    from the `top_k` most likely tokens (0: all) with a joint probability of `top_p`. `generator`,
    or one per prompt, draws a number per prompt and position beforehand, so answers do not depend
    on batches. Ids from `vocab_size` on only pad the model's vocabulary: none is generated.

    `batch_tokens` limits a batch's cache, answers included, except for a longer single sequence;
    `read_tokens` the prompt tokens per forward pass. On a sharded model all ranks must pass the
    same prompts. Raises UserError for bad arguments before computing anything.
    """
    # Check all arguments, and draw all numbers, before anything is computed.
    limits = max_new_tokens
    if isinstance(limits, int):
        limits = [limits] * len(prompts)
    _check_prompts(model, prompts, limits)
    _check_sampling(temperature, top_k, top_p, generator)
    sampling = Sampling(temperature, top_k, top_p)
    draws_NT: Tensor | None = None
    if generator is not None:
        draws_NT = _draw_numbers(generator, len(prompts), max(limits, default=0))

    answers: list[list[int]] = [[] for _ in prompts]

    def append(i: int, token: int, logp: float) -> bool:
        """Append to answer i unless it is EOS; return whether the answer continues."""
        if on_token is not None:
            on_token(i, token, logp)
        has_ended = token == eos_id
        if not has_ended:
            answers[i].append(token)
            is_stopped = stop is not None and stop(i, answers[i])
            has_ended = is_stopped or len(answers[i]) == limits[i]
        if has_ended and on_end is not None:
            on_end(i)
        return not has_ended

    device = model.tok_embeddings.weight.device
    for batch in batches(prompts, limits, batch_tokens, model.args.max_seq_len):
        decoder = _BatchDecoder(
            model,
            [prompts[i] for i in batch],
            limit=max(limits[i] for i in batch),
            tokens_per_pass=min(batch_tokens, read_tokens or batch_tokens),
            vocab_size=vocab_size,
            sampling=sampling,
            draws_BT=None if draws_NT is None else draws_NT[batch].to(device),
            has_logps=on_token is not None,
        )

        live_rows = list(range(len(batch)))  # whose answers continue
        num_steps = 1  # for a short time to the first token
        while live_rows:
            # Decode a block of steps, no further than the longest answer may get.
            remaining = max(limits[batch[row]] for row in live_rows) - decoder.num_tokens
            steps = decoder.decode(min(num_steps, remaining))
            num_steps = TOKENS_PER_READ.get(device.type, 1)

            # what a row computed past its end is dropped
            for tokens_B, logps_B in steps:
                live_rows = [
                    row for row in live_rows if append(batch[row], tokens_B[row], logps_B[row])
                ]

            # go on with fewer rows
            if live_rows and decoder.step.wants_rows(len(live_rows), len(batch)):
                decoder.select_rows(live_rows)
                batch = [batch[row] for row in live_rows]
                live_rows = list(range(len(batch)))
    return answers


class Sampling(NamedTuple):
    """How a token is chosen; see `generate`."""

    temperature: float
    top_k: int
    top_p: float


def _draw_numbers(
    generator: torch.Generator | Sequence[torch.Generator], num_prompts: int, num_tokens: int
) -> Tensor:
    """Return a number in [0, 1) for each prompt and position, float64 [N, T]."""
    generators = [generator] if isinstance(generator, torch.Generator) else generator
    device = generators[0].device
    draws_NT = torch.empty((num_prompts, num_tokens), dtype=torch.float64, device=device)
    # one generator for all rows, or one per row
    for rows_XT, rows_generator in zip(
        draws_NT.tensor_split(len(generators)), generators, strict=True
    ):
        rows_XT.uniform_(generator=rows_generator)
    return draws_NT


class _BatchDecoder:
    """Generates the tokens of a batch in blocks; the host waits for the device once per block.

    `prompts`: the longest first. `tokens_per_pass`: prompt tokens that a forward pass reads.
    `draws_BT`: the numbers that choose the tokens; None: the most likely tokens.
    """

    def __init__(
        self,
        model: Transformer,
        prompts: Sequence[Sequence[int]],
        *,
        limit: int,
        tokens_per_pass: int,
        vocab_size: int | None,
        sampling: Sampling,
        draws_BT: Tensor | None,
        has_logps: bool,
    ) -> None:
        # the longest prompt and the longest answer: the cache never grows
        cache = Cache.of(model.args, capacity=len(prompts[0]) + limit)
        chunk = max(1, tokens_per_pass // len(prompts))
        self._logits_BV = _prefill(model, prompts, cache, chunk)

        self.step = DecodeStep(model, cache, limit)
        self._tokens_B = torch.empty(0)
        self._vocab_size = vocab_size
        self._sampling = sampling
        self._draws_BT = draws_BT
        self._has_logps = has_logps
        self.num_tokens = 0  # generated so far, per row

    def decode(self, num_steps: int) -> list[tuple[list[int], list[float]]]:
        """Return (tokens_B, log-probabilities_B) of `num_steps` steps.

        The log-probabilities are 0 without `has_logps`. Raises UserError for logits that are not
        finite.
        """
        tokens_SB: list[Tensor] = []
        logps_SB: list[Tensor] = []
        finite_S: list[Tensor] = []
        for _ in range(num_steps):
            if self.num_tokens:  # the first token is chosen by the prompt's logits
                self._logits_BV = self.step(self._tokens_B)

            # ids past `vocab_size` only pad the vocabulary
            logits_BV = self._logits_BV[:, : self._vocab_size]
            if self._draws_BT is None:
                self._tokens_B, is_finite = likeliest(logits_BV)
            else:
                draws_B = self._draws_BT[:, self.num_tokens]
                self._tokens_B, is_finite = sample(logits_BV, draws_B, self._sampling)
            tokens_SB.append(self._tokens_B)
            finite_S.append(is_finite)

            # by softmax over all logits
            if self._has_logps:
                logps_BV = self._logits_BV.double().log_softmax(-1)
                logps_SB.append(logps_BV.gather(-1, self._tokens_B[:, None])[:, 0])
            self.num_tokens += 1

        # the host waits here
        if torch.stack(finite_S).logical_not().any():
            raise logits_not_finite()
        tokens = torch.stack(tokens_SB).tolist()
        if not self._has_logps:
            return [(tokens_B, [0.0] * len(tokens_B)) for tokens_B in tokens]
        return list(zip(tokens, torch.stack(logps_SB).tolist(), strict=True))

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows."""
        rows_N = to_device(torch.tensor(rows), self._tokens_B.device)
        self.step.select_rows(rows_N)
        self._tokens_B = self._tokens_B[rows_N]
        if self._draws_BT is not None:
            self._draws_BT = self._draws_BT[rows_N]


class DecodeStep:
    """Reads a token of each row of a cache and returns logits_BV, valid until the next call.

    On a GPU, the second token is captured as a CUDA graph: a step is one launch then, instead of
    hundreds. Rows are removed once half of them have ended, because a graph is of their number.
    """

    def __init__(self, model: Transformer, cache: Cache, num_steps: int) -> None:
        weight = model.tok_embeddings.weight
        self._model = model
        self._cache = cache
        self._device = weight.device
        is_worth_it = num_steps >= MIN_FIXED_STEPS and self._device.type in FIXED_DEVICES
        is_sharded = hasattr(weight, "to_local")  # its collectives are not captured
        self._is_fixed = is_worth_it and not is_sharded
        self._can_capture = self._is_fixed and self._device.type == "cuda"
        self._forget()

    def _forget(self) -> None:
        self._tokens_B1: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens_B: Tensor) -> Tensor:
        if not self._is_fixed:
            return self._model(tokens_B[:, None], cache=self._cache)[:, -1]

        if self._cache.position is None:
            self._cache.fix(self._device)

        # the first pass is not captured: it allocates what the later ones write in place
        if self._tokens_B1 is None:
            self._tokens_B1 = tokens_B[:, None].clone()
            self._logits_BV = self._pass(self._tokens_B1)
            return self._logits_BV

        self._tokens_B1.copy_(tokens_B[:, None])
        if self._graph is None and self._can_capture:
            self._capture(self._tokens_B1)
        if self._graph is None:
            return self._pass(self._tokens_B1)

        # A replay runs no Python: the cache's own count is updated here.
        self._graph.replay()
        self._cache.length += 1
        return self._logits_BV

    def _pass(self, tokens_B1: Tensor) -> Tensor:
        """Read the tokens, in place: the cache holds the same tensors afterwards."""
        tensors = self._cache.replaced()
        logits_BV = self._model(tokens_B1, cache=self._cache)[:, -1]
        self._cache.keep(tensors, copies=True)
        return logits_BV

    def _capture(self, tokens_B1: Tensor) -> None:
        graph = torch.cuda.CUDAGraph()
        tensors = self._cache.replaced()
        length = self._cache.length
        try:
            # other threads, such as one that pins batches, may call CUDA during the capture
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._logits_BV = self._pass(tokens_B1)
            self._graph = graph
        except RuntimeError as error:  # such as an operator that waits for the device
            self._can_capture = False
            warnings.warn(f"decoding without a CUDA graph: {error}", stacklevel=2)

        # nothing was computed
        self._cache.undo_pass(tensors, length)

    def wants_rows(self, num_live: int, num_rows: int) -> bool:
        """Return whether rows that have ended should be removed now."""
        return num_live < num_rows and (not self._is_fixed or 2 * num_live <= num_rows)

    def select_rows(self, rows_N: Tensor) -> None:
        self._cache.select_rows(rows_N)
        self._forget()


def sample_generator(item: int, number: int) -> torch.Generator:
    """Return the generator of sample `number` of an item, or of a seed."""
    # up to 2^20 samples of an item have seeds of their own
    seed = (item << 20) + number
    # torch keeps 32 bits of a seed: mix the others in
    # (0x9E3779B1 is 2^32 over the golden ratio, as in multiplicative hashing)
    return torch.Generator().manual_seed((seed ^ (seed >> 32) * 0x9E3779B1) & 0xFFFFFFFF)


def logits_not_finite() -> UserError:
    """Return the error of logits from which no token can be chosen."""
    return UserError("generate.logits_not_finite", "the model's logits are not finite")


def likeliest(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the likeliest token per row, int64 [B], and whether its logits are finite.

    The lowest id among equals. On a CPU the largest logit of each block of ids is found first: for
    8 rows of 32,000 in 0.06 ms, torch's argmax in 0.22 (measured on an idle machine).
    """
    if logits_BV.device.type != "cpu":
        top_B, tokens_B = logits_BV.max(-1)
        return tokens_B, top_B.isfinite().all()

    num_rows, num_ids = logits_BV.shape
    if num_missing := -num_ids % IDS_PER_BLOCK:
        logits_BV = F.pad(logits_BV, (0, num_missing), value=-torch.inf)
    blocks_BNX = logits_BV.unflatten(-1, (-1, IDS_PER_BLOCK))
    tops_BN = blocks_BNX.amax(-1)
    block_B = tops_BN.argmax(-1)
    logits_BX = blocks_BNX[torch.arange(num_rows), block_B]
    tokens_B = block_B * IDS_PER_BLOCK + logits_BX.argmax(-1)
    return tokens_B, tops_BN.amax(-1).isfinite().all()  # of NaN, the largest is NaN


def sample(logits_BV: Tensor, draws_B: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return a token per row, int64 [B], and whether the logits are finite; waits for neither.

    The token is the first id whose cumulative probability exceeds `draws_B` in [0, 1).
    """
    # The ids by rank: the `top_k` most likely ones, up to a joint probability of `top_p`.
    scaled_BV = logits_BV.double() / sampling.temperature
    ranked_BV, ids_BV = scaled_BV.sort(descending=True, stable=True)
    if sampling.top_k:
        ranked_BV[:, sampling.top_k :] = -torch.inf
    probs_BV = ranked_BV.softmax(-1)
    # keep a token if the sum of those before it is below top_p: the first one always
    sums_before_BV = probs_BV.cumsum(-1) - probs_BV
    probs_BV = probs_BV.masked_fill(sums_before_BV >= sampling.top_p, 0.0)

    # The inverse of the cumulative distribution, over the ids in their order.
    sums_BV = torch.zeros_like(probs_BV).scatter(-1, ids_BV, probs_BV).cumsum(-1)
    total_B1 = sums_BV[:, -1:]
    # the product may round up to the total, which no sum exceeds
    below_B1 = total_B1.nextafter(torch.zeros_like(total_B1))
    target_B1 = torch.minimum(draws_B[:, None] * total_B1, below_B1)
    drawn_B = torch.searchsorted(sums_BV, target_B1, right=True)[:, 0]
    # for NaN, the search ends past the last id
    return drawn_B.clamp(max=logits_BV.shape[1] - 1), total_B1.isfinite().all()


def _prefill(model: Transformer, rows: Sequence[Sequence[int]], cache: Cache, chunk: int) -> Tensor:
    """Read prompts into an empty `cache`, `chunk` tokens of each at a time; return logits_BV."""
    device = model.tok_embeddings.weight.device
    pad_left = partial(pad_sequence, batch_first=True, padding_side="left")
    tokens_BT = pad_left([torch.as_tensor(row, dtype=torch.long) for row in rows])
    is_real_BT = pad_left([torch.ones(len(row), dtype=torch.bool) for row in rows])
    tokens_BT = to_device(tokens_BT, device)
    is_real_BT = to_device(is_real_BT, device)

    # In chunks. Only those at the start have padding, which is on the left.
    logits_B1V = torch.empty(0)
    longest = tokens_BT.shape[1]
    padding = longest - min(map(len, rows))
    for start in range(0, longest, chunk):
        part = slice(start, start + chunk)
        # attention is faster without a mask
        is_real = is_real_BT[:, part] if start < padding else None
        logits_B1V = model(tokens_BT[:, part], is_real_BT=is_real, cache=cache, logits_to_keep=1)
    return logits_B1V[:, -1]


def batches(
    prompts: Sequence[Sequence[int]], limits: Sequence[int], batch_tokens: int, max_seq_len: int
) -> Iterator[list[int]]:
    """Yield the indices of each batch's prompts, the longest first; padding counts."""
    batch: list[int] = []
    longest = 0
    limit = 0
    for i in sorted(range(len(prompts)), key=lambda i: -len(prompts[i])):
        # Per row of the batch with this prompt: rows are padded to the longest prompt, which came
        # first.
        num_tokens = longest + max(limit, limits[i])
        is_full = (len(batch) + 1) * num_tokens > batch_tokens
        # the last token of an answer is not read
        is_too_long = num_tokens - 1 > max_seq_len
        if batch and (is_full or is_too_long):
            yield batch
            batch = []
        if not batch:
            longest = len(prompts[i])
            limit = 0
        batch.append(i)
        limit = max(limit, limits[i])
    if batch:
        yield batch


def _check_prompts(
    model: Transformer, prompts: Sequence[Sequence[int]], limits: Sequence[int]
) -> None:
    args = model.args
    if len(limits) != len(prompts):
        raise UserError(
            "generate.max_new_tokens",
            f"max_new_tokens has {len(limits)} numbers for {len(prompts)} prompts",
        )
    for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        if limit < 1:
            raise UserError(
                "generate.max_new_tokens",
                f"prompt {i} with {limit} new tokens: expected at least 1",
                prompt=i,
            )
        if not len(prompt):
            raise UserError(
                "generate.empty_prompt", f"prompt {i} is empty: begin with EOS", prompt=i
            )

        if not 0 <= min(prompt) <= max(prompt) < args.vocab_size:
            raise UserError(
                "generate.token_ids",
                f"prompt {i} has ids from {min(prompt)} to {max(prompt)}, "
                f"the model's are 0 to {args.vocab_size - 1}",
                prompt=i,
            )

        # the last new token is not read
        if len(prompt) + limit - 1 > args.max_seq_len:
            raise UserError(
                "model.sequence_too_long",
                f"prompt {i} of {len(prompt)} tokens with {limit} new ones is longer than "
                f"max_seq_len = {args.max_seq_len}",
                prompt=i,
            )


def _check_sampling(temperature: float, top_k: int, top_p: float, generator: object) -> None:
    if temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
        raise UserError(
            "generate.sampling",
            f"temperature {temperature}, top_k {top_k}, top_p {top_p}: "
            "expected >= 0, >= 0, and > 0 up to 1",
        )
    if temperature > 0 and generator is None:
        raise UserError("generate.sampling", "a temperature above 0 needs a torch.Generator")
    if temperature == 0 and (top_k or top_p < 1 or generator is not None):
        raise UserError("generate.sampling", "top_k, top_p and a generator need a temperature")
