"""The content of `eval report` and `eval compare` as typed rows; report.json has them by name.

The fields of a row are in the order of the file, documented where the row is made. No torch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from canon_pretrain.report.curves import Chart
from canon_pretrain.run.results import BITS
from canon_pretrain.stats.noise import McNemar, SeedNoise

BETTER, WORSE, WITHIN, NOT_JUDGED = "better", "worse", "within noise", "not judged"
# Within noise or not judged, with both sides at floor, ceiling or chance.
UNINFORMATIVE = "uninformative"
VERDICTS = (BETTER, WORSE, WITHIN, NOT_JUDGED, UNINFORMATIVE)

DECISION_SIZES = {"150M": 150e6, "300M": 300e6, "750M": 750e6}
# Task -> percent of pairs that models of DECISION_SIZES order as models of 1B do.
DECISION_ACCURACY = {
    "arc_challenge": (83, 86, 76),
    "arc_easy": (93, 95, 78),
    "boolq": (48, 56, 70),
    "commonsense_qa": (69, 79, 64),
    "hellaswag": (74, 83, 82),
    "openbookqa": (65, 70, 63),
    "piqa": (74, 71, 57),
    "social_iqa": (55, 76, 66),
    "winogrande": (50, 57, 62),
}


def finite(value: Any) -> Any:
    """Return `value` with None for NaN and infinities in it, in rows too."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **finite(vars(value)))
    return value


# -- comparisons


@dataclass(frozen=True)
class SeedSigma:
    """The standard deviation of one run's score over seeds, as the verdict used it."""

    sigma: float
    df: float
    source: str
    words: str
    scale: str  # "log" for a perplexity, else "metric"

    @classmethod
    def of(cls, seeds: SeedNoise, is_log: bool) -> "SeedSigma":
        scale = "log" if is_log else "metric"
        return cls(
            seeds.sigma,
            seeds.df,
            seeds.source,
            seeds.description,
            scale,
        )


@dataclass(frozen=True)
class Verdict:
    """The difference of two architectures on a task, or on the mean of several, and its test.

    The fields from `ci` on are None without a test, then `why` says why there is none.
    `bits_per_nat` is known for held-out losses of text, which are in nats per token.
    """

    suite: str
    task: str
    metric: str
    higher_is_better: bool
    step: int | None  # None: of losses from elsewhere
    baseline_step: int | None
    value: float
    baseline_value: float
    difference: float
    num_items: int
    num_clusters: int
    num_runs: Sequence[int]
    asked_differently: Sequence[str]
    mean_of: Sequence[str] | None
    items_ci: Sequence[float] | None
    mcnemar: McNemar | None
    chance: float | None
    uninformative: str | None
    seed_noise: SeedSigma | None
    bits_per_nat: float | None
    architecture: str
    baseline: str
    ci: Sequence[float] | None = None
    log_difference: float | None = None
    log_ci: Sequence[float] | None = None
    stderr: float | None = None
    stderr_items: float | None = None
    stderr_seeds: float | None = None
    p: float | None = None
    p_holm: float | None = None
    detectable: float | None = None
    seeds_needed: int | None = None
    verdict: str = NOT_JUDGED
    why: str | None = None

    def in_bits(self) -> "Verdict":
        """Return the comparison of held-out losses in bits per byte; any other one as it is."""
        scale = self.bits_per_nat
        if scale is None:
            return self

        scaled: dict[str, Any] = {}
        for name in LOSS_FIELDS:
            value = getattr(self, name)
            if isinstance(value, Sequence):
                value = [scale * end for end in value]
            elif value is not None:
                value = scale * value
            scaled[name] = value
        if self.seed_noise is not None:
            scaled["seed_noise"] = replace(self.seed_noise, sigma=scale * self.seed_noise.sigma)
        return replace(self, metric=BITS, **scaled)

    def to_json(self) -> dict[str, Any]:
        row = dict(vars(self))
        if self.p is None:  # the order of keys in report.json
            row["verdict"] = row.pop("verdict")
        return row


# The fields of a Verdict that are losses, or intervals of them.
LOSS_FIELDS = (
    "value",
    "baseline_value",
    "difference",
    "detectable",
    "stderr",
    "stderr_items",
    "stderr_seeds",
    "ci",
    "items_ci",
)


@dataclass(frozen=True)
class Refusal:
    """A suite, or a metric of a task of it, that two architectures cannot be compared on."""

    suite: str
    task: str | None
    metric: str | None
    architecture: str
    baseline: str
    why: str

    def sentence(self) -> str:
        return f"{self.suite} {self.task or ''}: {self.why}"


