"""The test of a claim over a grid, on the runs of a board as they are. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from canon_pretrain.boards.claims import ClaimCell
from canon_pretrain.boards.results import Metric, Result, ShownRate, finite_scores
from canon_pretrain.stats.claims import Claim
from canon_pretrain.stats.grid import GridCell, GridGain, grid_gain


@dataclass(frozen=True)
class GridTest:
    """A claim over a grid as it is: tested, or not for want of the scores of `missing` runs.

    `has_diverged`: no run is missing, but one has diverged and has no score that would count.
    """

    gain: GridGain | None = None
    missing: Sequence[str] = ()
    has_diverged: bool = False


def check_grid(
    claim: Claim,
    cells: Sequence[ClaimCell],
    chosen: Mapping[tuple[str, str], ShownRate],
    metrics: Mapping[str, Metric],
) -> GridTest:
    """Test a claim if all runs of its cells are over and have scores."""
    missing = []
    has_diverged = False
    for cell in cells:
        for arm in (cell.better, cell.worse):
            choice = chosen[cell.task, arm]
            missing += missing_runs(choice)
            has_diverged |= any(result.has_no_worst_score for result in choice.shown)
    if missing or has_diverged:
        return GridTest(missing=[*dict.fromkeys(missing)], has_diverged=not missing)

    grid = []
    for cell in cells:
        sign = -1 if metrics[cell.task].lower_is_better else 1
        better = chosen[cell.task, cell.better]
        worse = chosen[cell.task, cell.worse]
        better_scores = _scores_by_seed(better.shown, sign)
        worse_scores = _scores_by_seed(worse.shown, sign)
        gains = [better_scores[seed] - worse_scores[seed] for seed in better_scores]
        grid.append(GridCell(gains, _rate_means(better, sign), _rate_means(worse, sign)))
    are_shares = all(metrics[cell.task].items is not None for cell in cells)
    return GridTest(grid_gain(grid, margin=claim.margin, are_shares=are_shares))


def missing_runs(choice: ShownRate) -> list[str]:
    """Return the runs of a cell that keep it from being tested, but for diverged ones."""
    waiting = [result.run.name for result in choice.runs if not result.is_over]
    failed = []
    for result in choice.shown:
        if result.is_over and result.tested_score is None and not result.has_diverged:
            failed.append(result.run.name)
    return waiting + failed


def _scores_by_seed(shown: Sequence[Result], sign: int) -> dict[int, float]:
    scores = {}
    for result in shown:
        assert result.tested_score is not None
        scores[result.run.seed] = sign * result.tested_score
    return scores


def _rate_means(choice: ShownRate, sign: int) -> list[float]:
    """Return the mean score at each learning rate that has one."""
    return [sign * mean for mean in finite_scores(rate.mean for rate in choice.rates)]
