"""Scores of a synthetic task while training: those of `canon eval run --suite playground`.

All ranks ask the same questions about the same windows: a sharded model must answer them together.
"""

from itertools import chain

import torch

from canon_pretrain.core.errors import UserError
from canon_pretrain.machine.device import to_device
from canon_pretrain.model.counts import num_parameters
from canon_pretrain.model.decode import generate, sample_generator
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.synthetic.evaluation import (
    END,
    EvaluationWindow,
    PooledScore,
    evaluation_windows,
    metrics,
    pooled_scores,
    score_window,
)
from canon_pretrain.synthetic.task import Question, Task
from canon_pretrain.titan.parallelize import reshard


class TaskScores:
    """Scores of a task's questions and spans, in `num_windows` windows of each of its settings."""

    def __init__(self, task: Task, num_windows: int) -> None:
        self._windows = evaluation_windows(task, num_windows)
        self._names = [*metrics(task)]
        self._temperature = task.temperature
        self._vocab_size = task.vocab_size

    def measure(self, model: Transformer) -> dict[str, PooledScore]:
        """Return the scores by name, the main one first, none of a model that has diverged.

        Collective.
        """
        try:
            # compiled layers would be compiled again for every shape
            with torch.compiler.set_stance("force_eager"):
                answers = iter(self._answers(model))
                log_likelihoods = iter(self._log_likelihoods(model))
        except UserError as error:
            if error.code != "generate.logits_not_finite":
                raise
            return {}
        finally:
            reshard(model)

        # each window takes its answers and log-likelihoods from the iterators
        size = num_parameters(model.args)
        scores = pooled_scores(
            score_window(window, answers, log_likelihoods, size)[0] for window in self._windows
        )
        return {name: scores[name] for name in self._names if name in scores}

    def _answers(self, model: Transformer) -> list[list[int]]:
        """Return the answers to all questions, in the order of the windows.

        What is drawn depends on the window and the question's number in it.
        """
        questions: list[tuple[EvaluationWindow, Question]] = []
        numbers: list[tuple[int, int]] = []  # seeds of a question's generator
        for window_index, window in enumerate(self._windows):
            for setting in window:
                questions += [(setting, question) for question in setting.questions]
            num_in_window = len(questions) - len(numbers)
            numbers += [(window_index, k) for k in range(num_in_window)]

        generators = [sample_generator(*pair) for pair in numbers] if self._temperature else None
        return generate(
            model,
            [question.prompt for _, question in questions],
            max_new_tokens=[setting.limit(question) for setting, question in questions],
            eos_id=END,
            stop=lambda i, tokens: questions[i][0].task.is_complete(tokens),
            temperature=self._temperature,
            generator=generators,
            vocab_size=self._vocab_size,
        )

    @torch.no_grad()
    def _log_likelihoods(self, model: Transformer) -> list[float]:
        """Return the log-likelihood of each span, from float32 logits."""
        log_likelihoods: list[float] = []
        device = model.tok_embeddings.weight.device
        for setting in chain.from_iterable(self._windows):
            if not setting.spans:
                continue
            ids_BT = torch.from_numpy(setting.ids)[None]
            logits_TV = model(to_device(ids_BT, device))[0]
            logs_TV = logits_TV.float().log_softmax(-1).double().cpu().numpy()
            for start, tokens in setting.spans:
                # the logits at t predict token t + 1
                tokens_at = enumerate(tokens, start)
                token_logs = (logs_TV[position - 1, token] for position, token in tokens_at)
                log_likelihoods.append(float(sum(token_logs)))
        return log_likelihoods
