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
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.distributed import ParallelDims

from canon_pretrain.core.errors import UserError, nearest
from canon_pretrain.model.init import plain_name
from canon_pretrain.run.identity import GROUPS
from canon_pretrain.run.sections import Optimizer
from canon_pretrain.titan.lion import Lion
from canon_pretrain.titan.muon import Muon

MUON = "Muon"
LION = "Lion"
ADAM_CLASSES: dict[str, type[torch.optim.Adam]] = {
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


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether Muon updates a parameter: the matrices in the blocks, and experts."""
    return name.startswith("layers.") and is_matrix(name, parameter)


@dataclass
class Group:
    """Parameters that are updated alike."""

    title: str
    """The group's `match`; "" for parameters that no group matches."""
    optimizer: str
    """One of OPTIMIZERS."""
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    parameters: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_values(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())


def parameter_groups(config: Optimizer, model: nn.Module) -> list[Group]:
    """Return the groups of a model's trained parameters: those of the config first, in its order.

    Parameters of one table with and without weight decay, or of Muon and AdamW, are two groups.
    Raises UserError for a table that no parameter belongs to.
    """
    parameters = {
        plain_name(name): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }

    # The first table that matches; the last row is of those that no table matches.
    table_of = {name: _first_match(config, name) for name in parameters}
    _check_tables(config, parameters, Counter(table_of.values()))

    groups: dict[tuple[int, str, float], Group] = {}
    for name, parameter in parameters.items():
        new = _new_group(config, table_of[name], name, parameter)
        # in a table, AdamW's before Muon's
        key = (table_of[name], new.optimizer, -new.weight_decay)
        group = groups.setdefault(key, new)
        group.parameters[name] = parameter
    return [groups[key] for key in sorted(groups)]


def muon_shapes(config: Optimizer, model: nn.Module) -> list[torch.Size]:
    """Return the shapes of the matrices, and of the stacks of them, that Muon updates."""
    groups = parameter_groups(config, model) if config.name == MUON else []
    shapes = []
    for group in groups:
        if group.optimizer == MUON:
            shapes += [parameter.shape for parameter in group.parameters.values()]
    return shapes


def num_moments(groups: Iterable[Group]) -> int:
    """Return the values that the optimizers of these groups keep: two per value, or one."""
    number = 0
    for group in groups:
        moments = 1 if group.optimizer in (MUON, LION) else 2
        number += moments * group.num_values
    return number


def _first_match(config: Optimizer, name: str) -> int:
    """Return the number of the first table that matches a parameter, or the number of tables."""
    for number, table in enumerate(config.groups):
        matches = KINDS.get(table.match) or re.compile(table.match).search
        if matches(name):
            return number
    return len(config.groups)


def _new_group(config: Optimizer, number: int, name: str, parameter: Tensor) -> Group:
    """Return a group for a parameter of this table, or of none."""
    decays = config.decay == "all" or is_matrix(name, parameter)
    group = Group(
        title="",
        optimizer=config.name,
        lr=config.lr,
        weight_decay=config.weight_decay if decays else 0.0,
        betas=(config.beta1, config.beta2),
    )
    if config.name == MUON:
        if not is_hidden_matrix(name, parameter):
            group.optimizer = "AdamW"
        elif config.muon_lr is not None:
            group.lr = config.muon_lr

    # What the table changes.
    if number < len(config.groups):
        table = config.groups[number]
        group.title = table.match
        group.lr *= table.lr_scale
        if table.weight_decay is not None:
            group.weight_decay = table.weight_decay
        if table.betas is not None:
            _check_betas(group, number, name)
            beta1, beta2 = table.betas
            group.betas = (beta1, beta2)
    return group


def _check_betas(group: Group, number: int, name: str) -> None:
    """Raise UserError for betas of a parameter that Muon updates."""
    if group.optimizer == MUON:
        raise UserError(
            "optimizer.muon_betas",
            f"{GROUPS}[{number}].betas: {name} is updated by Muon, which has muon_momentum "
            f"instead. Let {GROUPS}[{number}].match leave it out, or unset betas",
            shared=True,
            key=f"{GROUPS}[{number}].betas",
        )


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
    """torchtitan's container, with one optimizer for a model, or with Muon and AdamW."""

    def __init__(self, model: nn.Module, config: Optimizer) -> None:
        self.model_parts = [model]
        self.optimizers = []
        self.hyperparameters: list[list[dict[str, Any]]] = []
        """By optimizer and group, the values that the job sets; `lr` before the schedule"""

        groups = parameter_groups(config, model)
        for name in dict.fromkeys(sorted(group.optimizer for group in groups)):
            own = [group for group in groups if group.optimizer == name]
            values = [_hyperparameters(group, config) for group in own]
            rows = [
                {"params": list(group.parameters.values()), **row}
                for group, row in zip(own, values, strict=True)
            ]
            self.optimizers.append(_build(name, rows, config))
            self.hyperparameters.append(values)

        self.num_moments = num_moments(groups)
        all_parameters = [p for group in groups for p in group.parameters.values()]
        self._post_init(all_parameters, {})

    def state_dict(self) -> dict[str, Any]:
        (model,) = self.model_parts
        return get_optimizer_state_dict(model, self.optimizers, options=_FLAT)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        (model,) = self.model_parts
        set_optimizer_state_dict(model, self.optimizers, state_dict, options=_FLAT)


_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def _hyperparameters(group: Group, config: Optimizer) -> dict[str, Any]:
    """Return the values of a group in its optimizer."""
    values: dict[str, Any] = {"lr": group.lr, "weight_decay": group.weight_decay}
    if group.optimizer == MUON:
        return values
    values["betas"] = group.betas
    if group.optimizer == LION:
        return values
    return values | {
        "eps": config.eps,
        "fused": config.implementation == "fused",
        "foreach": config.implementation == "foreach",
    }


def _build(name: str, rows: list[dict[str, Any]], config: Optimizer) -> torch.optim.Optimizer:
    if name == MUON:
        return Muon(
            rows,
            momentum=config.muon_momentum,
            num_steps=config.muon_ns_steps,
            adjust_lr=config.muon_adjust_lr,
        )
    if name == LION:
        return Lion(rows)
    # fused also as a default: the constructor reads it there
    return ADAM_CLASSES[name](rows, fused=config.implementation == "fused")


def build_optimizers(
    model_parts: list[nn.Module],
    optimizer_config: Optimizer,
    parallel_dims: ParallelDims,
    ft_manager: object = None,
) -> Optimizers:
    """Build the optimizer of a job, for torchtitan's Trainer."""
    (model,) = model_parts
    return Optimizers(model, optimizer_config)
