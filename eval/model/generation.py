"""Questions that are answered in words: what one asks for, and the greedy answers to a batch.

Between lm.py, which makes questions of generate_until requests and shares their batches out, and
model/decode.py. Tokens become text here, and an answer ends here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

from canon_pretrain.core.errors import UserError
from canon_pretrain.model.decode import generate
from canon_pretrain.model.transformer import Transformer

DEFAULT_GEN_TOKENS = 256
GENERATION_OPTIONS = {"until", "max_gen_toks", "do_sample", "temperature", "num_beams"}
UNFINISHED = "\ufffd"
"""What a decoder makes of the first bytes of a character."""


class TextTokenizer(Protocol):
    """What lm.py needs of a tokenizer; `encode` adds neither BOS nor EOS."""

    vocab_size: int
    eos_id: int

    def encode(self, text: str) -> Iterable[int]: ...

    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True)
class Question:
    """What to continue, and where to end."""

    context: tuple[int, ...]
    until: tuple[str, ...]
    max_tokens: int


def new_tokens(options: dict[str, Any]) -> int:
    """How many tokens a request's options ask for at most."""
    return normalize_gen_kwargs(options, DEFAULT_GEN_TOKENS)["max_gen_toks"]


def question(tokens: Sequence[int], options: dict[str, Any], max_length: int) -> Question:
    """The question of a prompt, whose beginning goes where it and its answer do not fit.

    Raises UserError for what is no greedy decoding, and an answer that leaves no room for a prompt.
    """
    options = dict(normalize_gen_kwargs(options, DEFAULT_GEN_TOKENS))
    unknown = options.keys() - GENERATION_OPTIONS
    sampled = options.get("do_sample") or options.get("temperature", 0.0) > 0
    if sampled or options.get("num_beams", 1) != 1 or unknown:
        raise UserError(
            f"generation options {options}: only greedy decoding is supported (until, max_gen_toks)"
        )
    room = max_length - options["max_gen_toks"]
    if room < 1:
        raise UserError(
            f"max_gen_toks = {options['max_gen_toks']} leaves no room for a prompt: max_length "
            f"is {max_length}; raise it with --max_length, or generate less"
        )
    until = tuple(stop for stop in options["until"] if stop)
    return Question(tuple(tokens[-room:]), until, options["max_gen_toks"])


class Writer:
    """Answers questions with `model`, in the words of `text`."""

    def __init__(self, model: Transformer, text: TextTokenizer) -> None:
        self._model, self._text = model, text
        self._pieces: dict[int, str] = {}

    def answers(
        self, questions: Sequence[Question], batch_tokens: int, read_tokens: int | None
    ) -> list[str]:
        """The answer to each, cut before the first of its `until`; tokens as for `generate`."""

        def is_answered(index: int, tokens: list[int]) -> bool:
            until = questions[index].until
            if not any(self._may_end(tokens[-1], stop) for stop in until):
                return False
            text = self._written(questions[index], tokens)
            return any(stop in text for stop in until)

        answers = generate(
            self._model,
            [question.context for question in questions],
            max_new_tokens=[question.max_tokens for question in questions],
            eos_id=self._text.eos_id,
            stop=is_answered,
            batch_tokens=batch_tokens,
            read_tokens=read_tokens,
        )
        return [
            postprocess_generated_text(self._written(question, tokens), list(question.until), None)
            for question, tokens in zip(questions, answers, strict=True)
        ]

    def _may_end(self, token: int, stop: str) -> bool:
        """Whether `stop` can end in `token`: to decode an answer at every token takes long."""
        piece = self._pieces.get(token)
        if piece is None:
            # after another one: the first word of a text may lose its space
            piece = self._pieces[token] = self._after([token], [token])
        return not piece or UNFINISHED in piece or stop[-1] in piece

    def _written(self, question: Question, tokens: list[int]) -> str:
        """The text of new `tokens` as it continues the context.

        Decoded after the context's last token: SentencePiece drops the space before a text's first
        word, and there it is no first word.
        """
        return self._after(list(question.context[-1:]), tokens)

    def _after(self, last: list[int], tokens: list[int]) -> str:
        return self._text.decode(last + tokens)[len(self._text.decode(last)) :]
