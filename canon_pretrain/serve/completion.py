"""A completion: the scheduler's tokens as text and as the objects of OpenAI's API."""

import functools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from canon_pretrain.hf.sampling import Detokenizer, Sampler
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
        self.ids: list[int] = []
        self._options = options
        self._eos_id = sampler.tokenizer.eos_id
        self._task = sampler.task
        self._token_texts = token_texts

        # The prompt goes through the detokenizer too, and is a part of the text if it is echoed.
        self._detokenizer = Detokenizer(sampler.decode)
        self._text = ""
        self._prompt_offsets = []  # of the tokens' texts
        if options.echo:
            for token in prompt.ids:
                self._prompt_offsets.append(len(self._text))
                self._text += self._detokenizer.add([token])
            self._text += self._detokenizer.flush()
        else:
            self._detokenizer.add(prompt.ids)
            self._detokenizer.flush()
        self._answer_start = len(self._text)
        self._is_cut = False

        # Tokens with offsets of their texts: those of an echoed prompt, then the answer's.
        self._scored: list[tuple[ScoredToken, int]] = []
        self._num_added = prompt.num_added
        self._num_prompt_tokens = 0
        self._num_taken = 0  # characters
        self._num_taken_tokens = 0

    def add_prompt(self, tokens: Sequence[ScoredToken]) -> None:
        """Add the tokens of an echoed prompt, with their log-probabilities; not an added EOS."""
        scored = [*zip(tokens, self._prompt_offsets, strict=True)]
        self._scored += scored[self._num_added :]
        self._num_prompt_tokens = len(self._scored)

    def add(self, token: ScoredToken) -> bool:
        """Add a token; return whether the answer continues. EOS has no text."""
        self.num_tokens += 1
        if self._options.num_top is not None:
            self._scored.append((token, len(self._text)))
        if token.id == self._eos_id:
            return False
        self.ids.append(token.id)
        num_before = len(self._text)
        self._text += self._detokenizer.add([token.id])
        if self._cut_at_stop(num_before):
            return False
        return self._task is None or not self._task.is_complete(self.ids)

    def end(self, reason: Reason) -> None:
        self.reason = reason
        if not self._is_cut:
            num_before = len(self._text)
            self._text += self._detokenizer.flush()
            if self._cut_at_stop(num_before):
                self.reason = "stop"

    def _cut_at_stop(self, num_before: int) -> bool:
        """Cut the text before the first stop text in it, which ends after `num_before`."""
        starts = []
        for stop in self._options.stops:
            first = max(self._answer_start, num_before - len(stop) + 1)
            starts.append(self._text.find(stop, first))
        found = [start for start in starts if start >= 0]
        if not found:
            return False
        self._is_cut = True
        self._text = self._text[: min(found)]
        # without the tokens of which nothing is left
        answer_tokens = self._scored[self._num_prompt_tokens :]
        num_gone = sum(offset >= len(self._text) for _, offset in answer_tokens)
        del self._scored[len(self._scored) - num_gone :]
        return True

    def _num_stable(self) -> int:
        """Return how many characters no later token changes or cuts."""
        if self.reason is not None:
            return len(self._text)
        longest = max(map(len, self._options.stops), default=1) - 1
        for length in range(min(longest, len(self._text) - self._answer_start), 0, -1):
            if any(stop.startswith(self._text[-length:]) for stop in self._options.stops):
                return len(self._text) - length
        return len(self._text)

    def take(self) -> Json | None:
        """Return the choice with what was not taken before; None if there is nothing new."""
        num_stable = self._num_stable()
        text = self._text[self._num_taken : num_stable]
        new_tokens = self._scored[self._num_taken_tokens :]
        if self.reason is None:
            new_tokens = [scored for scored in new_tokens if scored[1] < num_stable]
            if not text and not new_tokens:
                return None
        self._num_taken = num_stable
        self._num_taken_tokens += len(new_tokens)
        return {
            "index": self.index,
            "text": text,
            "logprobs": self._logprobs(new_tokens),
            "finish_reason": self.reason,
        }

    def _logprobs(self, scored: Sequence[tuple[ScoredToken, int]]) -> Json | None:
        if self._options.num_top is None:
            return None
        tops: list[dict[str, float] | None] = []
        for token, _ in scored:
            if token.logp is None:
                tops.append(None)
                continue
            # the chosen token is always among them
            top: dict[str, float] = {}
            for other, logp in (*token.top, (token.id, token.logp)):
                name = self._token_texts.of(other)
                if name in top and other not in (token.id, token.top[0][0]):
                    name = f"token_id:{other}"
                top.setdefault(name, logp)
            tops.append(top)
        return {
            "tokens": [self._token_texts.of(token.id) for token, _ in scored],
            "token_logprobs": [token.logp for token, _ in scored],
            "top_logprobs": tops,
            "text_offset": [offset for _, offset in scored],
        }


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
