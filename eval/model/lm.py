"""A checkpoint as lm_eval sees it: the three kinds of request, answered by our Transformer.

Every suite asks through this class (harness.py, validation.py). What the harness's own `hf` model
leaves to the tokenizer or to defaults is fixed here: no BOS unless asked for, EOS where a text
needs a token before its first one (documents were separated by EOS in training), log-softmax in
float32, greedy decoding. A context that is too long loses its beginning and is counted.

Requests become pairs of tokens to score (score_plan.py, scoring.py) or questions to answer
(generation.py), these become batches within a budget of tokens (batches.py), and the batches are
shared out over the ranks (ranks.py). They do not depend on how many ranks there are.
"""

import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from canon_pretrain.core.errors import UserError
from canon_pretrain.model.decode import batches
from canon_pretrain.model.transformer import Transformer
from eval.model.batches import Workload, run_batches
from eval.model.generation import Question, TextTokenizer, Writer, new_tokens, question
from eval.model.ranks import Ranks
from eval.model.score_plan import Batch, Pair, Planner, Row
from eval.model.scoring import Answer, score_batch

BATCH_TOKENS = 8192
"""Tokens of a batch: at 32,000 pieces the float32 logits of all of them are 1 GB, and keys and
values of the 1.3B model 3 GB."""
NEW_TOKEN_COST = 32
"""Characters of a prompt that are read in the time of one new token, roughly."""
PASS_TOKENS = {"cpu": 32, "cuda": 1024}
"""Tokens of a pass that would take as long as the pass does with none, roughly."""
READ_TOKENS = {"cpu": 512}
"""Tokens that are best read at once, where that is not as many as fit: what a CPU's caches do not
hold takes it 1.9 times as long (8 layers of 512, Canon ABCD, 8,000 tokens instead of 1,000)."""

Result = TypeVar("Result")


def request_cost(request: Instance) -> int:
    """About how much work a request is, in characters that are read; at least 1.

    The choices of an item come with the same context mostly, which is then read once.
    """
    context = len(request.args[0])
    if request.request_type == "generate_until":
        return context + NEW_TOKEN_COST * new_tokens(request.args[1]) + 1
    if request.request_type == "loglikelihood":
        return (0 if request.idx else context) + len(request.args[1]) + 1
    return context + 1


def _complain(text: str) -> None:
    print(text, file=sys.stderr)


