"""Published scores of models of 1.3B parameters, to see whether ours are of a sane size.

They stand beside our tables where a reader asks for them, and are part of no verdict: other code,
tokenizer and data order made them. No torch.
"""

from collections.abc import Iterable
from typing import Any

SOURCE = (
    "Published: Gated DeltaNet paper, models of 1.3B parameters trained on 100B tokens of "
    "FineWeb-Edu. Another tokenizer, another order of the data: for orientation, part of no "
    "verdict."
)

MODELS = ("Transformer++", "Mamba2", "Gated DeltaNet")

# (task, metric): the scores of MODELS; accuracies in percent, as published
PUBLISHED = {
    ("wikitext", "word_perplexity"): (18.53, 16.56, 16.42),
    ("lambada_openai", "perplexity"): (18.32, 12.56, 12.17),
    ("lambada_openai", "acc"): (42.60, 45.66, 46.65),
    ("piqa", "acc"): (70.02, 71.87, 72.25),
    ("hellaswag", "acc_norm"): (50.23, 55.67, 55.76),
    ("winogrande", "acc"): (53.51, 55.24, 57.45),
    ("arc_easy", "acc"): (68.83, 72.47, 71.21),
    ("arc_challenge", "acc_norm"): (35.10, 37.88, 38.39),
    ("social_iqa", "acc"): (40.66, 40.20, 40.63),
    ("boolq", "acc"): (57.09, 60.13, 60.24),
}


def anchors(shown: Iterable[tuple[str, str]]) -> dict[str, Any] | None:
    """Source, models and rows for the (task, metric) pairs that are shown; None without any.

    Accuracies are fractions, as ours are.
    """
    rows = [
        {"task": task, "metric": metric, "values": _fractions(metric, PUBLISHED[task, metric])}
        for task, metric in dict.fromkeys(shown)
        if (task, metric) in PUBLISHED
    ]
    return {"source": SOURCE, "models": list(MODELS), "rows": rows} if rows else None


def _fractions(metric: str, values: tuple[float, ...]) -> list[float]:
    percent = metric.startswith("acc")
    return [round(value / 100, 6) if percent else value for value in values]