@dataclass(frozen=True)
class Decision:
    """The published decision accuracy of models of `size`, one of DECISION_SIZES."""

    size: str
    source: str

    def accuracy(self, task: str, metric: str) -> float | None:
        """Return the share of decisions that accuracy on a task gets right; None if unknown."""
        if not metric.startswith("acc") or task not in DECISION_ACCURACY:
            return None
        size_index = [*DECISION_SIZES].index(self.size)
        return DECISION_ACCURACY[task][size_index] / 100


class WithDecisions:
    """A comparison that may have a published decision accuracy for its rows."""

    decision: Decision | None

    def decision_accuracy(self, row: "Verdict | TaskScores") -> float | None:
        return self.decision.accuracy(row.task, row.metric) if self.decision else None


@dataclass(frozen=True)
class PairComparison(WithDecisions):
    """The comparison of the runs `b` with those of `a`, the baseline; `family`: tests by suite."""

    a: Sequence[str]
    b: Sequence[str]
    held_out: str | None
    speed: float | None
    family: Mapping[str, int]
    pairs: Sequence[Verdict]
    refused: Sequence[Refusal]
    decision: Decision | None
    notes: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        pairs = [
            row.to_json() | {"decision_accuracy": self.decision_accuracy(row)} for row in self.pairs
        ]
        return vars(self) | {"pairs": pairs}


@dataclass(frozen=True)
class RecipeContent:
    learning_rate: float | None
    runs: Sequence[str]
    loss: float | None
    chosen: bool


@dataclass(frozen=True)
class ArchitectureContent:
    label: str
    settings: Mapping[str, Any]
    recipes: Sequence[RecipeContent]
    runs: Sequence[str]
    choice: str
    step: int | None

    @property
    def drawn_runs(self) -> Sequence[str]:
        """The runs of the chosen learning rate, all if there is none."""
        chosen_runs = (recipe.runs for recipe in self.recipes if recipe.chosen)
        return next(chosen_runs, self.runs)


@dataclass(frozen=True)
class BestScore:
    """The score of an architecture's best run; `bias`: how far the best of n exceeds their mean."""

    value: float
    run: str
    num_runs: int
    bias: float | None


@dataclass(frozen=True)
class MeanScore:
    """The mean score of the runs of the chosen learning rate."""

    value: float
    num_runs: int
    stderr: float | None


@dataclass(frozen=True)
class ArchitectureScore:
    architecture: str
    step: int
    best: BestScore
    chosen: MeanScore | None


@dataclass(frozen=True)
class TaskScores:
    suite: str
    task: str
    metric: str
    suite_step: int
    cells: Sequence[ArchitectureScore]


@dataclass(frozen=True)
class Comparison(WithDecisions):
    """All architectures and their scores, and the verdicts of each against the baseline.

    `steps`: suite -> architecture -> the step that tables show, the baseline first.
    """

    alpha: float
    power: float
    baseline: str
    architectures: Sequence[ArchitectureContent]
    held_out: Sequence[str]
    family: Mapping[str, int]
    pairs: Sequence[Verdict]
    refused: Sequence[Refusal]
    steps: Mapping[str, Mapping[str, int]]
    scores: Sequence[TaskScores]
    decision: Decision | None
    notes: Sequence[str]

    def suite_step(self, suite: str) -> int | None:
        """Return the step of a suite's tables: the baseline's. Cells of other steps are marked."""
        steps = self.steps.get(suite, {})
        return next(iter(steps.values()), None)

    def to_json(self) -> dict[str, Any]:
        pairs = [
            {
                **row.to_json(),
                "suite_step": self.suite_step(row.suite),
                "decision_accuracy": self.decision_accuracy(row),
            }
            for row in self.pairs
        ]
        scores = [
            vars(row) | {"decision_accuracy": self.decision_accuracy(row)} for row in self.scores
        ]
        return vars(self) | {"pairs": pairs, "scores": scores}


# -- scores


@dataclass(frozen=True)
class ScoreCell:
    """One score; one that is not finite is text, such as "NaN". `why`: the reason if it is None."""

    value: float | str | None
    stderr: float | str | None
    bound: float | None
    why: str
    num_samples: int | None
    num_sources: int | None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "why" or value}


@dataclass(frozen=True)
class SuiteColumn:
    run: str
    step: int
    limit: int | None


@dataclass(frozen=True)
class SuiteRow:
    task: str
    metric: str
    primary: bool
    cells: Sequence[ScoreCell | None]


@dataclass(frozen=True)
class SuiteContent:
    suite: str
    suite_step: int
    warnings: Sequence[str]
    columns: Sequence[SuiteColumn]
    rows: Sequence[SuiteRow]

    def by_run(self, row: SuiteRow) -> dict[str, ScoreCell | None]:
        columns = zip(self.columns, row.cells, strict=True)
        return {column.run: cell for column, cell in columns}