class CanonLM(TemplateLM):
    """`model` and `tokenizer` as an lm_eval model that reads at most `max_length` tokens.

    `tokenizer` None: token-level scores only. `batch_tokens` bounds the tokens of a batch that are
    remembered, and `read_tokens` those of a forward pass (None: the same); what does not fit in
    memory all the same is done in smaller batches, with one line to `say`, and `batch_tokens` is
    then what did fit. `add_bos`: a token before every text, where `lm_eval --model hf` puts BOS
    with add_bos_token=True; it is EOS, which began texts in training and is the exports' BOS.
    `answered` is told the cost (request_cost) of requests as they are answered. `max_length`,
    `batch_tokens` and `answered` may be set between calls. `truncated` has the doc_id of each item
    whose context lost its beginning, until it is cleared. All `ranks` must make the same calls.

    Raises UserError for a max_length that the model cannot take, and tokenizers that do not fit.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: TextTokenizer | None,
        *,
        max_length: int,
        batch_tokens: int = BATCH_TOKENS,
        add_bos: bool = False,
        ranks: Ranks | None = None,
        answered: Callable[[int], None] = lambda cost: None,
        say: Callable[[str], None] = _complain,
    ) -> None:
        super().__init__()
        if tokenizer is not None and tokenizer.vocab_size > model.args.vocab_size:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size} pieces, the model only "
                f"{model.args.vocab_size}: give the tokenizer that the model was trained with"
            )
        self.model, self._text = model, tokenizer
        self.max_length, self.batch_tokens = max_length, batch_tokens
        self.ranks, self.answered, self.say = ranks or Ranks.alone(), answered, say
        self.truncated: set[int | None] = set()
        self._device = model.tok_embeddings.weight.device
        self.read_tokens: int | None = READ_TOKENS.get(self._device.type)
        self._bos = [self.eot_token_id] if add_bos else []
        self._encoded: dict[str, list[int]] = {}

    @property
    def max_length(self) -> int:
        """The most tokens that are read at once."""
        return self._max_length

    @max_length.setter
    def max_length(self, max_length: int) -> None:
        longest = self.model.args.max_seq_len
        if not 1 <= max_length <= longest:
            raise UserError(f"max_length {max_length}: this model takes 1 to {longest} tokens")
        self._max_length = max_length

    @property
    def text(self) -> TextTokenizer:
        """The tokenizer; raises UserError where there is none."""
        if self._text is None:
            raise UserError("this model was given no tokenizer, so it reads and writes no text")
        return self._text

    @property
    def eot_token_id(self) -> int:
        """EOS, which ends an answer."""
        return self.text.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before the first token of a text without context: EOS.

        The harness's `hf` takes BOS wherever the tokenizer has one, trained or not.
        """
        return self.eot_token_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """The ids of `string`; EOS before them with `add_bos`, unless add_special_tokens=False."""
        found = self._encoded.get(string)
        if found is None:
            found = [int(token) for token in self.text.encode(string)]
        return found if add_special_tokens is False else self._bos + found

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[Answer]:
        """(log-likelihood, is greedy) of each (context, continuation)."""
        pairs = []
        for request in requests:
            context, continuation = request.args
            self._remember(context.rstrip())
            tokens, count = self._joined(context, continuation)
            pairs.append(self._pair(tokens, count, request))
        self._encoded.clear()
        costs = [request_cost(request) for request in requests]
        return self.score_pairs(pairs, costs)

    def _remember(self, context: str) -> None:
        """The choices of one item come one after another, and have the same context."""
        if context not in self._encoded:
            self._encoded.clear()
            self._encoded[context] = [int(token) for token in self.text.encode(context)]

    def _joined(self, context: str, continuation: str) -> tuple[list[int], int]:
        """Both as tokens, and how many of them are the continuation's; cut as the harness cuts."""
        if context:
            before, after = self._encode_pair(context, continuation)
        else:
            after = self.tok_encode(continuation, add_special_tokens=False)
            before = [self.prefix_token_id]
            if after[:1] == before:  # a text that begins with EOS needs no other
                before, after = after[:1], after[1:]
        return before + after, len(after)

    def _pair(self, tokens: list[int], count: int, request: Instance | None = None) -> Pair:
        if not 0 < count <= self.max_length or count == len(tokens):
            item = ""
            if request is not None and request.task_name is not None:
                words = request.args[1]
                quoted = f"{words[:60]!r}{'...' * (len(words) > 60)}"
                item = f"task {request.task_name}, document {request.doc_id}, {quoted}: "
            problem = f"of {count} tokens (expected 1 to max_length = {self.max_length})"
            if 0 < count == len(tokens):
                problem = "without any token before it"
            raise UserError(f"{item}a continuation {problem} cannot be scored")
        # the last token is only predicted, never read: hence one more than max_length
        kept = tokens[-(self.max_length + 1) :]
        if request is not None and len(kept) < len(tokens):
            self.truncated.add(request.doc_id)
        return Pair(kept, count)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """The log-likelihood of each whole text, in windows of max_length as the harness cuts."""
        owners: list[int] = []
        costs: list[int] = []
        pairs: list[Pair] = []
        for index, request in enumerate(requests):
            windows = list(
                get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            )
            for number, window in enumerate(windows):
                context, scored = make_disjoint_window(window)
                pairs.append(self._pair(context + scored, len(scored)))
                owners.append(index)
                costs.append(_share(request_cost(request), number, len(windows)))
            if not windows:
                self.answered(request_cost(request))
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self.score_pairs(pairs, costs), strict=True):
            totals[owner] += score
        return totals

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[Answer]:
        pairs = [self._pair(context + cont, len(cont)) for _, context, cont in requests]
        return self.score_pairs(pairs, [1] * len(pairs))

    def score_pairs(self, pairs: Sequence[Pair], costs: Sequence[int]) -> list[Answer]:
        """The answer of each pair, in batches shared out over the ranks; see scoring.py."""

        def plan(budget: int, chosen: Sequence[int]) -> list[Batch]:
            return self._planner(budget).plan(pairs, chosen)

        def work(budget: int, batch: Batch) -> dict[int, Answer]:
            return score_batch(self.model, self._planner(budget), pairs, batch)

        return self.run(Workload(plan, lambda batch: batch.pairs, work), costs)

    def score_parts(
        self, rows: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Log-likelihoods of consecutive parts of each row, which end with it: one pass.

        `sizes[r]`: the tokens of each part of row r; tokens before the first part are only read.
        """
        pairs: list[Pair] = []
        groups = []
        for row, parts in zip(rows, sizes, strict=True):
            ends = list(accumulate(parts, initial=len(row) - sum(parts)))[1:]
            members = [(len(pairs) + k, end - 1) for k, end in enumerate(ends)]
            groups.append([Row(list(row[:-1]), members)])
            pairs += [Pair(list(row[:end]), n) for end, n in zip(ends, parts, strict=True)]
        planner = self._planner(self.batch_tokens)
        found = score_batch(self.model, planner, pairs, Batch(0, groups))
        scores = iter([found[index][0] for index in range(len(pairs))])
        return [[next(scores) for _ in parts] for parts in sizes]

    def run(self, load: Workload[Any, Result], costs: Sequence[int]) -> list[Result]:
        """The result of each item of `load`, on all ranks; its cost goes to `answered`."""
        results, self.batch_tokens = run_batches(
            load,
            costs,
            batch_tokens=self.batch_tokens,
            ranks=self.ranks,
            answered=lambda cost: self.answered(cost),
            say=self.say,
        )
        return results

    def _planner(self, budget: int) -> Planner:
        cost = PASS_TOKENS.get(self._device.type, PASS_TOKENS["cuda"])
        return Planner(budget, self.read_tokens or budget, cost)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """The greedy continuation of each context, cut before the first of its `until` strings.

        An answer ends at its length, at EOS (not kept), or when it holds one of its `until`.
        """
        asked: dict[Question, int] = {}  # the same question is asked once
        costs: list[int] = []
        numbers = []
        for request in requests:
            context, options = request.args
            tokens = self.tok_encode(context) or [self.prefix_token_id]
            found = question(tokens, options, self.max_length)
            if len(found.context) < len(tokens):
                self.truncated.add(request.doc_id)
            number = asked.setdefault(found, len(asked))
            if number == len(costs):
                costs.append(0)
            costs[number] += request_cost(request)
            numbers.append(number)
        questions, writer = list(asked), Writer(self.model, self.text)
        limit = self.model.args.max_seq_len

        def plan(budget: int, chosen: Sequence[int]) -> list[list[int]]:
            prompts = [questions[i].context for i in chosen]
            limits = [questions[i].max_tokens for i in chosen]
            return [[chosen[k] for k in b] for b in batches(prompts, limits, budget, limit)]

        def work(budget: int, batch: list[int]) -> dict[int, str]:
            texts = writer.answers([questions[i] for i in batch], budget, self.read_tokens)
            return dict(zip(batch, texts, strict=True))

        answers = self.run(Workload(plan, lambda batch: batch, work), costs)
        return [answers[number] for number in numbers]


def _share(cost: int, part: int, parts: int) -> int:
    """What is part `part` of `parts` of a cost; they add up to it."""
    return cost * (part + 1) // parts - cost * part // parts
