"""The cells of a claim: one, or a grid of tasks, difficulties and sizes. No torch."""

from collections.abc import Collection
from typing import NamedTuple

from canon_pretrain.stats.claims import Claim


class ClaimCell(NamedTuple):
    """A task, or TASK/DIFFICULTY, and the two arms that a claim compares on it."""

    task: str
    better: str
    worse: str


def claim_cells(claim: Claim, settings: Collection[str], arms: Collection[str]) -> list[ClaimCell]:
    """Return the cells of a claim, of which a claim over a grid has several.

    `settings`: the tasks of a board, or TASK/DIFFICULTY. A task with difficulties has all of them
    as its cells, an architecture with sizes all of its arms, paired by size; a size that
    only one of the two has adds no cell, nor does a name that the board does not have.
    """
    better_arms = variants_of(claim.better, arms)
    worse_arms = variants_of(claim.worse, arms)
    cells = []
    for task in claim.tasks or [claim.task]:
        for setting in variants_of(task, settings):
            for better in better_arms:
                for worse in worse_arms:
                    # Two arms that are named may be of different sizes.
                    is_named = better == claim.better and worse == claim.worse
                    if is_named or size_of(better) == size_of(worse):
                        cells.append(ClaimCell(setting, better, worse))
    return [*dict.fromkeys(cells)]


def task_name(setting: str) -> str:
    """Return the task of TASK/DIFFICULTY."""
    return setting.partition("/")[0]


def architecture_of(arm: str) -> str:
    """Return the architecture of ARCHITECTURE/SIZE."""
    return arm.partition("/")[0]


def size_of(arm: str) -> str:
    """Return the size of ARCHITECTURE/SIZE; "" of an architecture without sizes."""
    return arm.partition("/")[2]


def variants_of(name: str, names: Collection[str]) -> list[str]:
    """Return `name` if it is one of `names`, else those that are NAME/VARIANT."""
    if name in names:
        return [name]
    return [other for other in names if other.partition("/")[0] == name]
