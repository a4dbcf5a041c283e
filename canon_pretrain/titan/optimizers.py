"""The optimizer of `[optimizer]`, and the groups of parameters that it updates alike.

A group's learning rate follows the schedule of the run. Checkpoints hold a group's values under the
name of each of its parameters, so that a run may resume with other groups.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.distributed import ParallelDims

from canon_pretrain.core.errors import UserError, nearest
from canon_pretrain.model.init import plain_name
from canon_pretrain.run.identity import GROUPS
from canon_pretrain.run.sections import Optimizer

CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
}


# -- groups


def _modules(name: str) -> list[str]:
    """Return the names of the modules that a parameter is in, from the outside in."""
    return name.split(".")[:-1]


KINDS: dict[str, Callable[[str], bool]] = {
    "norm": lambda name: any(module.endswith("norm") for module in _modules(name)),
    "embedding": lambda name: name == "tok_embeddings.weight",
    "head": lambda name: name == "output.weight",
    "canon": lambda name: any(module.startswith("canon_") for module in _modules(name)),
    "bias": lambda name: name.endswith(".bias"),
}
"""Whether a parameter of this name matches, by the words that `match` may be."""


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter is a matrix: of a linear layer, experts, embedding or head.

    A convolution has the shape of one, or more dimensions, but mixes no channels.
    """
    module = _modules(name)[-1]
    if module == "experts":
        return True
    is_convolution = module == "conv1d" or KINDS["canon"](name)
    return parameter.ndim == 2 and name.endswith(".weight") and not is_convolution


@dataclass
class Group:
    """Parameters that are updated alike."""

    title: str
    """The group's `match`; "" for parameters that no group matches."""
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    parameters: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_values(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())


def parameter_groups(config: Optimizer, model: nn.Module) -> list[Group]:
    """Return the groups of a model's trained parameters: those of the config first, in its order.

    Parameters of one table with and without weight decay are two groups. Raises UserError for a
    table that no parameter belongs to.
    """
    parameters = {
        plain_name(name): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }

    # The first table that matches; the last row is of those that no table matches.
    num_tables = len(config.groups)
    table_of = {name: _first_match(config, name) for name in parameters}
    _check_tables(config, parameters, Counter(table_of.values()))

    groups: dict[tuple[int, float], Group] = {}
    for name, parameter in parameters.items():
        table = table_of[name]
        new = _default_group(config, decays=config.decay == "all" or is_matrix(name, parameter))
        if table < num_tables:
            _apply(config, table, new)
        group = groups.setdefault((table, new.weight_decay), new)
        group.parameters[name] = parameter
    return [groups[key] for key in sorted(groups, key=lambda key: (key[0], -key[1]))]


def _first_match(config: Optimizer, name: str) -> int:
    """Return the number of the first table that matches a parameter, or the number of tables."""
    for number, table in enumerate(config.groups):
        matches = KINDS.get(table.match) or re.compile(table.match).search
        if matches(name):
            return number
    return len(config.groups)


def _default_group(config: Optimizer, *, decays: bool) -> Group:
    return Group(
        title="",
        lr=config.lr,
        weight_decay=config.weight_decay if decays else 0.0,
        betas=(config.beta1, config.beta2),
    )


def _apply(config: Optimizer, number: int, group: Group) -> None:
    """Change a group as a table of the config says."""
    table = config.groups[number]
    group.title = table.match
    group.lr *= table.lr_scale
    if table.weight_decay is not None:
        group.weight_decay = table.weight_decay
    if table.betas is not None:
        beta1, beta2 = table.betas
        group.betas = (beta1, beta2)


def _check_tables(
    config: Optimizer, parameters: Iterable[str], num_parameters: Mapping[int, int]
) -> None:
    """Raise UserError for a table without parameters, with the nearest words or names."""
    for number, table in enumerate(config.groups):
        if num_parameters[number]:
            continue
        matches = KINDS.get(table.match) or re.compile(table.match).search
        if any(matches(name) for name in parameters):
            hint = "all that it matches belong to earlier groups: move it up, or remove it"
        else:
            words = {word for name in parameters for word in name.split(".")}
            near = nearest(table.match, KINDS) or nearest(table.match, words)
            hint = f"expected {', '.join(KINDS)} or a regular expression on names"
            if near:
                hint = f"{hint}. Did you mean '{near}'?"
        raise UserError(
            "optimizer.empty_group",
            f"{GROUPS}[{number}].match = {table.match!r} has no parameter of this model: {hint}",
            shared=True,
            key=f"{GROUPS}[{number}].match",
        )


# -- the optimizer


class Optimizers(OptimizersContainer):
    """torchtitan's container, with the job's optimizer of a model and its groups."""

    def __init__(self, model: nn.Module, config: Optimizer) -> None:
        shared: dict[str, Any] = {
            "eps": config.eps,
            "fused": config.implementation == "fused",
            "foreach": config.implementation == "foreach",
        }
        groups = parameter_groups(config, model)
        self.hyperparameters: list[dict[str, Any]] = [
            {"lr": group.lr, "weight_decay": group.weight_decay, "betas": group.betas, **shared}
            for group in groups
        ]
        """The values of each group that the job sets, `lr` before the schedule"""

        rows = [
            {"params": list(group.parameters.values()), **values}
            for group, values in zip(groups, self.hyperparameters, strict=True)
        ]
        self.model_parts = [model]
        self.optimizers = [CLASSES[config.name](rows, **shared)]
        all_parameters = [parameter for row in rows for parameter in row["params"]]
        self._post_init(all_parameters, shared)


def build_optimizers(
    model_parts: list[nn.Module],
    optimizer_config: Optimizer,
    parallel_dims: ParallelDims,
    ft_manager: object = None,
) -> Optimizers:
    """Build the optimizer of a job, for torchtitan's Trainer."""
    (model,) = model_parts
    return Optimizers(model, optimizer_config)
