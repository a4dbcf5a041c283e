"""What identifies a run: the settings that its launches share. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from canon_pretrain.run.sections import ParameterGroup, marked
from canon_pretrain.run.setting import Mark

Changes = dict[str, list[Any]]
"""Dotted name -> [old, new]"""
IDENTITY = marked(Mark.IDENTITY)
"""Dotted names of the settings in a run's identity, which also has each field of ModelArgs, of the
task, of the optimizer's groups, and the fingerprints of the data."""
GROUPS = "optimizer.groups"
GROUP_KEYS = tuple(f"{GROUPS}[N].{field.name}" for field in fields(ParameterGroup))
"""Names of a group's settings in a run's identity, for the number N of the group, from 0 on"""
PER_LAUNCH_KEYS = marked(Mark.PER_LAUNCH, Mark.ONE_SHOT)
"""Settings of one launch, or that follow from its world size: differences are not reported."""
ONE_SHOT_KEYS = marked(Mark.ONE_SHOT)
"""Those of them that the command that resumes a run leaves out"""


def group_identity(groups: Sequence[ParameterGroup]) -> dict[str, Any]:
    """Return by dotted name the settings of the optimizer's groups; empty without groups."""
    identity = {}
    for number, group in enumerate(groups):
        for name, value in vars(group).items():
            identity[f"{GROUPS}[{number}].{name}"] = value
    return identity


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Changes:
    """Return [old, new] of each name whose values differ; a missing one is None."""
    changes = {}
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            changes[name] = [old.get(name), new.get(name)]
    return changes
