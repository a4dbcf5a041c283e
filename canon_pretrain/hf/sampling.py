"""Samples of a checkpoint or an export: text that can be shown as tokens come, and losses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F

from canon_pretrain.checkpoint.weights import check_checkpoint
from canon_pretrain.core.errors import UserError
from canon_pretrain.data.id_tokenizer import is_id_tokenizer
from canon_pretrain.data.tokenizer import Tokenizer
from canon_pretrain.hf.loading import dtype_for, find_tokenizer, load_model, locate
from canon_pretrain.machine.device import check_cuda
from canon_pretrain.model.decode import generate, sample_generator
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.synthetic.evaluation import task_of_run
from canon_pretrain.synthetic.task import Task


class Settings(NamedTuple):
    """How tokens are drawn; see `decode.generate`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class Detokenizer:
    """Decodes ids as they come, each time from a few tokens before the new ones.

    `pending`: the end of the text that later ids may change.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode, self.pending = decode, ""
        self._ids: list[int] = []  # of the text's end
        self._settled = self._returned = 0  # of these ids, and characters of their text

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that `ids` complete."""
        self._ids += ids
        text = self._decode(self._ids)
        # an incomplete UTF-8 sequence decodes to replacement characters
        stable = max(self._returned, len(text.rstrip("\ufffd")))
        new, self.pending = text[self._returned : stable], text[stable:]
        self._returned = stable
        if not self.pending:
            if new.strip():  # a tokenizer may drop the first spaces of what it decodes
                self._ids = self._ids[self._settled :]
                self._returned = len(self._decode(self._ids))
            self._settled = len(self._ids)
        return new

    def flush(self) -> str:
        """Return `pending`, which is then as complete as it gets."""
        new, self.pending = self.pending, ""
        self._returned += len(new)
        return new


class Answer:
    """What was sampled after `prompt` so far: `ids` and the model's log-probabilities `logps`.

    `has_ended`: the last token was EOS, which `ids` lacks. `is_done`: no more tokens will come.
    """

    def __init__(self, sampler: "Sampler", prompt: Sequence[int], limit: int) -> None:
        self.prompt, self.limit, self._sampler = list(prompt), limit, sampler
        self.ids: list[int] = []
        self.logps: list[float] = []
        self.has_ended = self.is_done = False
        self._detokenizer, self._num_returned = Detokenizer(sampler.decode), 0
        self._start = len(self._detokenizer.add(self.prompt) + self._detokenizer.flush())

    def add(self, token: int, logp: float) -> None:
        """Append a token, unless it is EOS."""
        self.has_ended = token == self._sampler.tokenizer.eos_id
        if not self.has_ended:
            self.ids.append(token)
            self.logps.append(logp)

    @property
    def text(self) -> str:
        """The text after the prompt's; decoded with it, for SentencePiece drops a first space."""
        return self._sampler.decode([*self.prompt, *self.ids])[self._start :]

    def new_text(self) -> str:
        """Return what was not returned before, without characters that later tokens may change."""
        new = self._detokenizer.add(self.ids[self._num_returned :])
        self._num_returned = len(self.ids)
        return new + (self._detokenizer.flush() if self.is_done else "")


