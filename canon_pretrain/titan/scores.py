"""Scores of a synthetic task while training: those of `python -m eval run --suite playground`.

All ranks ask the same questions about the same windows: a sharded model must answer them together.
"""

from itertools import accumulate, pairwise

import torch
from torch.distributed.fsdp import FSDPModule

from canon_pretrain.core.errors import UserError
from canon_pretrain.model.args import num_parameters
from canon_pretrain.model.decode import generate, sample_generator
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.synthetic.evaluation import END, mean_scores, window_questions
from canon_pretrain.synthetic.task import Task


class TaskScores:
    """The questions of `num_windows` windows of each of the task's evaluations."""

    def __init__(self, task: Task, num_windows: int) -> None:
        self._windows = window_questions(task, num_windows)
        self._spans = [window.task.spans(window.ids) for window in self._windows]

    def measure(self, model: Transformer) -> dict[str, float]:
        """Return the scores by name, none of a model that has diverged; collective."""
        try:
            # compiled layers would be compiled again for every shape
            with torch.compiler.set_stance("force_eager"):
                answers, logs = self._answers(model), self._log_likelihoods(model)
        except UserError as error:
            if error.code != "generate.logits_not_finite":
                raise
            return {}
        finally:
            reshard(model)
        size = num_parameters(model.args)
        given = zip(self._windows, answers, self._spans, logs, strict=True)
        return mean_scores([window.score(a, spans, b, size)[0] for window, a, spans, b in given])

    def _answers(self, model: Transformer) -> list[list[list[int]]]:
        asked = [
            (item, number, window, question)
            for item, window in enumerate(self._windows)
            for number, question in enumerate(window.questions)
        ]
        temperature = self._windows[0].task.temperature
        answers = generate(
            model,
            [question.prompt for *_, question in asked],
            max_new_tokens=[window.limit(question) for *_, window, question in asked],
            eos_id=END,
            stop=lambda i, tokens: asked[i][2].task.is_complete(tokens),
            temperature=temperature,
            generator=[sample_generator(*each[:2]) for each in asked] if temperature else None,
        )
        ends = accumulate((len(window.questions) for window in self._windows), initial=0)
        return [answers[start:end] for start, end in pairwise(ends)]

    @torch.no_grad()
    def _log_likelihoods(self, model: Transformer) -> list[list[float]]:
        """Return the log-likelihood of each span of each window, in float32."""
        found: list[list[float]] = []
        for window, spans in zip(self._windows, self._spans, strict=True):
            if not spans:
                found.append([])
                continue
            device = model.tok_embeddings.weight.device
            logs_TV = model(torch.from_numpy(window.ids)[None].to(device))[0].float()
            logs_TV = logs_TV.log_softmax(-1).double().cpu()
            places = [span.start - 1 + k for span in spans for k in range(len(span.tokens))]
            tokens = [token for span in spans for token in span.tokens]
            owners = [i for i, span in enumerate(spans) for _ in span.tokens]
            sums = torch.zeros(len(spans), dtype=torch.float64)
            found.append(sums.index_add_(0, torch.tensor(owners), logs_TV[places, tokens]).tolist())
        return found


def reshard(model: torch.nn.Module) -> None:
    """Free what FSDP gathered: after a forward pass, the last unit waits for a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
