"""The models of a board's arms: their parameters, and which of one size are not equally large.

No torch, unless a mixer is the user's own.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from canon_pretrain.boards.board import Settings
from canon_pretrain.boards.claims import size_of
from canon_pretrain.cluster.planned import num_steps, planned_model
from canon_pretrain.core.errors import UserError
from canon_pretrain.model.counts import flops_per_token, num_parameters

EQUAL = 0.03
"""Most by which the parameters of models of one size may differ without a word."""


@dataclass(frozen=True)
class PlannedModel:
    """The model of an arm on a task, and how long it trains."""

    mixers: tuple[str, ...]
    num_layers: int
    parameters: int
    flops_per_token: int
    steps: int
    tokens_per_step: int


def planned_models(
    values: Mapping[tuple[str, str], Settings],
) -> dict[tuple[str, str], PlannedModel]:
    """Return the models by task/difficulty and arm, without those that cannot be counted.

    `values`: of their configs.
    """
    models = {}
    for place, config in values.items():
        with suppress(UserError):  # a mixer of the user's own that does not run yet
            models[place] = _planned_model(config)
    return models


def _planned_model(values: Settings) -> PlannedModel:
    args = planned_model(values)
    training = values.get("training", {})
    return PlannedModel(
        mixers=tuple(dict.fromkeys(layer.mixer for layer in args.kinds.values())),
        num_layers=args.num_layers,
        parameters=num_parameters(args),
        flops_per_token=flops_per_token(args, args.max_seq_len),
        steps=num_steps(values),
        tokens_per_step=training["global_batch_size"] * args.max_seq_len,
    )


def unequal(parameters: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a sentence per size on arms that differ from the first one of that size.

    `parameters`: by arm, in the board's order, and by task.
    """
    first_of: dict[str, str] = {}
    differing: dict[str, list[str]] = {}
    for arm, counts in parameters.items():
        first = first_of.setdefault(size_of(arm), arm)
        first_counts = parameters[first]

        # Tasks differ in their vocabulary: name the one of the largest difference.
        gaps = {}
        for task in counts:
            if task in first_counts:
                gaps[task] = counts[task] / first_counts[task] - 1
        task = max(gaps, key=lambda task: abs(gaps[task]), default="")
        if gaps and abs(gaps[task]) > EQUAL:
            sizes = f"{_millions(counts[task])} against {_millions(first_counts[task])}"
            differing.setdefault(first, []).append(f"{arm} {100 * gaps[task]:+.1f} % ({sizes})")

    return [
        f"Parameters differ by more than {100 * EQUAL:.0f} % from those of {first}: "
        f"{', '.join(texts)}."
        for first, texts in differing.items()
    ]


def _millions(count: int) -> str:
    if count < 1_000_000:
        return f"{count:,}"
    return f"{count / 1e6:.1f}M"
