"""Stand-ins for models (scripted, or with limited memory) and tokenizers, and requests."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from canon_pretrain.model.transformer import Transformer


class ScriptedLM(LM):
    """`answer` continues a request's prompt, `score` is its log-likelihood; see `asked`."""

    def __init__(
        self,
        answer: Callable[[Instance], str] | None = None,
        score: Callable[[Instance], float] | None = None,
    ) -> None:
        super().__init__()
        self.answer, self.score = answer, score
        self.asked: list[Instance] = []
        self.truncated: set[int] = set()
        self.failures: dict[int, str] = {}

    def generate_until(self, requests: list[Instance], **_: Any) -> list[str]:
        assert self.answer is not None
        self.asked += requests
        return [self.answer(request) for request in requests]

    def loglikelihood(self, requests: list[Instance], **_: Any) -> list[tuple[float, bool]]:
        return [(score, score > -5) for score in self.loglikelihood_rolling(requests)]

    def loglikelihood_rolling(self, requests: list[Instance], **_: Any) -> list[float]:
        assert self.score is not None
        return [self.score(request) for request in requests]


class Bytes:
    """One token per byte, EOS last: a character may be cut in two."""

    vocab_size, eos_id = 257, 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class LimitedMemory(torch.nn.Module):
    """A model out of memory with more than `most` tokens in a pass and its cache."""

    def __init__(self, model: Transformer, most: int) -> None:
        super().__init__()
        self.inner, self.most, self.refused = model, most, 0
        self.args, self.tok_embeddings = model.args, model.tok_embeddings

    def forward(self, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
        cache = options.get("cache")
        if tokens.numel() + tokens.shape[0] * (cache.length if cache else 0) > self.most:
            self.refused += 1
            raise torch.OutOfMemoryError("made up")
        return self.inner(tokens, **options)


class Letters:
    """One token per character."""

    vocab_size, eos_id = 40, 2

    def encode(self, text: str) -> list[int]:
        return [3 + (ord(letter) - ord("a")) % 37 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i - 3 + ord("a")) for i in ids if i > 2)


def requests(kind: str, arguments: list[Any]) -> list[Instance]:
    return [Instance(kind, {}, given, index) for index, given in enumerate(arguments)]
