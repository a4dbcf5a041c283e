"""Weights of transformers' InklingForCausalLM and ours.

What its formulas have and ours have not is folded into weights on import; an export has the value
in parentheses:

- scores are divided by K, ours by sqrt(K): the gain of q_norm is K^-1/2 times theirs;
- the feed-forward's output is multiplied by `mlp.global_scale` (1): w2 is;
- hidden states are divided by `logits_mup_width_multiplier` (1.0) before the head: the last norm's
  gain is;
- `rel_logits_proj.proj` [C, E] is stored transposed.

Products are rounded to float32 once. Exact are those by powers of two, such as with K = 64; other
gains of q_norm may change in the last bit if they are exported and imported again.

Shapes: K head dim, C channels of relative states, E distances with a bias.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from canon_pretrain.model.args import ModelArgs

_PROFILES = "attention.relative.profiles.weight"
_GAIN = "attention.q_norm.weight"
_W2 = "feed_forward.w2.weight"
_SCALE = "feed_forward.scale"


def their_shapes(shapes: Mapping[str, torch.Size], args: ModelArgs) -> dict[str, torch.Size]:
    """Return the shapes of the class's tensors, by our names; scales have a name of their own."""
    theirs = {}
    for name, shape in shapes.items():
        theirs[name] = torch.Size(reversed(shape)) if name.endswith(_PROFILES) else shape
    return theirs | {f"layers.{i}.{_SCALE}": torch.Size([1]) for i in range(args.num_layers)}


def to_ours(weights: Mapping[str, Tensor], args: ModelArgs, multiplier: float) -> dict[str, Tensor]:
    """Return our weights from those of `their_shapes`; `multiplier`: of the logits."""
    ours = dict(weights)
    ours["norm.weight"] = _times(ours["norm.weight"], 1 / multiplier)
    for i, layer in enumerate(args.layer_args):
        prefix = f"layers.{i}."
        scale = float(ours.pop(prefix + _SCALE))
        ours[prefix + _W2] = _times(ours[prefix + _W2], scale)
        ours[prefix + _GAIN] = _times(ours[prefix + _GAIN], layer.head_dim**-0.5)
        ours[prefix + _PROFILES] = ours[prefix + _PROFILES].T.contiguous()
    return ours


def to_class(
    tensors: Iterable[tuple[str, Tensor]], args: ModelArgs
) -> Iterator[tuple[str, Tensor]]:
    """Yield our weights as the class has them, and the scales of its feed-forwards, which are 1.

    All have our names and those of `their_shapes`; ours may be on the meta device.
    """
    for name, tensor in tensors:
        if name.endswith(_PROFILES):
            yield name, tensor.T
        elif name.endswith(_GAIN):
            number = int(name.split(".")[1])
            yield name, _times(tensor, args.layer_args[number].head_dim ** 0.5)
        else:
            yield name, tensor
    for i in range(args.num_layers):
        yield f"layers.{i}.{_SCALE}", torch.ones(1)


def _times(tensor: Tensor, factor: float) -> Tensor:
    """Return the product, rounded once."""
    return (tensor.double() * factor).to(tensor.dtype)