@dataclass(frozen=True)
class Sampler:
    """A loaded checkpoint or export; `task`: what its run was trained on, None for text."""

    checkpoint: Path
    model: Transformer
    tokenizer: Tokenizer
    task: Task | None

    @classmethod
    def load(cls, given: Path, dtype: str = "auto", tokenizer: Path | None = None) -> Self:
        """Load onto the GPU if there is one; `tokenizer` replaces the run's. Raises UserError."""
        check_cuda()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        checkpoint, run = locate(given)
        if run is not None:
            check_checkpoint(checkpoint)
        found = find_tokenizer(checkpoint, run, tokenizer)
        task = None if run is None else task_of_run(run.read_config()["identity"])
        model = load_model(checkpoint, device, dtype=dtype_for(dtype, device), run=run)
        if found.vocab_size > model.args.vocab_size:
            sizes = f"{found.vocab_size} tokens, the model {model.args.vocab_size}"
            way_out = "leave out --tokenizer" if tokenizer else "name that of training: --tokenizer"
            raise UserError(
                "sample.vocab_size",
                f"the tokenizer {tokenizer or 'in ' + str(checkpoint)} has {sizes}: {way_out}",
            )
        return cls(checkpoint, model, found, task)

    @property
    def has_ids(self) -> bool:
        """Whether texts are ids, such as "12 45"."""
        return is_id_tokenizer(self.tokenizer.model)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text that starts a document: EOS first, unless texts are ids."""
        try:
            text.encode()
        except UnicodeEncodeError as error:  # such as a byte of the command line
            raise UserError(
                "sample.not_utf8",
                f"the text is not UTF-8: see character {error.start + 1:,}",
                character=error.start + 1,
            ) from None
        found: list[int] = self.tokenizer.encode(text).tolist()
        if self.has_ids and not found:
            raise UserError(
                "sample.no_ids",
                f"{self.checkpoint} knows ids, no words: give some, as in --prompt '12 45'"
                " (canon synthetic show prints a task's)",
            )
        return found if self.has_ids else [self.tokenizer.eos_id, *found]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; those that pad the model's vocabulary have none."""
        return self.tokenizer.decode([i for i in ids if i < self.tokenizer.vocab_size])

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Return an Answer without tokens; at most as many will come as the model can read."""
        longest = self.model.args.max_seq_len
        if len(prompt) > longest:
            raise UserError(
                "sample.prompt_too_long",
                f"a prompt of {len(prompt):,} tokens, more than max_seq_len = {longest:,}"
                f" of {self.checkpoint}",
                given=len(prompt),
                expected=longest,
            )
        # the last token is not read
        return Answer(self, prompt, min(max_tokens, longest + 1 - len(prompt)))

    def extend(
        self,
        answers: Sequence[Answer],
        settings: Settings,
        on_change: Callable[[], None] = lambda: None,
        first: int = 0,
    ) -> None:
        """Sample tokens of `answers` together; `on_change` is called after each.

        Answer k depends on its prompt, `settings` and the number `first + k` only.
        """

        def on_token(i: int, token: int, logp: float) -> None:
            answers[i].add(token, logp)
            on_change()

        def on_end(i: int) -> None:
            answers[i].is_done = True
            on_change()

        task, (temperature, top_k, top_p, seed) = self.task, settings
        generate(
            self.model,
            [answer.prompt for answer in answers],
            max_new_tokens=[answer.limit for answer in answers],
            eos_id=self.tokenizer.eos_id,
            stop=None if task is None else lambda i, tokens: task.is_complete(tokens),
            on_end=on_end,
            on_token=on_token,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            generator=[sample_generator(seed, first + k) for k in range(len(answers))]
            if temperature
            else None,
            vocab_size=self.tokenizer.vocab_size,
        )

    @torch.no_grad()
    def losses(self, ids: Sequence[int]) -> list[float]:
        """Return the nats of ids[1:], each given all before it, from float32 logits."""
        if len(ids) < 2:
            return []
        tokens_T = torch.tensor(ids, device=self.model.tok_embeddings.weight.device)
        logits_TV = self.model(tokens_T[None, :-1])[0].float()
        nats: list[float] = F.cross_entropy(logits_TV, tokens_T[1:], reduction="none").tolist()
        return nats

    def loss_sums(self, ids: Sequence[int]) -> dict[int, float]:
        """Return the summed nats up to each place of the text (in characters) where a token ends.

        A token that ends within a character, or adds none, counts at the next place.
        """
        text, total, place = self.decode(ids), 0.0, 0
        sums: dict[int, float] = {}
        detokenizer = Detokenizer(self.decode)
        for token, nats in zip(ids, [0.0, *self.losses(ids)], strict=True):
            total += nats
            new = detokenizer.add([token])
            if text.startswith(new + detokenizer.pending, place):
                sums.setdefault(place + len(new + detokenizer.pending), total)
            place += len(new)
        return sums | {len(text): total}

    def cut(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the first of `ids`, as many as `losses` can read, up to the end of a character."""
        num_kept = self.model.args.max_seq_len + 1  # the last one is not read
        if num_kept < len(ids):
            while self.decode(ids[:num_kept]).endswith("\ufffd"):
                num_kept -= 1
        return ids[:num_kept]


class Segment(NamedTuple):
    """A part of a text between ends of tokens of both models, and its nats by each."""

    text: str
    nats: tuple[float, float]


def segments(
    text: str, sums: Sequence[Mapping[int, float]], start: int, stop: int
) -> list[Segment]:
    """Return the smallest segments of text[start:stop] by the `loss_sums` of two models."""
    ours, theirs = sums
    places = sorted(p for p in ours.keys() & theirs.keys() if start <= p <= stop)
    return [
        Segment(text[a:b], (ours[b] - ours[a], theirs[b] - theirs[a])) for a, b in pairwise(places)
    ]


def compare(
    pair: tuple[Sampler, Sampler],
    prompt: str,
    max_tokens: int,
    settings: Settings,
    note: Callable[[str], None] = lambda text: None,
) -> tuple[list[Answer], list[list[Segment]]]:
    """Return each model's answer to `prompt`, with the same draws, and the losses under both.

    The segments are those of the prompt, of the first and of the second answer. A model of another
    tokenizer reads an answer's text in tokens of its own, as many as it can: `note` is called with
    a line if there are more. Of the same tokenizer, answers end where one model's context does.
    """
    is_same = pair[0].tokenizer.sha256 == pair[1].tokenizer.sha256
    answers = [one.answer(one.encode(prompt), max_tokens) for one in pair]
    if is_same:
        limit = min(answer.limit for answer in answers)
        answers = [
            one.answer(answer.prompt, limit) for one, answer in zip(pair, answers, strict=True)
        ]
    sums: list[list[dict[int, float]]] = []
    texts: list[str] = []
    for own, answer in zip(pair, answers, strict=True):
        own.extend([answer], settings)
        ids = [*answer.prompt, *answer.ids]
        texts.append(text := own.decode(ids))
        sums.append([])
        for one in pair:
            whole = ids if one is own or is_same else one.encode(text)
            if len(read := one.cut(whole)) < len(whole):
                size = f"{len(whole):,} tokens of {one.checkpoint}"
                note(f"[a text has {size}: it reads the first {len(read):,}, losses end there]")
            sums[-1].append(one.loss_sums(read))
    end = len(pair[0].decode(answers[0].prompt))
    # of the prompt each by itself: with an answer, its last token may reach into that
    parts = [segments(texts[0], (sums[0][0], sums[1][1]), 0, end)]
    parts += [segments(texts[k], sums[k], end, len(texts[k])) for k in (0, 1)]
    return answers, parts
