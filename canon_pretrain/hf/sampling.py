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
        self._decode = decode
        self.pending = ""
        # The end of the text: its ids, how many of them are context for later ones, and how many
        # characters of what they decode to were returned.
        self._ids: list[int] = []
        self._num_context_ids = 0
        self._num_returned = 0

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that `ids` complete."""
        self._ids += ids
        text = self._decode(self._ids)

        # an incomplete UTF-8 sequence decodes to replacement characters
        complete_end = max(self._num_returned, len(text.rstrip("\ufffd")))
        new = text[self._num_returned : complete_end]
        self.pending = text[complete_end:]
        self._num_returned = complete_end

        # Next time decode from the ids that were new now; not if they are only spaces, because a
        # tokenizer may drop the first spaces of what it decodes.
        if not self.pending:
            if new.strip():
                self._ids = self._ids[self._num_context_ids :]
                self._num_returned = len(self._decode(self._ids))
            self._num_context_ids = len(self._ids)
        return new

    def flush(self) -> str:
        """Return `pending`, which is then as complete as it gets."""
        new = self.pending
        self.pending = ""
        self._num_returned += len(new)
        return new


class Continuation:
    """Tokens after a prompt, `ids`, up to EOS or the end of a task's answer; and their text.

    `prompt_texts`: the text of the prompt, or with `splits_prompt` what each of its tokens adds.
    `has_ended`: the last token was EOS, which `ids` lacks.
    """

    def __init__(
        self, sampler: "Sampler", prompt: Sequence[int], *, splits_prompt: bool = False
    ) -> None:
        self.prompt = list(prompt)
        self.ids: list[int] = []
        self.has_ended = False
        self._sampler = sampler
        self._num_decoded = 0

        # The prompt goes through the detokenizer too: the text of `ids` starts after its end.
        self._detokenizer = Detokenizer(sampler.decode)
        parts = [[token] for token in self.prompt] if splits_prompt else [self.prompt]
        self.prompt_texts = [self._detokenizer.add(part) for part in parts]
        self.prompt_texts[-1] += self._detokenizer.flush()

    def append(self, token: int) -> None:
        """Append a token, unless it is EOS."""
        self.has_ended = token == self._sampler.tokenizer.eos_id
        if not self.has_ended:
            self.ids.append(token)

    @property
    def is_complete(self) -> bool:
        """Whether no token may follow: after EOS, or once the task has its answer."""
        task = self._sampler.task
        return self.has_ended or (task is not None and task.is_complete(self.ids))

    def decode_new(self, *, is_last: bool) -> str:
        """Return the text of `ids` that was not returned before.

        Without characters that later tokens may change, unless `is_last`.
        """
        new = self._detokenizer.add(self.ids[self._num_decoded :])
        self._num_decoded = len(self.ids)
        if is_last:
            new += self._detokenizer.flush()
        return new


class Answer(Continuation):
    """What was sampled after `prompt` so far: `ids` and the model's log-probabilities `logps`.

    `is_done`: no more tokens will come.
    """

    def __init__(self, sampler: "Sampler", prompt: Sequence[int], limit: int) -> None:
        super().__init__(sampler, prompt)
        self.limit = limit
        self.logps: list[float] = []
        self.is_done = False

    def add(self, token: int, logp: float) -> None:
        """Append a token and its log-probability, unless it is EOS."""
        self.append(token)
        if not self.has_ended:
            self.logps.append(logp)

    @property
    def text(self) -> str:
        """The text after the prompt's; decoded with it, for SentencePiece drops a first space."""
        text = self._sampler.decode([*self.prompt, *self.ids])
        return text[sum(map(len, self.prompt_texts)) :]

    def new_text(self) -> str:
        """Return what was not returned before, without characters that later tokens may change."""
        return self.decode_new(is_last=self.is_done)


