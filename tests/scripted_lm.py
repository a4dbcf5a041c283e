"""A model of lm_eval's that answers by functions, a tokenizer of letters, and requests for both."""

from collections.abc import Callable
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM


class ScriptedLM(LM):
    """`answer` continues the prompt of a request in `asked`, `score` is its log-likelihood."""

    def __init__(
        self,
        answer: Callable[[Instance], str] | None = None,
        score: Callable[[Instance], float] | None = None,
    ) -> None:
        super().__init__()
        self.answer, self.score = answer, score
        self.asked: list[Instance] = []
        self.truncated: set[int] = set()

    def generate_until(self, requests: list[Instance], **_: Any) -> list[str]:
        assert self.answer is not None
        self.asked += requests
        return [self.answer(request) for request in requests]

    def loglikelihood(self, requests: list[Instance], **_: Any) -> list[tuple[float, bool]]:
        return [(score, score > -5) for score in self.loglikelihood_rolling(requests)]

    def loglikelihood_rolling(self, requests: list[Instance], **_: Any) -> list[float]:
        assert self.score is not None
        return [self.score(request) for request in requests]


class Letters:
    """One token a character: text whose tokens a test can count."""

    vocab_size, eos_id = 40, 2

    def encode(self, text: str) -> list[int]:
        return [3 + (ord(letter) - ord("a")) % 37 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i - 3 + ord("a")) for i in ids if i > 2)


def requests(kind: str, arguments: list[Any]) -> list[Instance]:
    return [Instance(kind, {}, given, index) for index, given in enumerate(arguments)]