@dataclass(frozen=True)
class ScorePoint:
    step: int
    tokens: int | None
    limit: int | None
    cell: ScoreCell

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "tokens": self.tokens,
            "limit": self.limit,
            **self.cell.to_json(),
        }


@dataclass(frozen=True)
class ScoreLine:
    run: str
    points: list[ScorePoint]


@dataclass(frozen=True)
class ScoreCurve:
    suite: str
    task: str
    metric: str
    lines: Sequence[ScoreLine]


# -- curves; None is a gap


@dataclass(frozen=True)
class CurveLine:
    run: str
    logged: int
    values: Sequence[float | None]
    steps: Sequence[int]
    tokens: Sequence[int]
    not_finite: int


@dataclass(frozen=True)
class TrainingCurve(Chart):
    lines: Sequence[CurveLine] = ()


@dataclass(frozen=True)
class RunLine:
    run: str
    tokens: Sequence[float]
    values: Sequence[float | None]


@dataclass(frozen=True)
class SmoothCurve:
    title: str
    form: str
    log_scale: bool
    lines: Sequence[RunLine]


@dataclass(frozen=True)
class HeldOutLine:
    """Mean, minimum and maximum of an architecture's `n` runs at their common steps."""

    label: str
    steps: Sequence[int]
    tokens: Sequence[int | None]
    values: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    n: Sequence[int]
    whole_text: float | None


@dataclass(frozen=True)
class HeldOutCurves:
    source: str
    unit: str
    lines: Sequence[HeldOutLine]
    counted: Mapping[str, float]


@dataclass(frozen=True)
class LengthLine:
    """Mean, minimum and maximum of an architecture's `n` runs; `step` if it differs."""

    label: str
    step: int | None
    values: Sequence[float | None]
    low: Sequence[float | None]
    high: Sequence[float | None]
    n: Sequence[int]


@dataclass(frozen=True)
class LengthPanel:
    series: str
    metric: str
    lengths: Sequence[int]
    chance: float | None
    lines: Sequence[LengthLine]


@dataclass(frozen=True)
class LengthFigure:
    title: str
    unit: str
    limited: Sequence[str]
    panels: Sequence[LengthPanel]


# -- what others published


@dataclass(frozen=True)
class Anchor:
    task: str
    metric: str
    values: Sequence[float]


@dataclass(frozen=True)
class Anchors:
    source: str
    models: Sequence[str]
    rows: Sequence[Anchor]


@dataclass(frozen=True)
class PublishedLine:
    model: str
    family: str
    tokens: Sequence[float]
    values: Sequence[float]


@dataclass(frozen=True)
class PublishedPlot:
    task: str
    metric: str
    own: Sequence[RunLine]
    lines: Sequence[PublishedLine]


@dataclass(frozen=True)
class PublishedModel:
    """A model's values by task: at `tokens`, and at the end of its training."""

    name: str
    size: str
    tokens: float
    values: Sequence[Sequence[float] | None]


@dataclass(frozen=True)
class PublishedCurves:
    source: str
    pages_sha256: Mapping[str, str]
    families: Sequence[str]
    tasks: Sequence[tuple[str, str]]
    plots: Sequence[PublishedPlot]
    models: Sequence[PublishedModel]


# -- runs


@dataclass(frozen=True)
class RunContent:
    label: str
    state: str
    failure: str | None
    step: int
    total_steps: int | None
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Setting:
    setting: str
    values: Sequence[Any]


@dataclass(frozen=True)
class SampleText:
    text: str | None  # None: logits were not finite


@dataclass(frozen=True)
class SampleRow:
    step: int
    cells: Sequence[SampleText | None]


@dataclass(frozen=True)
class Samples:
    """Texts after one prompt, a row per shown step of the `sampled` ones."""

    prompt: str
    sampled: int
    rows: Sequence[SampleRow]


@dataclass(frozen=True)
class ReportContent:
    """All that `eval report` shows; report.json is this."""

    version: int
    title: str
    warnings: list[str]
    comparison: Comparison
    anchors: Anchors | None
    published: PublishedCurves | None
    held_out: HeldOutCurves | None
    score_curves: Sequence[ScoreCurve]
    lengths: Sequence[LengthFigure]
    runs: Sequence[RunContent]
    differing_settings: Sequence[Setting]
    curves: Sequence[TrainingCurve]
    late_loss: Sequence[SmoothCurve]
    samples: Sequence[Samples]
    suites: Sequence[SuiteContent]
    without_evaluations: Sequence[str]
