"""All classes of transformers that are read and written: names of parameters, and fields.

The table, by `model_type`, of those that are not like Llama; config.py has the others.
"""

import re
from collections.abc import Mapping
from typing import Any

from canon_pretrain.hf import config as llama
from canon_pretrain.hf.config import (
    CHANGES_NOTHING,
    CHANGES_TRAINING,
    DEFAULTS,
    EXTENSION,
    LLAMA_NAMING,
    MODEL_TYPE,
    NAMINGS,
    OWN_MIXER,
    READ,
    STANDARD_CLASSES,
    checked,
    keeps_names,
    layout,
    llama_fields,
    name_to_hf,
    name_to_ours,
    with_extension,
)
from canon_pretrain.hf.inkling import INKLING, INKLING_CLASS
from canon_pretrain.hf.lfm2 import LFM2_CLASS
from canon_pretrain.hf.mamba2 import MAMBA2, MAMBA2_CLASS
from canon_pretrain.hf.olmo_hybrid import OLMO_HYBRID_CLASS
from canon_pretrain.hf.qwen3_next import QWEN3_NEXT_CLASS
from canon_pretrain.hf.standard import StandardClass
from canon_pretrain.model.args import ModelArgs

CLASSES = {
    standard.model_type: standard
    for standard in (
        MAMBA2_CLASS,
        LFM2_CLASS,
        QWEN3_NEXT_CLASS,
        OLMO_HYBRID_CLASS,
        INKLING_CLASS,
    )
}
"""By model_type, what is read and written of transformers' own classes that are not like Llama."""
STANDARD_TYPES = (*STANDARD_CLASSES, *CLASSES)
"""model_type of transformers' own classes."""
MODEL_TYPES = (MODEL_TYPE, *STANDARD_TYPES)
REFUSED_TYPES = {
    "inkling_mm_model": ("text_config", f"expected the text model alone, {INKLING}"),
}
"""By model_type of classes that our models can't express: a field that says so, and the reason."""


def to_hf(name: str, model_type: str = MODEL_TYPE, args: ModelArgs | None = None) -> str:
    """Return a parameter's name in the class of `model_type`. Raises ValueError if unknown.

    `args`: the model, needed for layers with a mixer that keeps its names, and for classes of
    attention and GatedDeltaNet.
    """
    standard = CLASSES.get(model_type)
    if standard is not None:
        return standard.to_hf(name, args)

    own = re.fullmatch(r"layers\.(\d+)\.attention\.(.+)", name)
    if own and args is not None and model_type not in STANDARD_CLASSES:
        if keeps_names(args.layer_args[int(own[1])]):
            return f"{LLAMA_NAMING.layers}.{own[1]}.{OWN_MIXER}.{own[2]}"
    return name_to_hf(name, NAMINGS.get(model_type, LLAMA_NAMING))


def to_ours(name: str, model_type: str = "", args: ModelArgs | None = None) -> str:
    """Return our name of the parameter of a class. Raises ValueError if unknown.

    `model_type` is needed for OLMo 2 and the classes of CLASSES but Mamba2, and `args`, the model,
    for those of attention and GatedDeltaNet. A part of a convolution has the name of the whole
    (`StandardClass.parts_of`).
    """
    if name.startswith("backbone."):
        model_type = MAMBA2
    standard = CLASSES.get(model_type)
    if standard is not None:
        return standard.to_ours(name, args)
    return name_to_ours(name, NAMINGS.get(model_type, LLAMA_NAMING))


def plain_fields(args: ModelArgs) -> dict[str, Any] | None:
    """Return a config.json for a standard class of transformers, None if none computes `args`."""
    for standard in CLASSES.values():
        fields = standard.to_fields(args)
        if fields is not None:
            return fields
    return llama_fields(args)


def unknown(config: Mapping[str, Any]) -> list[str]:
    """Return the names of fields that are neither read nor known to have no effect."""
    standard = _class_of(config)
    known_fields = DEFAULTS.keys() if standard is None else standard.known_fields
    return sorted(set(config) - READ - CHANGES_NOTHING - known_fields)


def to_args(config: Mapping[str, Any]) -> ModelArgs:
    """Return the model that a config.json describes. Raises UserError, naming the field."""
    standard = _class_of(config)
    if standard is None:
        return llama.to_args(config)

    # transformers' own classes do not read the sub-dictionary: there it can't change the model
    layout(config)  # raises for an unknown one
    extension = checked(EXTENSION, config.get(EXTENSION) or {}, dict)
    args = standard.to_args(config)
    return with_extension(args, extension, CHANGES_TRAINING)


def _class_of(config: Mapping[str, Any]) -> StandardClass | None:
    return CLASSES.get(str(config.get("model_type")))
