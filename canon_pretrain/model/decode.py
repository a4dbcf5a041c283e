"""Batched generation of tokens with a `Cache`; the results equal those of full forward passes.

Rows of a batch are padded on the left; a row that has ended is removed. On a GPU a step is a CUDA
graph, tokens stay on the device and are read in blocks (`TOKENS_PER_READ`): callbacks come late.

The cache holds 2 L G K numbers per token (keys and values) and L C K float32 numbers per row
(Canon's sums; C channels of all sites of a block, K taps). For `1b3` that is 384 KiB per token in
float32, half of it in bfloat16, so 3 GiB at the default `batch_tokens`, and 7.8 MiB per row.

Shapes: B rows, T tokens, V vocabulary, N prompts.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from canon_pretrain.core.errors import UserError
from canon_pretrain.machine.device import to_device
from canon_pretrain.model.cache import Cache
from canon_pretrain.model.transformer import Transformer

BATCH_TOKENS = 8192
TOKENS_PER_READ = {"cuda": 16}
"""Tokens of each row that are generated before the host reads them, by device (others: 1)."""
FIXED_DEVICES = ("cuda",)
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
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    _check_prompts(model, prompts, limits)
    _check_sampling(temperature, top_k, top_p, generator)
    draws_NT = torch.empty(0)
    if generator is not None:
        shape = (len(prompts), max(limits, default=0))
        each = [generator] if isinstance(generator, torch.Generator) else generator
        draws_NT = torch.empty(shape, dtype=torch.float64, device=each[0].device)
        for draws, one in zip(draws_NT.tensor_split(len(each)), each, strict=True):
            draws.uniform_(generator=one)
    answers: list[list[int]] = [[] for _ in prompts]

    def append(i: int, token: int, logp: float) -> bool:
        """Append to answer i unless it is EOS; return whether the answer continues."""
        ends = token == eos_id
        if on_token is not None:
            on_token(i, token, logp)
        if not ends:
            answers[i].append(token)
            stopped = stop is not None and stop(i, answers[i])
            ends = stopped or len(answers[i]) == limits[i]
        if ends and on_end is not None:
            on_end(i)
        return not ends

    device = model.tok_embeddings.weight.device
    for batch in batches(prompts, limits, batch_tokens, model.args.max_seq_len):
        limit = max(limits[i] for i in batch)
        cache = Cache(model.args.num_layers, capacity=len(prompts[batch[0]]) + limit)
        chunk = max(1, min(batch_tokens, read_tokens or batch_tokens) // len(batch))
        logits_BV = _prefill(model, [prompts[i] for i in batch], cache, chunk)
        step = DecodeStep(model, cache, limit)
        draws_BT = draws_NT[batch].to(device) if temperature else draws_NT

        # `live`: the rows of the cache whose answers continue
        live, num_tokens, num_steps = list(range(len(batch))), 0, 1
        tokens_B = torch.empty(0)
        while live:
            tokens_SB: list[Tensor] = []
            logs_SB: list[Tensor] = []
            finite_S: list[Tensor] = []
            for _ in range(min(num_steps, max(limits[batch[row]] for row in live) - num_tokens)):
                if num_tokens:
                    logits_BV = step(tokens_B)
                known_BV = logits_BV[:, :vocab_size]
                if temperature == 0:
                    tokens_B = known_BV.argmax(-1)
                else:
                    draws_B = draws_BT[:, num_tokens]
                    tokens_B, is_finite = _draw(known_BV, draws_B, temperature, top_k, top_p)
                    finite_S.append(is_finite)
                tokens_SB.append(tokens_B)
                if on_token is not None:
                    logs_BV = logits_BV.double().log_softmax(-1)
                    logs_SB.append(logs_BV.gather(-1, tokens_B[:, None])[:, 0])
                num_tokens += 1

            # the host waits here; what a row computed past its end is dropped
            if finite_S:
                _check_finite(torch.stack(finite_S).all())
            logs = torch.stack(logs_SB).tolist() if logs_SB else []
            for place, tokens in enumerate(_read(tokens_SB)):
                live = [
                    row
                    for row in live
                    if append(batch[row], tokens[row], logs[place][row] if logs else 0.0)
                ]
            num_steps = TOKENS_PER_READ.get(device.type, 1)

            if live and step.wants_rows(len(live), len(batch)):
                rows_N = to_device(torch.tensor(live), device)
                step.select_rows(rows_N)
                tokens_B = tokens_B[rows_N]
                draws_BT = draws_BT[rows_N] if temperature else draws_BT
                batch, live = [batch[row] for row in live], list(range(len(live)))
    return answers


def _read(tokens_SB: list[Tensor]) -> list[list[int]]:
    if len(tokens_SB) == 1:
        return [tokens_SB[0].tolist()]
    tokens: list[list[int]] = torch.stack(tokens_SB).tolist()
    return tokens


class DecodeStep:
    """Reads a token of each row of a cache and returns logits_BV, valid until the next call.

    On a GPU, the second token is captured as a CUDA graph: a step is one launch then, instead of
    hundreds. Rows are removed once half of them have ended, because a graph is of their number.
    """

    def __init__(self, model: Transformer, cache: Cache, num_steps: int) -> None:
        self._model, self._cache = model, cache
        self._device = (weight := model.tok_embeddings.weight).device
        is_long = num_steps >= MIN_FIXED_STEPS and self._device.type in FIXED_DEVICES
        # the collectives of a sharded model are not captured
        self._is_fixed = is_long and not hasattr(weight, "to_local")
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
        if self._tokens_B1 is None:
            self._tokens_B1 = tokens_B[:, None].clone()
            self._logits_BV = self._pass(self._tokens_B1)
            return self._logits_BV

        self._tokens_B1.copy_(tokens_B[:, None])
        if self._graph is None and self._can_capture:
            self._capture(self._tokens_B1)
        if self._graph is None:
            return self._pass(self._tokens_B1)
        self._graph.replay()
        self._cache.length += 1
        return self._logits_BV

    def _pass(self, tokens_B1: Tensor) -> Tensor:
        """Read the tokens, in place: the cache holds the same tensors afterwards."""
        held = self._cache.replaced()
        logits_BV = self._model(tokens_B1, cache=self._cache)[:, -1]
        self._cache.keep(held, copies=True)
        return logits_BV

    def _capture(self, tokens_B1: Tensor) -> None:
        graph = torch.cuda.CUDAGraph()
        held, length = self._cache.replaced(), self._cache.length
        try:
            # other threads, such as one that pins batches, may call CUDA during the capture
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._logits_BV = self._pass(tokens_B1)
            self._graph = graph
        except RuntimeError as error:  # such as an operator that waits for the device
            self._can_capture = False
            warnings.warn(f"decoding without a CUDA graph: {error}", stacklevel=2)
        # nothing was computed
        self._cache.undo_pass(held, length)

    def wants_rows(self, num_live: int, num_rows: int) -> bool:
        """Return whether rows that have ended should be removed now."""
        return num_live < num_rows and (not self._is_fixed or 2 * num_live <= num_rows)

    def select_rows(self, rows_N: Tensor) -> None:
        self._cache.select_rows(rows_N)
        self._forget()


def sample_generator(item: int, number: int) -> torch.Generator:
    """Return the generator of sample `number` of an item, or of a seed."""
    seed = (item << 20) + number
    # torch keeps 32 bits of a seed: mix the others in
    return torch.Generator().manual_seed((seed ^ (seed >> 32) * 0x9E3779B1) & 0xFFFFFFFF)


def sample(
    logits_BV: Tensor, draws_B: Tensor, temperature: float, top_k: int, top_p: float
) -> Tensor:
    """Return the first id whose cumulative probability exceeds `draws_B` in [0, 1), int64 [B]."""
    ids_B, is_finite = _draw(logits_BV, draws_B, temperature, top_k, top_p)
    _check_finite(is_finite)
    return ids_B


def _check_finite(is_finite: Tensor) -> None:
    if not is_finite:
        raise UserError("generate.logits_not_finite", "the model's logits are not finite")


def _draw(
    logits_BV: Tensor, draws_B: Tensor, temperature: float, top_k: int, top_p: float
) -> tuple[Tensor, Tensor]:
    """Return what `sample` does, and whether the logits are finite, without waiting for either."""
    ranked_BV, ids_BV = (logits_BV.double() / temperature).sort(descending=True, stable=True)
    if top_k:
        ranked_BV[:, top_k:] = -torch.inf
    probs_BV = ranked_BV.softmax(-1)
    # keep a token if the sum of those before it is below top_p: the first one always
    probs_BV = probs_BV.masked_fill(probs_BV.cumsum(-1) - probs_BV >= top_p, 0.0)
    sums_BV = torch.zeros_like(probs_BV).scatter(-1, ids_BV, probs_BV).cumsum(-1)
    total_B1 = sums_BV[:, -1:]
    # the product may round up to the total, which no sum exceeds
    below_B1 = total_B1.nextafter(torch.zeros_like(total_B1))
    wanted_B1 = torch.minimum(draws_B[:, None] * total_B1, below_B1)
    found_B = torch.searchsorted(sums_BV, wanted_B1, right=True)[:, 0]
    # of NaN, no id is found
    return found_B.clamp(max=logits_BV.shape[1] - 1), total_B1.isfinite().all()


def _prefill(model: Transformer, rows: Sequence[Sequence[int]], cache: Cache, chunk: int) -> Tensor:
    """Read prompts into an empty `cache`, `chunk` tokens of each at a time; return logits_BV."""
    longest = max(map(len, rows))
    tokens_BT = torch.zeros((len(rows), longest), dtype=torch.long)
    is_real_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
    for row, tokens_T, is_real_T in zip(rows, tokens_BT, is_real_BT, strict=True):
        tokens_T[longest - len(row) :] = torch.as_tensor(row)
        is_real_T[longest - len(row) :] = True
    device = model.tok_embeddings.weight.device
    padding = longest - min(map(len, rows))
    tokens_BT, is_real_BT = to_device(tokens_BT, device), to_device(is_real_BT, device)
    logits_B1V = torch.empty(0)
    for start in range(0, longest, chunk):
        part = slice(start, start + chunk)
        is_real = is_real_BT[:, part] if start < padding else None
        logits_B1V = model(tokens_BT[:, part], is_real_BT=is_real, cache=cache, logits_to_keep=1)
    return logits_B1V[:, -1]


def batches(
    prompts: Sequence[Sequence[int]], limits: Sequence[int], batch_tokens: int, max_seq_len: int
) -> Iterator[list[int]]:
    """Yield the indices of each batch's prompts, the longest first; padding counts."""
    batch: list[int] = []
    longest = limit = 0
    for i in sorted(range(len(prompts)), key=lambda i: -len(prompts[i])):
        room = longest + max(limit, limits[i])
        # the last token of an answer is not read
        if batch and ((len(batch) + 1) * room > batch_tokens or room - 1 > max_seq_len):
            yield batch
            batch = []
        if not batch:
            longest, limit = len(prompts[i]), 0
        batch.append(i)
        limit = max(limit, limits[i])
    if batch:
        yield batch


