"""The initial value of each parameter of a model, by its name."""

import re
from functools import partial

import torch

from canon_pretrain.core.errors import UserError
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.initial_value import UNKNOWN, InitialValue
from canon_pretrain.model.mixers import mixer_class

PAPER_STD = 0.02
# inserted into a parameter's name by torch.compile and activation checkpointing
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """Return a parameter's name without WRAPPERS."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def initial_value(args: ModelArgs, name: str, shape: torch.Size) -> InitialValue:
    """Return the initial value of the parameter `name` of `Transformer(args)`.

    A mixer declares those of its own parameters (`Mixer.initial_value`). All others:

    Canon: PyTorch's Conv1d default U(-K^-1/2, K^-1/2), +-1/2 at kernel 4 (appendix C, "default
    initialisation"), for any `init`; dynamic filters begin as these (canon.py), scalar taps with 1,
    .4, .2, .1, and the shares of a shift with U(0, 1), for RWKV's powers of channel / C. The smear
    gate: 0. The native conv1d of a recurrent mixer: N(0, 0.02) for any `init`, as in
    flash-linear-attention and PhysicsLM4. Biases: 0. Norm gains: 1. Matrices [.., out, in]:
    N(0, 0.02) with `paper`, if the layer's mixer has no other rule in mixer_table.py; with `lingua`
    std in^-1/2 (D^-1/2, and F^-1/2 for w2) cut at 3 sigma. With `output_gate_rank`, both low-rank
    products have the deviation 0.02 of one matrix, as the release's.

    Raises UserError for a parameter that the user's own mixer has not declared, or that has no
    dimension; ValueError for another unknown name.
    """
    name = plain_name(name)
    # The arguments are those of the parameter's layer.
    if in_layer := re.match(r"layers\.(\d+)\.", name):
        args = args.layer_args[int(in_layer[1])]
    elif args.pattern:  # the embedding, the last norm and the head, by the first layer
        args = args.layer_args[0]

    value = _usual_value(args, name, torch.Size(shape))
    own_name = name.partition(".attention.")[2]
    if own_name and args.is_own_mixer and not shape:
        raise UserError(
            "mixer.scalar",
            f"{args.mixer}: {name} has no dimension, and FSDP2 shards the first one of each "
            "parameter: use torch.empty(1)",
            name=name,
        )
    if own_name and args.mixer != "attention":
        value = mixer_class(args.mixer).initial_value(args, own_name, value)
    if value.kind != UNKNOWN:
        return value

    if own_name and args.is_own_mixer:
        raise UserError(
            "mixer.init",
            f"{args.mixer}: the class has no initial value for {name}. Add it to `init`",
            name=name,
        )
    raise ValueError(f"no initialization for {name} of shape {tuple(shape)}")


def _usual_value(args: ModelArgs, name: str, shape: torch.Size) -> InitialValue:
    """Return the value that follows from the kind of parameter, perhaps of UNKNOWN kind.

    `args`: of the parameter's layer.
    """
    value = partial(InitialValue, name, shape, args.init_seed)
    # the leading dot: a parameter of the model itself has the module ""
    *_, module, own_name = f".{name}".split(".")

    if name.startswith("smear."):  # at first the model is the same as without
        return value("constant", 0.0)

    # convolutions
    if module.startswith("canon_"):
        if own_name in ("up", "per_head"):
            return value("constant", 0.0)
        if own_name == "down":
            return value("uniform", shape[-1] ** -0.5)
        if args.canon_filter == "scalar":  # the 1 of the current token is the residual
            return value("halving", 0.0 if args.canon_residual else 1.0)
        if args.canon_filter == "shift":
            return value("share", 1.0)
        return value("uniform", args.canon_bound)
    if module == "conv1d":
        return value("normal", PAPER_STD)

    # vectors
    if own_name == "bias":
        return value("constant", 0.0)
    if own_name == "weight" and module.endswith("norm"):
        return value("constant", 1.0)

    # matrices, also those of all experts
    is_matrix = own_name == "weight" or module == "experts"
    if len(shape) < 2 or not is_matrix:
        return value(UNKNOWN, 0.0)
    if args.init == "lingua":
        return value("truncated_normal", shape[-1] ** -0.5)

    # as the paper's code for this mixer
    if args.recurrent is not None and args.recurrent.embedding_std is not None:
        if module == "tok_embeddings":
            return value("normal", args.recurrent.embedding_std)
        return value("uniform", shape[-1] ** -0.5)

    if args.output_gate_rank and module in ("down", "up"):
        # the product of rank r has the deviation sqrt(r) std^2 = PAPER_STD
        return value("normal", (PAPER_STD * min(shape) ** -0.5) ** 0.5)
    return value("normal", PAPER_STD)
