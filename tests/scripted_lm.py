"""A model of lm_eval's that answers by functions: what a suite scores is known beforehand."""

from collections.abc import Callable
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM


class ScriptedLM(LM):
    """`answer` continues the prompt of a request, `score` is its log-likelihood.

    `asked` are all requests for an answer.
    """

    def __init__(
        self,
        answer: Callable[[Instance], str] | None = None,
        score: Callable[[Instance], float] | None = None,
    ) -> None:
        super().__init__()
        self.answer, self.score = answer, score
        self.asked: list[Instance] = []

    def generate_until(self, requests: list[Instance], **_: Any) -> list[str]:
        assert self.answer is not None, "nothing is generated here"
        self.asked += requests
        return [self.answer(request) for request in requests]

    def loglikelihood(self, requests: list[Instance], **_: Any) -> list[tuple[float, bool]]:
        return [(score, score > -5) for score in self.loglikelihood_rolling(requests)]

    def loglikelihood_rolling(self, requests: list[Instance], **_: Any) -> list[float]:
        assert self.score is not None, "nothing is scored here"
        return [self.score(request) for request in requests]
