"""A checkpoint as an lm_eval model: the three request types, answered by our Transformer."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.tokenizer import Tokenizer
from canon_pretrain.model.decode import batches, generate, sample_generator
from canon_pretrain.model.transformer import Transformer
from eval.model.ranks import Ranks
from eval.model.score import Answer, Batch, Member, Pair, Planner, Row, score_batch

# 1 GB of float32 logits with a vocabulary of 32,000; 3 GB of keys and values for the 1.3B model
BATCH_TOKENS = 8192
# characters of a prompt that are read in about the time of one generated token
NEW_TOKEN_COST = 32
# tokens that take about as long as the fixed cost of a pass, by type of device
PASS_TOKENS = {"cpu": 32, "cuda": 1024}
# tokens per pass: beyond a CPU's caches it takes 1.9 times as long
READ_TOKENS = {"cpu": 512}
DEFAULT_GEN_TOKENS = 256
OUT_OF_MEMORY_HINT = "out of device memory: lower --max-length or use --dtype bfloat16"
GENERATION_OPTIONS = {"until", "max_gen_toks", "do_sample", "temperature", "num_beams"}

Work = TypeVar("Work")
Result = TypeVar("Result")


class GenerationRequest(NamedTuple):
    """A prompt that fits in the model's length, and how to answer it."""

    context: tuple[int, ...]
    until: tuple[str, ...]
    max_tokens: int
    temperature: float = 0.0
    # of a sampled answer: document and number, so that equal prompts have several answers
    sample: tuple[int, int] = (0, 0)


def request_cost(request: Instance) -> int:
    """Estimate the cost of a request in characters read, at least 1; choices share a context."""
    cost = len(request.args[0]) + 1
    if request.request_type == "generate_until":
        options = normalize_gen_kwargs(request.args[1], DEFAULT_GEN_TOKENS)
        return cost + NEW_TOKEN_COST * options["max_gen_toks"]
    if request.request_type == "loglikelihood":
        # the first choice has the cost of the context
        if request.idx > 0:
            cost = 1
        return cost + len(request.args[1])
    return cost


