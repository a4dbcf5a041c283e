"""A completion: the scheduler's tokens as text and as the objects of OpenAI's API."""

import functools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from canon_pretrain.hf.sampling import Continuation, Sampler
from canon_pretrain.serve.body import CompletionOptions, Prompt
from canon_pretrain.serve.scheduler import Reason, Request, ScoredToken

Json = dict[str, Any]


class TokenTexts:
    """The text of each token by itself, as `logprobs` names it; `token_id:N` of one without any."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        # decoded after another token: SentencePiece drops the first space of a text
        self._before = sampler.encode("1" if sampler.has_ids else "a")[-1:]
        self._start = len(sampler.decode(self._before))
        self.of = functools.lru_cache(maxsize=1 << 16)(self._decode)

    def _decode(self, token: int) -> str:
        if token == self._sampler.tokenizer.eos_id:
            return self._sampler.tokenizer.eos_token
        text = self._sampler.decode([*self._before, token])[self._start :]
        # a part of a character, or an id that only pads the vocabulary
        return text if text and "\ufffd" not in text else f"token_id:{token}"


class PlacedToken(NamedTuple):
    """A token, and the position in the choice's text at which its own text begins."""

    token: ScoredToken
    offset: int


class Choice:
    """One answer: its text, which ends before any of `stops`, and its tokens.

    `take` returns what is new; with `stops`, not the end of the text that may begin one of them.
    """

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        options: CompletionOptions,
        sampler: Sampler,
        token_texts: TokenTexts,
    ) -> None:
        self.index = index
        self.reason: Reason | None = None
        self.num_tokens = 0
        self._options = options
        self._token_texts = token_texts
        self._answer = Continuation(sampler, prompt.ids, splits_prompt=options.echo)

        # The text begins with that of the prompt if it is echoed.
        self._text = ""
        self._prompt_offsets = []  # of the tokens' texts
        if options.echo:
            for text in self._answer.prompt_texts:
                self._prompt_offsets.append(len(self._text))
                self._text += text
        self._answer_start = len(self._text)
        self._is_cut = False

        # Those of an echoed prompt, then the answer's.
        self._tokens: list[PlacedToken] = []
        self._num_added = prompt.num_added
        self._num_prompt_tokens = 0
        self._num_taken = 0  # characters
        self._num_taken_tokens = 0

    def add_prompt(self, tokens: Sequence[ScoredToken]) -> None:
        """Add the tokens of an echoed prompt, with their log-probabilities; not an added EOS."""
        placed = zip(tokens, self._prompt_offsets, strict=True)
        self._tokens += [PlacedToken(*pair) for pair in placed][self._num_added :]
        self._num_prompt_tokens = len(self._tokens)

    def add(self, token: ScoredToken) -> bool:
        """Add a token; return whether the answer continues. EOS has no text."""
        self.num_tokens += 1
        if self._options.num_top is not None:
            self._tokens.append(PlacedToken(token, len(self._text)))
        self._answer.append(token.id)
        is_stopped = self._add_new_text(is_last=False)
        return not (is_stopped or self._answer.is_complete)

    def end(self, reason: Reason) -> None:
        """Add the rest of the text, unless a stop text has ended it."""
        self.reason = reason
        if not self._is_cut and self._add_new_text(is_last=True):
            self.reason = "stop"

    def _add_new_text(self, *, is_last: bool) -> bool:
        """Add the text that the last tokens complete; return whether it has a stop text."""
        num_before = len(self._text)
        self._text += self._answer.decode_new(is_last=is_last)

        # A stop text that ends in the new characters begins less than its length before them, and
        # not in the prompt.
        starts = []
        for stop in self._options.stops:
            first_start = max(self._answer_start, num_before - len(stop) + 1)
            start = self._text.find(stop, first_start)
            if start >= 0:
                starts.append(start)
        if not starts:
            return False
        self._cut(min(starts))
        return True

    def _cut(self, length: int) -> None:
        """Keep the first `length` characters, and the answer's tokens whose texts begin there."""
        self._is_cut = True
        self._text = self._text[:length]
        prompt_tokens = self._tokens[: self._num_prompt_tokens]
        answer_tokens = self._tokens[self._num_prompt_tokens :]
        self._tokens = prompt_tokens + [
            placed for placed in answer_tokens if placed.offset < length
        ]

    def _num_stable(self) -> int:
        """Return how many characters no later token changes or cuts."""
        if self.reason is not None:
            return len(self._text)

        # The end of the answer may be the beginning of a stop text, which later tokens complete.
        longest_stop = max(map(len, self._options.stops), default=0)
        answer_end = self._text[self._answer_start :][-longest_stop:] if longest_stop else ""
        num_unsure = 0
        for stop in self._options.stops:
            num_unsure = max(num_unsure, overlap(answer_end, stop))
        return len(self._text) - num_unsure

    def take(self) -> Json | None:
        """Return the choice with what was not taken before; None if there is nothing new."""
        num_stable = self._num_stable()
        text = self._text[self._num_taken : num_stable]
        new_tokens = self._tokens[self._num_taken_tokens :]
        if self.reason is None:
            new_tokens = [placed for placed in new_tokens if placed.offset < num_stable]
            if not text and not new_tokens:
                return None
        self._num_taken = num_stable
        self._num_taken_tokens += len(new_tokens)
        return {
            "index": self.index,
            "text": text,
            "logprobs": None if self._options.num_top is None else self._logprobs(new_tokens),
            "finish_reason": self.reason,
        }

    def _logprobs(self, tokens: Sequence[PlacedToken]) -> Json:
        """Return OpenAI's object of the tokens' log-probabilities: a list per fact."""
        logprobs: Json = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token, offset in tokens:
            logprobs["tokens"].append(self._token_texts.of(token.id))
            logprobs["token_logprobs"].append(token.logp)
            logprobs["top_logprobs"].append(self._top_logprobs(token))
            logprobs["text_offset"].append(offset)
        return logprobs

    def _top_logprobs(self, token: ScoredToken) -> dict[str, float] | None:
        """Return log-probabilities by text, of the likeliest tokens and of `token` itself.

        None for the first token of a prompt, which has none. Of several tokens with one text, the
        likeliest has this name and the others their ids', but `token`, which is left out then.
        """
        if token.logp is None:
            return None
        logps: dict[str, float] = {}
        for other, logp in token.top:
            name = self._token_texts.of(other)
            if name in logps and other != token.id:
                name = f"token_id:{other}"
            logps.setdefault(name, logp)
        logps.setdefault(self._token_texts.of(token.id), token.logp)
        return logps


