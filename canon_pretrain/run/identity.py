"""What identifies a run: the settings that its launches share. No torch."""

from collections.abc import Mapping
from typing import Any

Changes = dict[str, list[Any]]
"""Dotted name -> [old, new]"""
IDENTITY: dict[str, tuple[str, ...]] = {
    "model": (),
    "optimizer": (),
    "lr_scheduler": (),
    "data": ("data_seed", "order"),
    "loss": ("z_loss", "squared_loss"),
    "guards": ("outlier_sigma", "outlier_window"),
    "training": (
        *("seq_len", "global_batch_size", "steps", "max_norm", "dtype"),
        *("mixed_precision_param", "mixed_precision_reduce"),
    ),
}
"""Section -> its keys in a run's identity; empty: all."""


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Changes:
    """Return [old, new] of each name whose values differ; a missing one is None."""
    pairs = {name: [old.get(name), new.get(name)] for name in sorted(old.keys() | new.keys())}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
