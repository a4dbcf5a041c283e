"""The weights of transformers' Qwen3NextForCausalLM, where they are not ours by other names.

Some tensors of the class hold several of ours, side by side for each head: the queries and the gate
of attention (`Qwen3NextAttention.forward`), and q, k, v and the output gate, or the steps and the
decays, of GatedDeltaNet (`fix_query_key_value_ordering`). The gain of most norms is 1 + weight
(`Qwen3NextRMSNorm`), but not that of GatedDeltaNet's output (`Qwen3NextRMSNormGated`).

Fields of config.json and the names of the other tensors are in config.py.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from canon_pretrain.hf.config import QWEN3_NEXT, to_hf
from canon_pretrain.model.args import ModelArgs

_CENTERED_NORMS = ("attention_norm", "ffn_norm", "q_norm", "k_norm")
"""Norms of a layer whose gain is 1 + weight in the class; so is that of the last norm."""


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


def packed_tensors(args: ModelArgs) -> Iterator[Packed]:
    """Yield the packed tensors of the class for the model `args`."""
    for i, layer in enumerate(args.layer_args):
        ours = f"layers.{i}.attention"
        theirs = f"model.layers.{i}"
        if layer.mixer == "attention":
            query_and_gate = (
                Part(f"{ours}.wq.weight", layer.head_dim),
                Part(f"{ours}.wg.weight", layer.head_dim),
            )
            yield Packed(f"{theirs}.self_attn.q_proj.weight", layer.num_heads, query_and_gate)
            continue

        qkvz = (
            Part(f"{ours}.wq.weight", layer.key_dim),
            Part(f"{ours}.wk.weight", layer.key_dim),
            Part(f"{ours}.wv.weight", layer.value_dim),
            Part(f"{ours}.wg.weight", layer.value_dim),
        )
        yield Packed(f"{theirs}.linear_attn.in_proj_qkvz.weight", layer.num_heads, qkvz)
        step_and_decay = (Part(f"{ours}.wb.weight", 1), Part(f"{ours}.wa.weight", 1))
        yield Packed(f"{theirs}.linear_attn.in_proj_ba.weight", layer.num_heads, step_and_decay)


def is_centered(name: str) -> bool:
    """Return whether the class has our parameter `name` as a gain less 1."""
    module, _, _ = name.rpartition(".")
    return module == "norm" or module.endswith(_CENTERED_NORMS)


def to_class(
    tensors: Iterable[tuple[str, Tensor]], args: ModelArgs
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the class from ours, in float32: a packed one when it has all parts.

    The names and shapes depend on those of ours only, which may be on the meta device.
    """
    packed_of = {part.name: packed for packed in packed_tensors(args) for part in packed.parts}
    waiting: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name not in packed_of:
            yield to_hf(name, QWEN3_NEXT, args), tensor - 1 if is_centered(name) else tensor
            continue

        packed = packed_of[name]
        waiting[name] = tensor
        if all(part.name in waiting for part in packed.parts):
            yield packed.name, packed.join(waiting)
            for part in packed.parts:
                del waiting[part.name]