class CanonLM(TemplateLM):
    """An lm_eval model of `model` and `tokenizer` (None: token-level scores only).

    `batch_tokens` limits the tokens per batch in a cache, `read_tokens` those per pass; `add_bos`
    puts EOS before every text. `on_done` receives the costs of answered requests; `truncated`
    collects the doc_id of items whose context was cut, `failures` the reasons by doc_id of items
    that cannot be scored and have NaN instead. All `ranks` must make the same calls.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None,
        *,
        max_length: int,
        batch_tokens: int = BATCH_TOKENS,
        add_bos: bool = False,
        ranks: Ranks | None = None,
        on_done: Callable[[int], None] = lambda cost: None,
        log: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
    ) -> None:
        super().__init__()
        if tokenizer is not None and tokenizer.vocab_size > model.args.vocab_size:
            raise UserError(
                "eval.vocab_size",
                f"the tokenizer has {tokenizer.vocab_size} tokens, the model "
                f"{model.args.vocab_size}: use the tokenizer of training",
            )

        longest = model.args.max_seq_len
        if not 1 <= max_length <= longest:
            raise UserError(
                "eval.max_length",
                f"max_length {max_length}: expected 1 to {longest}",
                given=max_length,
                expected=longest,
            )

        self.model = model
        self._tokenizer = tokenizer
        self.max_length = max_length
        self.batch_tokens = batch_tokens
        self.ranks = ranks or Ranks()
        self.on_done = on_done
        self.log = log

        # filled by the requests
        self.truncated: set[int | None] = set()
        self.failures: dict[int, str] = {}

        # limits and costs of a pass that depend on the device
        device_type = model.tok_embeddings.weight.device.type
        self.read_tokens: int | None = READ_TOKENS.get(device_type)
        self._pass_tokens = PASS_TOKENS.get(device_type, PASS_TOKENS["cuda"])
        self._bos = [self.eot_token_id] if add_bos else []

    @property
    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer; raises UserError if there is none."""
        if self._tokenizer is None:
            raise UserError("eval.no_tokenizer", "this model has no tokenizer to read text with")
        return self._tokenizer

    @property
    def eot_token_id(self) -> int:
        """Return EOS, also `prefix_token_id`: the token before a text without context."""
        return self.text_tokenizer.eos_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the ids of `string`, after EOS with `add_bos` unless add_special_tokens=False."""
        ids = [int(token) for token in self.text_tokenizer.encode(string)]
        return ids if add_special_tokens is False else self._bos + ids

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[Answer]:
        """Return (log-likelihood, whether greedy) per (context, continuation); see `failures`."""
        # The pairs and costs, by the request's index, of the requests that can be scored.
        pairs: dict[int, Pair] = {}
        costs: dict[int, int] = {}
        for index, request in enumerate(requests):
            cost = request_cost(request)
            try:
                pairs[index] = self._request_pair(request)
                costs[index] = cost
            except UserError as error:
                self.failures.setdefault(request.doc_id, str(error))
                self.on_done(cost)

        blank = {request.doc_id for request in requests if request.args[0].isspace()}
        if blank:
            self.log(
                f"{requests[0].task_name}, such as document {min(blank)}: "
                f"{len(blank)} contexts of white space only, scored after EOS"
            )

        scores = self.score_pairs([*pairs.values()], [*costs.values()])
        answers = dict(zip(pairs, scores, strict=True))
        no_answer = (math.nan, False)
        return [answers.get(index, no_answer) for index in range(len(requests))]

    def _request_pair(self, request: Instance) -> Pair:
        """Return the tokens of a request; EOS precedes those of a context without any."""
        # The boundary between the two may not be one between tokens: lm_eval's rule decides.
        context, continuation = request.args
        if context:
            before, after = self._encode_pair(context, continuation)
        else:
            before = []
            after = self.tok_encode(continuation, add_special_tokens=False)

        # A context of white space has no tokens either: lm_eval moves it to the continuation.
        if not before:
            before = [self.prefix_token_id]
            if after[:1] == before:  # the text begins with EOS already
                after = after[1:]

        if not after and continuation:
            raise UserError(
                "eval.continuation",
                f"no token of {continuation!r:.40} is its own: one crosses the boundary "
                f"from the context {context[-20:]!r}",
                given=continuation,
            )

        pair = self._pair(before + after, len(after))
        if len(pair.tokens) < len(before + after):
            self.truncated.add(request.doc_id)
        return pair

    def _pair(self, tokens: list[int], count: int) -> Pair:
        """Return the pair of the last `count` tokens; too long a context loses its start."""
        if not 0 < count <= self.max_length or count == len(tokens):
            raise UserError(
                "eval.continuation",
                f"a continuation of {count} tokens after {len(tokens) - count}: "
                f"expected 1 to {self.max_length}",
                given=count,
                expected=self.max_length,
            )
        # the last token is only predicted, not read: hence one more than max_length
        return Pair(tokens[-(self.max_length + 1) :], count)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Return the log-likelihood of each whole text, in lm_eval's windows of max_length."""
        # One pair per window of a text.
        pairs: list[Pair] = []
        costs: list[int] = []
        request_indices: list[int] = []
        for index, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            cost = request_cost(request)
            windows = get_rolling_token_windows(
                tokens,
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, scored in map(make_disjoint_window, windows):
                pairs.append(self._pair(context + scored, len(scored)))
                costs.append(cost)
                request_indices.append(index)
                cost = 0  # the first window has the cost of all
            self.on_done(cost)  # nonzero for a text without windows

        # The log-likelihood of a text is the sum over its windows.
        totals = [0.0] * len(requests)
        scores = self.score_pairs(pairs, costs)
        for index, (log_likelihood, _) in zip(request_indices, scores, strict=True):
            totals[index] += log_likelihood
        return totals

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[Answer]:
        pairs = [
            self._pair(context + continuation, len(continuation))
            for _, context, continuation in requests
        ]
        return self.score_pairs(pairs, [1] * len(pairs))

    def score_pairs(self, pairs: Sequence[Pair], costs: Sequence[int]) -> list[Answer]:
        """Return the answer to each pair, from batches distributed over the ranks; see score.py."""
        return self.map_batches(
            plan=lambda budget, chosen: self._planner(budget).plan(pairs, chosen),
            members=lambda batch: batch.pairs,
            work=lambda budget, batch: score_batch(self.model, self._planner(budget), pairs, batch),
            costs=costs,
        )

    def score_parts(
        self, rows: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Return log-likelihoods of consecutive parts of each row; the last one ends the row."""
        # One pass, in which each part is a pair of its own that its row answers.
        pairs: list[Pair] = []
        groups: list[list[Row]] = []
        for row, part_sizes in zip(rows, sizes, strict=True):
            members: list[Member] = []
            end = len(row) - sum(part_sizes)
            for size in part_sizes:
                end += size
                # the last token of a pair is only predicted
                members.append(Member(len(pairs), end - 1))
                pairs.append(Pair(list(row[:end]), size))
            groups.append([Row(list(row[:-1]), members)])
        planner = self._planner(self.batch_tokens)
        answers = score_batch(self.model, planner, pairs, Batch(0, groups))

        # Back to one list per row, in the order of the pairs.
        scores = []
        first = 0
        for part_sizes in sizes:
            stop = first + len(part_sizes)
            scores.append([answers[index][0] for index in range(first, stop)])
            first = stop
        return scores

    def _planner(self, budget: int) -> Planner:
        return Planner(budget, self.read_tokens or budget, self._pass_tokens)

    def map_batches(
        self,
        *,
        plan: Callable[[int, Sequence[int]], list[Work]],
        members: Callable[[Work], Sequence[int]],
        work: Callable[[int, Work], Mapping[int, Result]],
        costs: Sequence[int],
    ) -> list[Result]:
        """Return the result of each item of `costs`, on all ranks.

        `plan(batch_tokens, items)` returns batches, `members(batch)` the items of one,
        `work(batch_tokens, batch)` their results. Lowers `batch_tokens` to what fits on all ranks.
        """
        planned_budget = self.batch_tokens
        fitting_budget = planned_budget  # lowered each time the memory of this rank runs out

        def run_batch(batch: Work, budget: int) -> dict[int, Result]:
            """Return the results of a batch, of smaller ones if it does not fit in memory."""
            nonlocal fitting_budget
            items = members(batch)
            if fitting_budget < budget:  # out of memory since it was planned
                return run_batches(plan(fitting_budget, items), fitting_budget)
            results = none_if_out_of_memory(partial(work, budget, batch))
            if results is not None:
                return dict(results)

            # Out of memory: halve the budget, and divide this batch accordingly.
            if len(items) == 1:
                raise UserError("eval.out_of_memory", f"a single item: {OUT_OF_MEMORY_HINT}")
            if fitting_budget == planned_budget:
                self.log(
                    f"out of memory with {fitting_budget} tokens per batch: continuing with fewer"
                )
            fitting_budget = max(1, fitting_budget // 2)
            smaller = plan(fitting_budget, items)
            if len(smaller) == 1:  # a sequence exceeds the budget: halve the items
                half = len(items) // 2
                smaller = plan(fitting_budget, items[:half])
                smaller += plan(fitting_budget, items[half:])
            return run_batches(smaller, fitting_budget)

        def run_batches(batches: Sequence[Work], budget: int) -> dict[int, Result]:
            results: dict[int, Result] = {}
            for batch in batches:
                results |= run_batch(batch, budget)
            return results

        # Each rank takes batches of the same plan, and reports the budget that fits its memory.
        planned = plan(planned_budget, range(len(costs)))
        batch_costs = [sum(costs[item] for item in members(batch)) for batch in planned]
        batch_results = self.ranks.map(
            lambda batch: (run_batch(batch, planned_budget), fitting_budget),
            planned,
            batch_costs,
            self.on_done,
        )

        # The next call starts with what fits on all ranks.
        self.batch_tokens = min((budget for _, budget in batch_results), default=planned_budget)

        results: dict[int, Result] = {}
        for batch_result, _ in batch_results:
            results |= batch_result
        return [results[item] for item in range(len(costs))]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return the answer to each context, cut at EOS, its length or its first `until`.

        Samples depend on document and number of the request alone.
        """
        # Equal prompts are answered once: the distinct ones, each with the cost of its requests.
        costs: Counter[GenerationRequest] = Counter()
        request_prompts: list[GenerationRequest] = []
        for request in requests:
            context, options = request.args
            tokens = self.tok_encode(context) or [self.prefix_token_id]
            prompt = generation_request(tokens, options, self.max_length)
            if prompt.temperature:
                prompt = prompt._replace(sample=(request.doc_id or 0, request.idx))
            if len(prompt.context) < len(tokens):
                self.truncated.add(request.doc_id)
            costs[prompt] += request_cost(request)
            request_prompts.append(prompt)
        prompts = list(costs)

        def plan(budget: int, chosen: Sequence[int]) -> list[list[int]]:
            """Return batches of prompts, each of one temperature."""
            planned: list[list[int]] = []
            for temperature in sorted({prompts[i].temperature for i in chosen}):
                indices = [i for i in chosen if prompts[i].temperature == temperature]
                for batch in batches(
                    [prompts[i].context for i in indices],
                    [prompts[i].max_tokens for i in indices],
                    budget,
                    self.model.args.max_seq_len,
                ):
                    planned.append([indices[k] for k in batch])
            return planned

        def work(budget: int, batch: list[int]) -> dict[int, str]:
            texts = self._generate_texts([prompts[i] for i in batch], budget)
            return dict(zip(batch, texts, strict=True))

        answers = self.map_batches(
            plan=plan,
            members=lambda batch: batch,
            work=work,
            costs=list(costs.values()),
        )
        answer_of = dict(zip(prompts, answers, strict=True))
        return [answer_of[prompt] for prompt in request_prompts]

    def _generate_texts(
        self, prompts: Sequence[GenerationRequest], batch_tokens: int
    ) -> Iterator[str]:
        """Yield the answer to each of the prompts, which have one temperature."""

        def is_complete(index: int, tokens: list[int]) -> bool:
            text = self._decode_answer(prompts[index], tokens)
            return any(stop in text for stop in prompts[index].until)

        # Each sampled answer has its own generator, so that it does not depend on its batch.
        temperature = prompts[0].temperature
        generators = None
        if temperature:
            generators = [sample_generator(*prompt.sample) for prompt in prompts]

        answers = generate(
            self.model,
            [prompt.context for prompt in prompts],
            max_new_tokens=[prompt.max_tokens for prompt in prompts],
            eos_id=self.eot_token_id,
            stop=is_complete if any(prompt.until for prompt in prompts) else None,
            temperature=temperature,
            generator=generators,
            vocab_size=self.text_tokenizer.vocab_size,
            batch_tokens=batch_tokens,
            read_tokens=self.read_tokens,
        )
        for prompt, tokens in zip(prompts, answers, strict=True):
            text = self._decode_answer(prompt, tokens)
            yield postprocess_generated_text(text, stop=list(prompt.until), think_end_token=None)

    def _decode_answer(self, prompt: GenerationRequest, tokens: list[int]) -> str:
        # Decode after the last token of the prompt: SentencePiece drops the space before the first
        # word of a text.
        last = [prompt.context[-1]]
        decode = self.text_tokenizer.decode
        return decode(last + tokens)[len(decode(last)) :]


def generation_request(
    tokens: Sequence[int], options: dict[str, Any], max_length: int
) -> GenerationRequest:
    """Return the request of a prompt, whose beginning is cut if it and its answer do not fit."""
    # lm_eval samples if a temperature is set, unless do_sample is False.
    options = dict(normalize_gen_kwargs(options, DEFAULT_GEN_TOKENS))
    unknown = options.keys() - GENERATION_OPTIONS
    if options.get("num_beams", 1) != 1 or unknown:
        raise UserError(
            "eval.generation_options",
            f"generation options {options}: expected until, max_gen_toks, temperature",
        )

    # The prompt keeps its end, and leaves room for the longest answer.
    max_tokens = options["max_gen_toks"]
    room = max_length - max_tokens
    if room < 1:
        raise UserError(
            "eval.max_length",
            f"max_gen_toks = {max_tokens} leaves no room for a prompt: raise --max-length",
            given=max_length,
        )
    return GenerationRequest(
        context=tuple(tokens[-room:]),
        until=tuple(stop for stop in options["until"] if stop),
        max_tokens=max_tokens,
        temperature=options.get("temperature", 1.0) if options.get("do_sample") else 0.0,
    )


def none_if_out_of_memory(work: Callable[[], Result]) -> Result | None:
    """Return `work()`, or None after freeing memory if it ran out."""
    try:
        return work()
    except torch.OutOfMemoryError:
        pass  # free memory outside of this block: the error refers to the frames' tensors
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None
