"""What an import and an export need of a class that is not like Llama.

Each of transformers' classes has a file of this folder, which ends with its StandardClass;
classes.py has the table. Those of the released linear models are in lingua_linear.py. The functions
of a class take and return our names of parameters.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canon_pretrain.hf.config import Names, Naming, name_to_hf, name_to_ours
from canon_pretrain.model.args import ModelArgs

Tensors = Iterable[tuple[str, Tensor]]
LINEAR = "linear_attention"
GATED_DELTANET = "gated_deltanet"
"""The mixer of such layers, in Qwen3-Next and OLMo Hybrid."""


class Part(NamedTuple):
    """A tensor of ours in a packed one."""

    name: str
    rows_per_head: int


class Packed(NamedTuple):
    """A tensor of the class that holds, for each head, rows of several of ours."""

    name: str
    num_heads: int
    parts: tuple[Part, ...]

    @property
    def num_rows(self) -> int:
        return self.num_heads * sum(part.rows_per_head for part in self.parts)

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return our tensors, by name."""
        by_head = tensor.unflatten(0, (self.num_heads, -1))
        parts = by_head.split([part.rows_per_head for part in self.parts], dim=1)
        names = [part.name for part in self.parts]
        return {name: rows.flatten(0, 1) for name, rows in zip(names, parts, strict=True)}

    def join(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the tensor of the class from ours, by name."""
        by_head = [tensors[part.name].unflatten(0, (self.num_heads, -1)) for part in self.parts]
        return torch.cat(by_head, dim=1).flatten(0, 1)


def _no_packed(_args: ModelArgs) -> Iterable[Packed]:
    return ()


def _same_shapes(shapes: Mapping[str, torch.Size], _args: ModelArgs) -> Mapping[str, torch.Size]:
    return shapes


def _same_values(
    weights: Mapping[str, Tensor], _args: ModelArgs, _config: Mapping[str, Any]
) -> Mapping[str, Tensor]:
    return weights


def _unchanged(tensors: Tensors, _args: ModelArgs) -> Tensors:
    return tensors


@dataclass(frozen=True, kw_only=True)
class TheirWeights:
    """How a class names and stores its weights, and how ours become those."""

    naming: Naming
    delta_naming: Naming | None = None
    """Of layers of GatedDeltaNet, in classes that have both kinds."""
    old_names: Names = field(default_factory=dict)
    """Other names of modules in files, and those of `naming`."""
    conv: str = ""
    conv_parts: tuple[str, ...] = ()
    """The modules in whose weights files have the rows of the convolution `conv`, in this order."""

    ignored: str = r"(?!)"
    """Pattern of the names of tensors in files that are not read; by default it matches none."""
    their_shapes: Callable[[Mapping[str, torch.Size], ModelArgs], Mapping[str, torch.Size]] = (
        _same_shapes
    )
    """Return the shapes of its tensors that are not packed, from those of ours."""
    packed_tensors: Callable[[ModelArgs], Iterable[Packed]] = _no_packed
    """Return the tensors that hold several of ours."""
    values_to_ours: Callable[
        [Mapping[str, Tensor], ModelArgs, Mapping[str, Any]], Mapping[str, Tensor]
    ] = _same_values
    """Return our weights from those of `their_shapes`; the last argument is its config.json."""
    values_to_class: Callable[[Tensors, ModelArgs], Tensors] = _unchanged
    """The inverse of `values_to_ours`, for tensors that may be on the meta device."""
    with_unused: Callable[[Tensors, ModelArgs], Tensors] = _unchanged
    """Return ours, and the tensors that the class stores and does not compute with."""

    @property
    def changes_values(self) -> bool:
        """Whether values of weights differ from ours: they must not be rounded before."""
        return self.values_to_class is not _unchanged

    def to_hf(self, name: str, args: ModelArgs | None) -> str:
        """Return our parameter's name in this class. Raises ValueError if unknown."""
        return name_to_hf(name, self._naming_of(name, args))

    def to_ours(self, name: str, args: ModelArgs | None) -> str:
        """Return our name of a parameter. Raises ValueError if unknown.

        A part of a convolution has the name of the whole (`parts_of`).
        """
        for old_name, new_name in self.old_names.items():
            name = f".{name}".replace(f".{old_name}.", f".{new_name}.")[1:]
        for part_name in self.conv_parts:
            name = name.replace(f".{part_name}.", f".{self.conv}.")
        return name_to_ours(name, self._naming_of(name, args))

    def _naming_of(self, name: str, args: ModelArgs | None) -> Naming:
        """Return the names of the class, those of the layer of the parameter `name`."""
        # The two kinds of layers of a class use some names with another meaning.
        in_layer = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
        if self.delta_naming is not None and in_layer and args is not None:
            number = int(in_layer[1])
            if number < args.num_layers and args.layer_args[number].mixer == GATED_DELTANET:
                return self.delta_naming
        return self.naming

    def parts_of(self, name: str, args: ModelArgs) -> dict[str, int]:
        """Return the tensors that files have for a parameter of ours, and their rows.

        In the order of the rows; empty for a parameter that they have as one tensor.
        """
        in_layer = re.fullmatch(r"layers\.(\d+)\.attention\.conv1d\.weight", name)
        if not self.conv_parts or not in_layer:
            return {}
        whole = self.to_hf(name, args)
        part_names = [whole.replace(self.conv, part) for part in self.conv_parts]
        widths = args.layer_args[int(in_layer[1])].mixer_parts
        return dict(zip(part_names, widths, strict=True))

    def part_number(self, name: str) -> int | None:
        """Return which part of a convolution's rows a tensor of a file has; None if it is whole."""
        for number, part_name in enumerate(self.conv_parts):
            if name.endswith(f".{part_name}.weight"):
                return number
        return None

    def to_class(self, tensors: Tensors, args: ModelArgs) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the class from ours: a packed one when it has all parts.

        The names and shapes depend on those of ours only, which may be on the meta device. If
        `changes_values`, ours are float32.
        """
        packed_tensors = self.packed_tensors(args)
        packed_of = {part.name: packed for packed in packed_tensors for part in packed.parts}
        waiting: dict[str, Tensor] = {}
        for name, tensor in self.with_unused(self.values_to_class(tensors, args), args):
            parts = self.parts_of(name, args)
            if parts:
                yield from zip(parts, tensor.split(list(parts.values())), strict=True)
                continue
            if name not in packed_of:
                yield self.to_hf(name, args), tensor
                continue

            packed = packed_of[name]
            waiting[name] = tensor
            if all(part.name in waiting for part in packed.parts):
                yield packed.name, packed.join(waiting)
                for part in packed.parts:
                    del waiting[part.name]


@dataclass(frozen=True, kw_only=True)
class StandardClass(TheirWeights):
    """A class of transformers' own: its fields, names and weights, and ours."""

    model_type: str
    known_fields: Set[str]
    """Fields of its config.json that are read or have no effect, besides those of all classes."""
    to_args: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Return the arguments of ModelArgs that are in a config.json itself, without its EXTENSION.
    Raises UserError, naming the field."""
    to_fields: Callable[[ModelArgs], dict[str, Any] | None]
    """Return a config.json, None if the class does not compute the model."""
    mixer_folder: Path | None = None
    """Where the files of its mixers are, if they are files of ours."""
