"""A checkpoint as lm_eval sees it: the three kinds of request, answered by our Transformer.

Every suite asks through this class (suites.py, validation.py). What the harness's own `hf` model
leaves to the tokenizer or to defaults is fixed here: no BOS, EOS where a text needs a token before
its first one (documents were separated by EOS in training, BOS was never seen), log-softmax in
float32, greedy decoding, and a context that is too long loses its beginning.

Rows of unequal length that are scored are padded on the right: the model is causal, so padding
changes nothing. Those that are continued are up to model/decode.py.

Shapes: B rows, T tokens, V vocabulary, N scored tokens of one row.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from rich.console import Console
from torch import Tensor

from canon_pretrain.errors import UserError
from canon_pretrain.model.decode import generate
from canon_pretrain.model.transformer import Transformer
from eval.progress import progress

BATCH_TOKENS = 8192
"""Tokens in a forward pass: at 32,000 pieces their float32 logits are 1 GB. Also those that a
generation remembers: keys and values of the 1.3B model are 3 GB."""
DEFAULT_GEN_TOKENS = 256
GENERATION_OPTIONS = {"until", "max_gen_toks", "do_sample", "temperature", "num_beams"}


class TextTokenizer(Protocol):
    """What this class needs of a tokenizer; `encode` adds neither BOS nor EOS."""

    vocab_size: int
    eos_id: int

    def encode(self, text: str) -> Iterable[int]: ...

    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True)
class _Question:
    """What to continue, and where to end."""

    context: list[int]
    until: list[str]
    max_tokens: int


class CanonLM(TemplateLM):
    """`model` and `tokenizer` as an lm_eval model that reads at most `max_length` tokens.

    `tokenizer` None: token-level scores only. `batch_tokens` bounds B * T of a forward pass.
    Raises UserError for a max_length that the model cannot take.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: TextTokenizer | None,
        *,
        max_length: int,
        batch_tokens: int = BATCH_TOKENS,
        console: Console | None = None,
    ) -> None:
        super().__init__()
        longest = model.args.max_seq_len
        if not 1 <= max_length <= longest:
            raise UserError(f"max_length {max_length}: this model takes 1 to {longest} tokens")
        if tokenizer is not None and tokenizer.vocab_size > model.args.vocab_size:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size} pieces, the model only "
                f"{model.args.vocab_size}: give the tokenizer that the model was trained with"
            )
        self.model, self._text = model, tokenizer
        self.max_length, self.batch_tokens = max_length, batch_tokens
        self._device = model.tok_embeddings.weight.device
        self._console = console or Console(quiet=True)

    @property
    def text(self) -> TextTokenizer:
        """The tokenizer; raises UserError where there is none."""
        if self._text is None:
            raise UserError("this model was given no tokenizer, so it reads and writes no text")
        return self._text

    @property
    def eot_token_id(self) -> int:
        """EOS: also the token before the first one of a text without context."""
        return self.text.eos_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """The ids of `string`; never BOS, whatever `add_special_tokens`."""
        return [int(token) for token in self.text.encode(string)]

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, is greedy) of each (context, continuation)."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """The log-likelihood of each whole text, in windows of max_length as the harness cuts."""
        owners: list[int] = []
        windows: list[tuple[list[int], list[int]]] = []
        for index, request in enumerate(requests):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append(make_disjoint_window(window))
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._score(windows, "windows"), strict=True):
            totals[owner] += score
        return totals

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return self._score([(context, cont) for _, context, cont in requests], "likelihoods")

    def _score(
        self, pairs: Sequence[tuple[list[int], list[int]]], what: str
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, is greedy) of the second of each pair after the first."""
        rows, counts = [], []
        for context, continuation in pairs:
            if not 0 < len(continuation) <= self.max_length:
                raise UserError(
                    f"a continuation of {len(continuation)} tokens cannot be scored: expected 1 "
                    f"to max_length = {self.max_length}"
                )
            # the last token is only predicted, never read: hence one more than max_length
            rows.append((context + continuation)[-(self.max_length + 1) :])
            counts.append(len(continuation))
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(rows)
        with progress(self._console, what, len(rows)) as advance:
            for batch in self._batches([len(row) - 1 for row in rows]):
                scores = self.score_tokens([rows[i] for i in batch], [counts[i] for i in batch])
                for index, score in zip(batch, scores, strict=True):
                    answers[index] = score
                advance(len(batch))
        return answers

    @torch.inference_mode()
    def score_tokens(
        self, rows: Sequence[Sequence[int]], counts: Sequence[int]
    ) -> list[tuple[float, bool]]:
        """Of each row's last `counts` tokens: (log-likelihood, is each the likeliest).

        One forward pass over row[:-1]. Log-softmax in float32, the sum in float64.
        """
        logits_BTV = self.model(self._pad([row[:-1] for row in rows]))
        answers = []
        for row, count, logits_TV in zip(rows, counts, logits_BTV, strict=True):
            end = len(row) - 1
            logits_NV = logits_TV[end - count : end].float()
            wanted_N = torch.tensor(row[-count:], device=self._device)
            found_N = logits_NV.log_softmax(-1).gather(-1, wanted_N[:, None])[:, 0]
            greedy = bool((logits_NV.argmax(-1) == wanted_N).all())
            answers.append((found_N.double().sum().item(), greedy))
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """The greedy continuation of each context, cut before the first of its `until` strings.

        An answer ends at its length, at EOS (not kept), or when it holds one of its `until`.
        """
        asked = [self._question(*request.args) for request in requests]

        def is_answered(index: int, tokens: list[int]) -> bool:
            question = asked[index]
            text = self._written(question, tokens) if question.until else ""
            return any(stop and stop in text for stop in question.until)

        with progress(self._console, "answers", len(asked)) as advance:
            answers = generate(
                self.model,
                [question.context for question in asked],
                max_new_tokens=[question.max_tokens for question in asked],
                eos_id=self.eot_token_id,
                stop=is_answered,
                ended=lambda index: advance(1),
                batch_tokens=self.batch_tokens,
            )
        return [
            postprocess_generated_text(self._written(question, tokens), question.until, None)
            for question, tokens in zip(asked, answers, strict=True)
        ]

    def _question(self, context: str, options: dict[str, Any]) -> _Question:
        options = dict(normalize_gen_kwargs(options, DEFAULT_GEN_TOKENS))
        unknown = options.keys() - GENERATION_OPTIONS
        sampled = options.get("do_sample") or options.get("temperature", 0.0) > 0
        if sampled or options.get("num_beams", 1) != 1 or unknown:
            raise UserError(
                f"generation options {options}: only greedy decoding is supported (until, "
                "max_gen_toks)"
            )
        room = self.max_length - options["max_gen_toks"]
        if room < 1:
            raise UserError(
                f"max_gen_toks = {options['max_gen_toks']} leaves no room for a prompt: max_length "
                f"is {self.max_length}; raise it with --max_length, or generate less"
            )
        tokens = self.tok_encode(context) or [self.prefix_token_id]
        return _Question(tokens[-room:], options["until"], options["max_gen_toks"])

    def _written(self, question: _Question, tokens: list[int]) -> str:
        """The text of new `tokens` as it continues the context.

        Decoded after the context's last token: SentencePiece drops the space before a text's first
        word, and there it is no first word.
        """
        last = question.context[-1:]
        return self.text.decode(last + tokens)[len(self.text.decode(last)) :]

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """The indices of rows in batches of at most `batch_tokens`, longest first.

        So that little is padding, and what does not fit in memory fails at once.
        """
        batch: list[int] = []
        for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            if batch and (len(batch) + 1) * lengths[batch[0]] > self.batch_tokens:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _pad(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """tokens_BT, int64, zeros on the right."""
        tokens_BT = torch.zeros((len(rows), max(map(len, rows))), dtype=torch.long)
        for row_T, row in zip(tokens_BT, rows, strict=True):
            row_T[: len(row)] = torch.as_tensor(row)
        return tokens_BT.to(self._device)