def overlap(text: str, stop: str) -> int:
    """Return how many of the last characters of `text` are the first ones of `stop`, not all."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class Completion:
    """The answers to a request for completions.

    `on_change` is called in the scheduler's thread, with an object to stream, with None when all
    answers have ended, or with the error that failed them.
    """

    def __init__(
        self,
        options: CompletionOptions,
        sampler: Sampler,
        token_texts: TokenTexts,
        model_name: str,
        on_change: Callable[[Json | Exception | None], None],
    ) -> None:
        self.options = options
        self._on_change = on_change
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model_name,
        }
        self.requests: list[Request] = []
        self._choices: list[Choice] = []
        self._num_running = len(options.prompts) * options.num_answers
        for prompt, max_tokens in zip(options.prompts, options.max_tokens, strict=True):
            choices = []
            for _ in range(options.num_answers):
                index = len(self._choices)
                choices.append(Choice(index, prompt, options, sampler, token_texts))
                self._choices.append(choices[-1])
            self.requests.append(
                Request(
                    prompt.ids,
                    max_tokens,
                    _PromptListener(self, choices),
                    num_answers=options.num_answers,
                    sampling=options.sampling,
                    seed=options.seed,
                    num_top=options.num_top,
                    scores_prompt=options.echo and options.num_top is not None,
                )
            )

    def result(self) -> Json:
        """Return the completion, when all answers have ended."""
        return {**self._head, "choices": [*self._taken()], "usage": self.usage()}

    def _taken(self) -> Iterator[Json]:
        for choice in self._choices:
            taken = choice.take()
            assert taken is not None  # it has ended
            yield taken

    def chunk(self, choices: list[Json], usage: Json | None = None) -> Json:
        """Return an object of a stream."""
        chunk = {**self._head, "choices": choices}
        if self.options.include_usage:
            chunk["usage"] = usage
        return chunk

    def usage(self) -> Json:
        num_prompt = sum(len(prompt.ids) for prompt in self.options.prompts)
        num_new = sum(choice.num_tokens for choice in self._choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
        }

    def changed(self, choice: Choice) -> None:
        """Stream what is new of a choice."""
        if self.options.stream:
            taken = choice.take()
            if taken is not None:
                self._on_change(self.chunk([taken]))

    def ended(self) -> None:
        self._num_running -= 1
        if not self._num_running:
            self._on_change(None)

    def failed(self, error: Exception) -> None:
        self._on_change(error)


class _PromptListener:
    """The scheduler's listener for one prompt of a completion."""

    def __init__(self, completion: Completion, choices: Sequence[Choice]) -> None:
        self._completion = completion
        self._choices = choices

    def on_prompt(self, tokens: Sequence[ScoredToken]) -> None:
        for choice in self._choices:
            choice.add_prompt(tokens)

    def on_token(self, index: int, token: ScoredToken) -> bool:
        choice = self._choices[index]
        continues = choice.add(token)
        if continues:
            self._completion.changed(choice)
        return continues

    def on_end(self, index: int, reason: Reason) -> None:
        choice = self._choices[index]
        choice.end(reason)
        self._completion.changed(choice)
        self._completion.ended()

    def on_error(self, error: Exception) -> None:
        self._completion.failed(error)