@dataclass(frozen=True)
class Sampler:
    """A loaded checkpoint or export; `task`: what its run was trained on, None for text."""

    checkpoint: Path
    model: Transformer
    tokenizer: Tokenizer
    task: Task | None

    @classmethod
    def load(cls, path: Path, dtype: str = "auto", tokenizer_path: Path | None = None) -> Self:
        """Load onto the GPU if there is one; `tokenizer_path` replaces the run's tokenizer.

        `path` is a run, a checkpoint or an export. Raises UserError.
        """
        check_cuda()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

        # The checkpoint, what it was trained on, and its tokenizer.
        checkpoint, run = locate(path)
        task = None
        if run is not None:
            check_checkpoint(checkpoint)
            task = task_of_run(run.read_config()["identity"])
        tokenizer = find_tokenizer(checkpoint, run, tokenizer_path)
        model = load_model(checkpoint, device, dtype=dtype_for(dtype, device), run=run)

        # Ids beyond the model's embedding could not be read.
        if tokenizer.vocab_size > model.args.vocab_size:
            if tokenizer_path:
                way_out = "leave out --tokenizer"
            else:
                way_out = "name that of training: --tokenizer"
            raise UserError(
                "sample.vocab_size",
                f"the tokenizer {tokenizer_path or f'in {checkpoint}'} has {tokenizer.vocab_size} "
                f"tokens, the model {model.args.vocab_size}: {way_out}",
            )
        return cls(checkpoint, model, tokenizer, task)

    @property
    def device(self) -> torch.device:
        return self.model.tok_embeddings.weight.device

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

        ids: list[int] = self.tokenizer.encode(text).tolist()
        if not self.has_ids:
            return [self.tokenizer.eos_id, *ids]
        if not ids:
            raise UserError(
                "sample.no_ids",
                f"{self.checkpoint} knows ids, no words: pass some, as in --prompt '12 45'"
                " (canon synthetic show prints a task's)",
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; those that pad the model's vocabulary have none."""
        return self.tokenizer.decode([i for i in ids if i < self.tokenizer.vocab_size])

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Return an Answer without tokens; at most as many will come as the model can read."""
        max_seq_len = self.model.args.max_seq_len
        if len(prompt) > max_seq_len:
            raise UserError(
                "sample.prompt_too_long",
                f"a prompt of {len(prompt):,} tokens, more than max_seq_len = {max_seq_len:,}"
                f" of {self.checkpoint}",
                given=len(prompt),
                expected=max_seq_len,
            )
        # the model reads all tokens but the last one
        return Answer(self, prompt, min(max_tokens, max_seq_len + 1 - len(prompt)))

    def extend(
        self,
        answers: Sequence[Answer],
        settings: Settings,
        on_change: Callable[[], None] = lambda: None,
        first_index: int = 0,
    ) -> None:
        """Sample tokens of `answers` together; `on_change` is called after each.

        Answer k depends on its prompt, `settings` and the number `first_index + k` only.
        """

        def on_token(i: int, token: int, logp: float) -> None:
            answers[i].add(token, logp)
            on_change()

        def on_end(i: int) -> None:
            answers[i].is_done = True
            on_change()

        # Each answer has its own random numbers; greedy decoding needs none.
        generators = None
        if settings.temperature:
            indices = range(first_index, first_index + len(answers))
            generators = [sample_generator(settings.seed, index) for index in indices]

        def is_complete(i: int, tokens: list[int]) -> bool:
            return answers[i].is_complete

        generate(
            self.model,
            [answer.prompt for answer in answers],
            max_new_tokens=[answer.limit for answer in answers],
            eos_id=self.tokenizer.eos_id,
            stop=is_complete,
            on_end=on_end,
            on_token=on_token,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            generator=generators,
            vocab_size=self.tokenizer.vocab_size,
        )

    @torch.no_grad()
    def losses(self, ids: Sequence[int]) -> list[float]:
        """Return the nats of each of ids[1:] after all ids before it, from float32 logits."""
        if len(ids) < 2:
            return []
        tokens_T = torch.tensor(ids, device=self.device)
        logits_TV = self.model(tokens_T[None, :-1])[0].float()
        return F.cross_entropy(logits_TV, tokens_T[1:], reduction="none").tolist()

    def loss_sums(self, ids: Sequence[int]) -> dict[int, float]:
        """Return the summed nats of text[:i], for each position i of the text where a token ends.

        A token that ends within a character, or adds none, counts at the next such position.
        """
        # The first id is read, not predicted: it costs nothing.
        text = self.decode(ids)
        detokenizer = Detokenizer(self.decode)
        sums: dict[int, float] = {}
        total_nats = 0.0
        num_complete = 0  # characters that no later token changes
        for token, nats in zip(ids, [0.0, *self.losses(ids)], strict=True):
            total_nats += nats
            complete = detokenizer.add([token])
            decoded = complete + detokenizer.pending
            # false within a character: `pending` is then a replacement character
            if text.startswith(decoded, num_complete):
                sums.setdefault(num_complete + len(decoded), total_nats)
            num_complete += len(complete)

        sums[len(text)] = total_nats
        return sums

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


class Comparison(NamedTuple):
    """Two models' answers to a prompt; segments of the prompt, the first and the second answer."""

    answers: list[Answer]
    segments: list[list[Segment]]


def segments(
    text: str, loss_sums: Sequence[Mapping[int, float]], start: int, stop: int
) -> list[Segment]:
    """Return the smallest segments of text[start:stop] by the `loss_sums` of two models."""
    sums_a, sums_b = loss_sums
    common_ends = sums_a.keys() & sums_b.keys()
    return [
        Segment(text[i:j], (sums_a[j] - sums_a[i], sums_b[j] - sums_b[i]))
        for i, j in pairwise(sorted(end for end in common_ends if start <= end <= stop))
    ]


def compare(
    pair: tuple[Sampler, Sampler],
    prompt: str,
    max_tokens: int,
    settings: Settings,
    note: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Return each model's answer to `prompt`, with the same draws, and the losses under both.

    A model of another tokenizer reads an answer's text in tokens of its own, as many as it can:
    `note` is called with a line if there are more. Of the same tokenizer, answers end where one
    model's context does.
    """
    # With one tokenizer the answers have the same number of tokens at most.
    is_same_tokenizer = pair[0].tokenizer.sha256 == pair[1].tokenizer.sha256
    answers = [sampler.answer(sampler.encode(prompt), max_tokens) for sampler in pair]
    if is_same_tokenizer:
        limit = min(answer.limit for answer in answers)
        for answer in answers:
            answer.limit = limit

    # Each model answers, and both read the text with its answer: loss_sums[k][m] is of the text of
    # model k, as model m reads it.
    texts: list[str] = []
    loss_sums: list[list[dict[int, float]]] = []
    for sampler, answer in zip(pair, answers, strict=True):
        sampler.extend([answer], settings)
        ids = [*answer.prompt, *answer.ids]
        text = sampler.decode(ids)
        texts.append(text)

        reader_sums = []
        for reader in pair:
            reader_ids: Sequence[int] = ids
            if reader is not sampler and not is_same_tokenizer:
                reader_ids = reader.encode(text)
            readable_ids = reader.cut(reader_ids)
            if len(readable_ids) < len(reader_ids):
                note(
                    f"[a text has {len(reader_ids):,} tokens of {reader.checkpoint}: "
                    f"it reads the first {len(readable_ids):,}, losses end there]"
                )
            reader_sums.append(reader.loss_sums(readable_ids))
        loss_sums.append(reader_sums)

    # The prompt's losses are those of each model's own text: in the text with the other's answer,
    # the last token of the prompt may reach into that answer.
    prompt_sums = (loss_sums[0][0], loss_sums[1][1])
    prompt_end = len(pair[0].decode(answers[0].prompt))
    return Comparison(
        answers,
        [
            segments(texts[0], prompt_sums, 0, prompt_end),
            segments(texts[0], loss_sums[0], prompt_end, len(texts[0])),
            segments(texts[1], loss_sums[1], prompt_end, len(texts[1])),
        ],
    )
