"""Scores of a synthetic task while training: those of `canon eval run --suite playground`.

All ranks ask the same questions about the same windows: a sharded model must answer them together.
"""

import torch

from canon_pretrain.core.errors import UserError
from canon_pretrain.machine.device import to_device
from canon_pretrain.model.counts import num_parameters
from canon_pretrain.model.decode import generate, sample_generator
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.synthetic.evaluation import (
    END,
    Asked,
    evaluation_windows,
    pooled_scores,
    score_window,
)
from canon_pretrain.synthetic.task import Question, Task
from canon_pretrain.titan.parallelize import reshard


class TaskScores:
    """What is asked about `num_windows` windows of each setting of the task."""

    def __init__(self, task: Task, num_windows: int) -> None:
        self._windows = evaluation_windows(task, num_windows)
        self._temperature, self._vocab_size = task.temperature, task.vocab_size

    def measure(self, model: Transformer) -> dict[str, float]:
        """Return the scores by name, none of a model that has diverged; collective."""
        try:
            # compiled layers would be compiled again for every shape
            with torch.compiler.set_stance("force_eager"):
                answers, logs = iter(self._answers(model)), iter(self._log_likelihoods(model))
        except UserError as error:
            if error.code != "generate.logits_not_finite":
                raise
            return {}
        finally:
            reshard(model)
        size = num_parameters(model.args)
        return pooled_scores(score_window(each, answers, logs, size)[0] for each in self._windows)

    def _answers(self, model: Transformer) -> list[list[int]]:
        asked: list[tuple[Asked, Question]] = []
        samples: list[tuple[int, int]] = []
        for item, window in enumerate(self._windows):
            pairs = [(one, question) for one in window for question in one.questions]
            asked += pairs
            samples += [(item, number) for number in range(len(pairs))]
        return generate(
            model,
            [question.prompt for _, question in asked],
            max_new_tokens=[one.limit(question) for one, question in asked],
            eos_id=END,
            stop=lambda i, tokens: asked[i][0].task.is_complete(tokens),
            temperature=self._temperature,
            generator=[sample_generator(*each) for each in samples] if self._temperature else None,
            vocab_size=self._vocab_size,
        )

    @torch.no_grad()
    def _log_likelihoods(self, model: Transformer) -> list[float]:
        """Return the log-likelihood of each span, from float32 logits."""
        found: list[float] = []
        for one in (one for window in self._windows for one in window if one.spans):
            device = model.tok_embeddings.weight.device
            logits_TV = model(to_device(torch.from_numpy(one.ids)[None], device))[0]
            logs_TV = logits_TV.float().log_softmax(-1).double().cpu().numpy()
            found += [
                float(sum(logs_TV[start - 1 + k, token] for k, token in enumerate(tokens)))
                for start, tokens in one.spans
            ]
        return found