def _check_prompts(
    model: Transformer, prompts: Sequence[Sequence[int]], limits: Sequence[int]
) -> None:
    args = model.args
    if len(limits) != len(prompts):
        count = f"{len(limits)} numbers for {len(prompts)} prompts"
        raise UserError("generate.max_new_tokens", f"max_new_tokens has {count}")
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
            ids = f"{min(prompt)} to {max(prompt)}, the model's are 0 to {args.vocab_size - 1}"
            raise UserError("generate.token_ids", f"prompt {i} has ids from {ids}", prompt=i)
        if len(prompt) + limit - 1 > args.max_seq_len:  # the last one is not read
            size = f"{len(prompt)} tokens with {limit} new ones"
            raise UserError(
                "model.sequence_too_long",
                f"prompt {i} of {size} is longer than max_seq_len = {args.max_seq_len}",
                prompt=i,
            )


def _check_sampling(temperature: float, top_k: int, top_p: float, generator: object) -> None:
    if temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
        given = f"temperature {temperature}, top_k {top_k}, top_p {top_p}"
        raise UserError("generate.sampling", f"{given}: expected >= 0, >= 0, and > 0 up to 1")
    if temperature > 0 and generator is None:
        raise UserError("generate.sampling", "a temperature above 0 needs a torch.Generator")
    if temperature == 0 and (top_k or top_p < 1 or generator is not None):
        raise UserError("generate.sampling", "top_k, top_p and a generator need a temperature")
