"""The exported model for transformers: from_pretrained(OUT, trust_remote_code=True).

The modules are those of model/, registered under the names of LlamaCanonForCausalLM; their forward
passes run unmodified. What replaces a module there (LoRA, a larger vocabulary, a quantized linear
layer) is what the forward pass uses.

Shapes: B rows, T tokens, S tokens including the cached ones, D hidden, V vocabulary.
"""

import copy
import functools
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from transformers.cache_utils import Cache as HFCache
from transformers.configuration_utils import PretrainedConfig
from transformers.generation import GenerationMixin, GenerationMode
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers import AutoQuantizationConfig
from transformers.utils import can_return_tuple, logging

from canon_pretrain.hf.config import (
    DEFAULTS,
    LINGUA,
    LLAMA_NAMING,
    MODEL_TYPE,
    OWN_MIXER,
    Names,
    keeps_names,
    layout,
    name_to_ours,
    to_args,
)
from canon_pretrain.model.args import ModelArgs, with_mixers_in
from canon_pretrain.model.attend import Attend
from canon_pretrain.model.attention import Rope
from canon_pretrain.model.cache import Cache
from canon_pretrain.model.canon import Canon
from canon_pretrain.model.contexts import layer_contexts
from canon_pretrain.model.init import initial_value
from canon_pretrain.model.transformer import Transformer, TransformerBlock, input_of_blocks

logger = logging.get_logger(__name__)


class LlamaCanonConfig(PretrainedConfig):
    """The fields of the released LlamaCanonConfig, and our sub-dictionary (see config.py)."""

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["past_key_values"]
    # class attributes, so that no null is written, which the released class can't read; and
    # transformers 5 has a property rope_scaling, which renames the field and adds to it
    rope_scaling = None
    rope_dim = None
    partial_rotary_factor = None
    num_key_value_heads = None
    head_dim = None
    # transformers 5 has no such attributes unless a class defines them
    bos_token_id = None
    eos_token_id = None
    pad_token_id = None

    def __init__(self, **kwargs: Any) -> None:
        # transformers 5 writes a config with all rotary options in rope_parameters
        rope = kwargs.pop("rope_parameters", None) or {}
        if rope:
            kwargs.setdefault("rope_theta", rope.get("rope_theta", DEFAULTS["rope_theta"]))
        if rope.get("rope_type", "default") != "default":
            kwargs.setdefault("rope_scaling", rope)

        values = DEFAULTS | {name: kwargs.pop(name) for name in DEFAULTS if name in kwargs}
        for name, value in values.items():
            if value is not None:
                setattr(self, name, value)
        # PretrainedConfig sets its own default unless it receives this field
        kwargs["tie_word_embeddings"] = values["tie_word_embeddings"]
        super().__init__(**kwargs)


# -- the cache -----------------------------------------------------------------------------------


class Passage(NamedTuple):
    """Tokens that are read in one pass."""

    tokens_BT: Tensor
    # their embeddings, if these are not those of the ids
    embeds_BTD: Tensor | None
    # which are not padding; None: all
    is_real_BT: Tensor | None

    def joined(self, other: "Passage", embed: nn.Module) -> "Passage":
        """Return these tokens and the `other` ones behind them."""
        tokens_BT = torch.cat((self.tokens_BT, other.tokens_BT), dim=1)
        embeds_BTD = None
        if self.embeds_BTD is not None or other.embeds_BTD is not None:
            parts = [part.embeddings(embed) for part in (self, other)]
            embeds_BTD = torch.cat(parts, dim=1)
        is_real_BT = None
        if self.is_real_BT is not None or other.is_real_BT is not None:
            flags = [part.real_flags() for part in (self, other)]
            is_real_BT = torch.cat(flags, dim=1)
        return Passage(tokens_BT, embeds_BTD, is_real_BT)

    def first(self, num_tokens: int) -> "Passage":
        """Return the first tokens."""
        return self._each(lambda part: part[:, :num_tokens])

    def rows(self, indices: Tensor) -> "Passage":
        """Return these rows, in this order."""
        return self._each(lambda part: part[indices])

    def _each(self, choose: Callable[[Tensor], Tensor]) -> "Passage":
        return Passage(
            choose(self.tokens_BT),
            None if self.embeds_BTD is None else choose(self.embeds_BTD),
            None if self.is_real_BT is None else choose(self.is_real_BT),
        )

    def embeddings(self, embed: nn.Module) -> Tensor:
        return embed(self.tokens_BT) if self.embeds_BTD is None else self.embeds_BTD

    def real_flags(self) -> Tensor:
        if self.is_real_BT is None:
            return torch.ones_like(self.tokens_BT, dtype=torch.bool)
        return self.is_real_BT


class _Pass(NamedTuple):
    """A pass that a crop can undo."""

    memory_before: Cache
    passage: Passage


MAX_RECORDED_PASSES = 64
"""More are not undone: each one holds a copy of all states."""


class DecodingCache(HFCache):
    """`Cache` with the interface of transformers.

    Keys and values alone can be cropped at any time. States (of Canon, of recurrences, of a full
    window) cannot: once `activate_past_recording` is called, the passes since the last crop can be
    undone, as in transformers' own layers of this kind. A crop into the middle of a pass leaves
    tokens over, which the model reads again with the next ones.
    """

    is_compileable = False
    is_croppable = True
    is_initialized = True

    def __init__(self, args: ModelArgs) -> None:
        self._prepare([layer.window for layer in args.layer_args])

    def _prepare(self, windows: list[int]) -> None:
        """Begin without tokens; `windows`: as of a Cache."""
        super().__init__(layers=[])
        self._windows = windows
        self.record_past = False
        self.reset()

    def reset(self) -> None:
        self.memory = self._empty_memory()
        self.num_rows = 0  # before the first tokens
        self._device = torch.device("cpu")  # of the tokens
        self.left_over: Passage | None = None
        self._passes: deque[_Pass] = deque(maxlen=MAX_RECORDED_PASSES)

    def _empty_memory(self) -> Cache:
        return Cache(len(self._windows), windows=self._windows)

    @property
    def is_fixed(self) -> bool:
        """Whether each pass is of one token, at a position that only the device knows."""
        return self.memory.position is not None

    def __len__(self) -> int:
        return len(self._windows)

    def get_seq_length(self, *args: object, **kwargs: object) -> int:
        if self.left_over is None:
            return self.memory.length
        return self.memory.length + self.left_over.tokens_BT.shape[1]

    def get_max_cache_shape(self, *args: object, **kwargs: object) -> int:
        return -1

    get_max_length = get_max_cache_shape

    @property
    def batch_size(self) -> int:
        return self.num_rows or -1

    max_batch_size = batch_size

    def begin(self, passage: Passage, embed: nn.Module) -> Passage:
        """Return what is read now: what a crop has left over, and this passage."""
        if self.left_over is not None:
            passage = self.left_over.joined(passage, embed)
            self.left_over = None
        self.num_rows = len(passage.tokens_BT)
        self._device = passage.tokens_BT.device
        if self.record_past:
            self._passes.append(_Pass(self.memory.snapshot(), passage))
        return passage

    def activate_past_recording(self) -> None:
        """Keep what is needed to undo the passes from now on."""
        self.record_past = True

    def is_recording_past(self, *args: object, **kwargs: object) -> bool:
        return self.record_past

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -`tokens_to_remove` tokens; if positive, all after so many (4.57)."""
        length = self.get_seq_length() + tokens_to_remove
        if tokens_to_remove > 0:
            length = min(tokens_to_remove, self.get_seq_length())
        if length < 0:
            raise ValueError(f"cannot remove {-tokens_to_remove} of {self.get_seq_length()} tokens")
        if length < self.get_seq_length():
            self._cut(length)
        self._passes.clear()

    def _cut(self, length: int) -> None:
        """Forget the tokens after the first `length`."""
        # The tokens so far are those in the memory, and the ones left over, which the memory has
        # not read. A cut among the latter leaves the memory as it is.
        num_read = self.memory.length
        if length >= num_read:
            assert self.left_over is not None
            self.left_over = self.left_over.first(length - num_read)
            return

        # Keys and values are cut at the token.
        if self.memory.cut(length):
            self.left_over = None
            return

        # States are not: take the memory before the last pass that began at `length` or earlier.
        # The first tokens of that pass, up to `length`, must be read again.
        candidates = [a_pass for a_pass in self._passes if a_pass.memory_before.length <= length]
        if not candidates:
            raise ValueError(
                f"the cache cannot be cropped to {length} tokens: states of Canon, recurrences and "
                "full windows cannot be cut. Before passes that may be undone, call "
                f"activate_past_recording(): the last {MAX_RECORDED_PASSES} are kept"
            )
        self.memory, passage = candidates[-1]
        num_left_over = length - self.memory.length
        self.left_over = passage.first(num_left_over) if num_left_over else None

    def batch_select_indices(self, indices: Tensor) -> None:
        """Replace row i by row indices[i]; earlier passes can't be undone any more."""
        self.memory.select_rows(indices)
        self.num_rows = len(indices)
        if self.left_over is not None:
            self.left_over = self.left_over.rows(indices)
        self._passes.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.num_rows).repeat_interleave(repeats))

    def update(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("only the model itself updates this cache")


class StaticDecodingCache(DecodingCache):
    """A DecodingCache for at most `max_cache_len` tokens, with room for them from the start.

    It is a pytree, so that torch.export takes a pass with it: an empty one for the pass over a
    prompt, or one with tokens for the pass over a single next token, at any later position. The
    cache for the pass after that is in the outputs.
    """

    def __init__(self, args: ModelArgs, max_cache_len: int) -> None:
        self._max_tokens = max_cache_len
        super().__init__(args)
        _register_pytree(StaticDecodingCache)

    @property
    def max_cache_len(self) -> int:
        return self._max_tokens

    def _empty_memory(self) -> Cache:
        return Cache(len(self._windows), self._max_tokens, self._windows)

    def get_max_cache_shape(self, *args: object, **kwargs: object) -> int:
        return self._max_tokens

    get_max_length = get_max_cache_shape

    def get_seq_length(self, *args: object, **kwargs: object) -> int:
        if self.memory.position is None:
            return super().get_seq_length()
        return int(self.memory.position)  # the host waits

    def begin(self, passage: Passage, embed: nn.Module) -> Passage:
        """Return what is read now. Raises ValueError for more than `max_cache_len` tokens."""
        num_tokens = passage.tokens_BT.shape[1]
        if not (self.is_fixed and torch.compiler.is_compiling()):
            length = self.get_seq_length() + num_tokens
            if length > self._max_tokens:
                raise ValueError(f"{length} tokens > max_cache_len = {self._max_tokens}")
        if num_tokens != 1 or self.record_past:
            self.memory.unfix()
        return super().begin(passage, embed)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens, as of a DecodingCache."""
        self.memory.unfix()
        super().crop(tokens_to_remove)

    def flatten(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the tensors, and the context of `unflatten`, which JSON can express."""
        if self.left_over is not None:
            raise ValueError("after a crop, read a token before this cache is exported")
        if self.num_rows and not self.is_fixed:
            self.memory.fix(self._device)
        context = {
            "max_cache_len": self._max_tokens,
            "windows": self._windows,
            "num_rows": self.num_rows,
            "canon_options": self.memory.canon_options(),
        }
        return [self.memory.tensors()], context

    @classmethod
    def unflatten(cls, children: Iterable[Any], context: dict[str, Any]) -> Self:
        """Return the cache that `flatten` has made into these."""
        cache = cls.__new__(cls)
        cache._max_tokens = context["max_cache_len"]
        cache._prepare(list(context["windows"]))
        cache.num_rows = context["num_rows"]
        (tensors,) = children
        cache.memory.restore(tensors, context["canon_options"])
        return cache


@functools.cache
def _register_pytree(kind: type[StaticDecodingCache]) -> None:
    """Let torch.export find the tensors of such caches."""

    def flatten_with_keys(cache: StaticDecodingCache) -> Any:
        children, context = cache.flatten()
        return [(pytree.GetAttrKey("memory"), child) for child in children], context

    pytree.register_pytree_node(
        kind,
        kind.flatten,
        kind.unflatten,
        flatten_with_keys_fn=flatten_with_keys,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
    )


# -- the modules of model/ under other names -------------------------------------------------------


class Place(NamedTuple):
    """Where something is registered that a module of model/ reads as its own child."""

    owner: nn.Module | None
    """None: that module itself."""
    name: str


class Renamed(nn.Module):
    """A module of model/ whose children are registered under the names of LlamaCanon.

    Its forward pass reads them by our names, which lead to their places: `block.attention` is
    `block.self_attn`. So it reads what is registered now, also if that was replaced.
    """

    _kind: type[nn.Module]
    """The class of model/."""
    _places: dict[str, Place]
    """By our name."""

    def __getattr__(self, name: str) -> Any:
        place = self.__dict__.get("_places", {}).get(name)
        if place is None:
            return super().__getattr__(name)
        owner = self if place.owner is None else place.owner
        # found here, a module takes half the time: of each token and layer there are some twenty
        module = owner.__dict__["_modules"].get(place.name)
        return getattr(owner, place.name) if module is None else module

    def __reduce__(self) -> Any:
        # a class that is made at run time is pickled by the class of model/
        return _without_values, (self._kind,), self.__dict__


class LlamaCanonDecoderLayer(GradientCheckpointingLayer, Renamed, TransformerBlock):
    """A block, also with gradient checkpointing as in transformers."""

    _kind = TransformerBlock


@functools.cache
def _renamed_class(kind: Any) -> Any:
    """Return the class of modules of `kind` whose children have other names."""
    if kind is TransformerBlock:
        return LlamaCanonDecoderLayer
    fields = {"__module__": __name__, "_kind": kind}
    return type(f"LlamaCanon{kind.__name__}", (Renamed, kind), fields)


def _without_values(kind: Any) -> Any:
    renamed_kind = _renamed_class(kind)
    return renamed_kind.__new__(renamed_kind)


def rename(module: nn.Module, names: Names) -> None:
    """Register what is below `module` under LlamaCanon's names.

    `names`: paths in `module`, and those that LlamaCanon has instead. Their parts correspond, as
    in "attention.wq" and "self_attn.q_proj", but where LlamaCanon has no module for one of ours:
    the gate of our router is "router.gate" and "gate". Such a grandchild becomes a child. Paths
    that `module` does not have are those of other variants.
    """
    # Sort the names by the child that they begin with.
    new_names: Names = {}  # of children
    names_in_child: dict[str, Names] = {}
    names_of_grandchildren: dict[str, Names] = {}
    for our_path, hf_path in names.items():
        child_name, _, our_rest = our_path.partition(".")
        hf_child_name, _, hf_rest = hf_path.partition(".")
        if getattr(module, child_name, None) is None:
            continue
        if our_rest and not hf_rest:
            names_of_grandchildren.setdefault(child_name, {})[our_rest] = hf_child_name
            continue
        new_names[child_name] = hf_child_name
        if our_rest:
            names_in_child.setdefault(child_name, {})[our_rest] = hf_rest

    # From the bottom up: children are found by our names until they are renamed.
    for child_name, child_names in names_in_child.items():
        child = getattr(module, child_name)
        if isinstance(child, nn.Module):
            rename(child, child_names)
    for child_name, child_names in names_of_grandchildren.items():
        _move_children(getattr(module, child_name), module, child_names)
    _rename_children(module, new_names)


_TABLES = ("_modules", "_parameters", "_buffers")
"""Where a module of torch registers its children and tensors, by name."""


def _rename_children(module: nn.Module, new_names: Names) -> None:
    """Register children and tensors of `module` under new names, in the same order."""
    places: dict[str, Place] = {}
    for table_name in _TABLES:
        table = getattr(module, table_name)
        registered = list(table.items())
        table.clear()
        for name, value in registered:
            new_name = new_names.get(name, name)
            table[new_name] = value
            if new_name != name:
                places[name] = Place(None, new_name)
    _find_at(module, places)


def _move_children(module: nn.Module, parent: nn.Module, new_names: Names) -> None:
    """Register children and tensors of `module` in its `parent`, under new names."""
    places: dict[str, Place] = {}
    for table_name in _TABLES:
        table = getattr(module, table_name)
        parent_table = getattr(parent, table_name)
        for name, new_name in new_names.items():
            if table.get(name) is not None:
                parent_table[new_name] = table.pop(name)
                places[name] = Place(parent, new_name)
    _find_at(module, places)


def _find_at(module: nn.Module, places: dict[str, Place]) -> None:
    """Let `module.NAME` be what is registered at places[NAME], by making it a `Renamed`."""
    if places:
        kind: Any = type(module)
        module.__class__ = _renamed_class(kind)
        module.__dict__["_places"] = places


def _names_of_block(layer: ModelArgs) -> Names:
    """Return the names of a layer's modules and tensors, by our names."""
    names = {**LLAMA_NAMING.block, **LLAMA_NAMING.bare}
    if not keeps_names(layer):
        return names
    others = {ours: hf for ours, hf in names.items() if not ours.startswith("attention.")}
    return {**others, "attention": OWN_MIXER}


class LlamaCanonRotaryEmbedding(Rope):
    """The rotation of all layers that have it; a layer on another device uses a copy there."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        is_new = self.cos_TR.is_meta
        super()._apply(fn, recurse)
        if is_new and not self.cos_TR.is_meta:  # by `to_empty`
            self.reset(self.cos_TR.device)
        return self

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cos_TR and sin_TR on `device`."""
        if self.cos_TR.device == device:
            return self.cos_TR, self.sin_TR
        copies: dict[torch.device, Rope] = self.__dict__.setdefault("_copies", {})
        if device not in copies:
            copies[device] = Rope(self.args)
            copies[device].reset(device)
        return copies[device].tables(device)


# -- quantized loading ---------------------------------------------------------------------------


HEADS = ("lm_head", "score")
"""What transformers leaves out of quantization, unless its config lists other modules."""
SMALL_LINEAR = ("mlp.gate", "smear.gate", "self_attn.a_proj", "self_attn.b_proj")
"""Layers with an output per expert or head, which choose and scale others: routers and gates."""


def _without_small_layers(quantization: Any) -> Any:
    """Return the config of torchao or bitsandbytes that leaves out SMALL_LINEAR as well.

    As a dict it lacks the fields that are not set, so transformers makes the object first.
    """
    changed = copy.deepcopy(quantization)
    if isinstance(changed, dict):
        changed = AutoQuantizationConfig.from_dict(changed)
    for field in ("modules_to_not_convert", "llm_int8_skip_modules"):
        if hasattr(changed, field):
            left_out = getattr(changed, field)
            if left_out is None:
                left_out = HEADS
            # parts of names in transformers 4.57, their ends or patterns of beginnings in 5
            patterns = [f".*{re.escape(name)}" for name in SMALL_LINEAR]
            setattr(changed, field, [*left_out, *SMALL_LINEAR, *patterns])
    return changed


def _check_4bit_layers(model: nn.Module) -> None:
    """Raise ValueError for layers of bitsandbytes whose sizes its kernels for CPUs do not take."""
    unsupported = []
    for name, module in model.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is None or not getattr(module, "support_avx512bf16_for_cpu", False):
            continue
        num_outputs, num_inputs = state.shape
        if module.weight.device.type == "cpu" and (
            num_outputs % 32 or num_inputs % state.blocksize
        ):
            unsupported.append(name)
    if unsupported:
        raise ValueError(
            "bitsandbytes runs 4-bit layers on this CPU only with multiples of 32 outputs and of "
            f"its blocks of inputs. Pass llm_int8_skip_modules = {[*HEADS, *unsupported]}, or load "
            "in 8 bits"
        )


# -- the models ----------------------------------------------------------------------------------


class LlamaCanonPreTrainedModel(PreTrainedModel):
    """What the model and its heads share."""

    config_class = LlamaCanonConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LlamaCanonDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flex_attn = True
    _is_stateful = False  # a DecodingCache can be cropped

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load as transformers does; weights frozen in training (cst-Canon) stay frozen.

        `quantization_config` leaves out SMALL_LINEAR too. Raises ValueError for layers that it can
        quantize, but not run.
        """
        quantization = kwargs.get("quantization_config")
        if quantization is not None:
            kwargs["quantization_config"] = _without_small_layers(quantization)
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        _check_4bit_layers(model)
        base: Any = model.base_model
        for layer, layer_args in zip(base.layers, base.args.layer_args, strict=True):
            for module in layer.modules():
                if isinstance(module, Canon):
                    module.weight.requires_grad_(layer_args.canon_trainable)
        return loaded

    def static_cache(self, max_cache_len: int) -> "StaticDecodingCache":
        """Return an empty cache with room for `max_cache_len` tokens."""
        base: Any = self.base_model
        base.check_length(max_cache_len)
        return StaticDecodingCache(base.args, max_cache_len)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Write the weights that training starts from; see model/init.py."""
        base: Any = self.base_model
        names = {registered: name for name, registered in base.named_modules()}
        if module is not getattr(self, "lm_head", None) and module not in names:
            # such as a head for classes, or an enlarged embedding before it replaces the old one
            super()._init_weights(module)
            return

        place = f"model.{names[module]}" if module in names else "lm_head"
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta or getattr(parameter, "_is_hf_initialized", False):
                continue
            our_name = name_to_ours(f"{place}.{name}")
            value = initial_value(base.args, our_name, parameter.shape)
            parameter.copy_(value.rows(0, len(parameter)))

        # Buffers: the rotary tables, and the experts' biases.
        if isinstance(module, Rope):
            if not module.cos_TR.is_meta:
                module.reset(module.cos_TR.device)
            return
        for buffer in module.buffers(recurse=False):
            if not buffer.is_meta and not getattr(buffer, "_is_hf_initialized", False):
                buffer.zero_()


class LlamaCanonModel(LlamaCanonPreTrainedModel):
    """The blocks of `Transformer`, from ids or embeddings to hidden states.

    Raises ValueError for unsupported options. Positions count from the first column, including
    padding; only differences matter.
    """

    def __init__(self, config: LlamaCanonConfig) -> None:
        super().__init__(config)
        fields = config.to_dict()
        if layout(fields) != LINGUA:
            raise ValueError(
                'rope_version = "huggingface" is unsupported here: '
                "import these weights with `canon hf import`"
            )
        # the files of own mixers are next to this one
        self.args = with_mixers_in(to_args(fields), str(Path(__file__).parent))
        # an output layer is that of LlamaCanonForCausalLM
        core = Transformer(
            replace(self.args, tie_embeddings=True), attention_backend=self._attention_backend
        )

        # All modules of `core`, in the order of the released class: embedding, layers, norm.
        self.embed_tokens = core.tok_embeddings
        self.layers = nn.ModuleList(core.layers.values())
        for layer, layer_args in zip(self.layers, self.args.layer_args, strict=True):
            rename(layer, _names_of_block(layer_args))
        self.embed_norm = core.embed_norm
        self.smear = core.smear
        self.norm = core.norm
        self.attends = core.attends
        self.rotary_emb = nn.ModuleList(self._take_ropes())
        self.post_init()

    def _take_ropes(self) -> list[Rope]:
        """Return the rotations, of which the layers then are users, not owners."""
        ropes: dict[Rope, None] = {}
        for layer in self.layers:
            attention: Any = layer.attention
            rope = attention._modules.pop("rope", None)
            if isinstance(rope, Rope):
                attention.__dict__["rope"] = rope
                ropes[rope] = None
        for rope in ropes:
            rope.__class__ = LlamaCanonRotaryEmbedding
        return list(ropes)

    @property
    def _attention_backend(self) -> str:
        is_flex = self.config._attn_implementation == "flex_attention"
        return "flex" if is_flex else "sdpa"

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DecodingCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return the normalized hidden states [B, T, D], and those before each layer if asked for.

        `attention_mask`: 1 for tokens, 0 for padding on either side, [B, S] or [B, T].
        `position_ids` must be consecutive. `output_attentions`: also return the weights of each
        layer of attention, [B, H, T, S].
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("expected either input_ids or inputs_embeds")
        if getattr(self, "_is_replica", False):
            raise ValueError("nn.DataParallel can't copy this model; use one process per GPU")
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if output_attentions and self._attention_backend == "flex":
            raise ValueError(
                "output_attentions is unsupported by flex_attention: "
                'use attn_implementation = "eager" or "sdpa"'
            )

        is_checkpointing = any(layer.gradient_checkpointing for layer in self.layers)
        if output_attentions and is_checkpointing and self.training:
            raise ValueError("output_attentions is unsupported with gradient checkpointing")

        # The tokens, and the cache of those before them: by default none in training.
        passage = self._passage(input_ids, inputs_embeds, attention_mask, past_key_values)
        _check_positions(position_ids, passage.is_real_BT)
        cache = self._cache(past_key_values, use_cache, passage.tokens_BT)
        num_tokens = passage.tokens_BT.shape[1]
        if cache is not None:
            passage = cache.begin(passage, self.embed_tokens)

        for attend in self.attends.values():
            attend.backend = self._attention_backend  # `set_attn_implementation` may change it
        contexts = layer_contexts(
            self.args,
            self.attends,
            passage.tokens_BT,
            passage.is_real_BT,
            None if cache is None else cache.memory,
        )
        h_BTD = passage.embeddings(self.embed_tokens)
        h_BTD = input_of_blocks(h_BTD, self.embed_norm, self.smear, contexts[0])

        hidden_states: list[Tensor] = []
        attentions: list[Tensor] = []
        with _recorded(self.attends, attentions) if output_attentions else nullcontext():
            for layer, context in zip(self.layers, contexts, strict=True):
                if output_hidden_states:
                    hidden_states.append(h_BTD)
                h_BTD = layer(h_BTD, context)
                if isinstance(h_BTD, tuple):  # with experts in training, also their load
                    h_BTD = h_BTD[0]
        if cache is not None:
            cache.memory.end(passage.tokens_BT.shape[1])
        h_BTD = self.norm(h_BTD)
        hidden_states.append(h_BTD)

        # without the tokens that a crop of the cache had left over
        if passage.tokens_BT.shape[1] > num_tokens:
            h_BTD = h_BTD[:, -num_tokens:]
            hidden_states = [state_BTD[:, -num_tokens:] for state_BTD in hidden_states]
            attentions = [weights[:, :, -num_tokens:] for weights in attentions]
        return BaseModelOutputWithPast(
            last_hidden_state=h_BTD,
            past_key_values=cache,
            hidden_states=tuple(hidden_states) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
        )

    def _passage(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        cache: DecodingCache | None,
    ) -> Passage:
        """Return the tokens of a call."""
        tokens_BT = input_ids
        if tokens_BT is None:
            # Ids are read for EOS only, which ends a document: known by its embedding.
            assert inputs_embeds is not None
            eos_id = self.args.eos_id
            other_id = 1 if eos_id == 0 else 0
            shape = inputs_embeds.shape[:2]
            tokens_BT = inputs_embeds.new_full(shape, other_id, dtype=torch.long)
            if self.args.document_mask:
                ids = torch.full((1,), eos_id, device=inputs_embeds.device)
                is_eos_BT = (inputs_embeds == self.embed_tokens(ids)).all(dim=-1)
                tokens_BT = tokens_BT.masked_fill(is_eos_BT, eos_id)
        return Passage(tokens_BT, inputs_embeds, _real_tokens(attention_mask, tokens_BT, cache))

    def _cache(
        self, past_key_values: Any, use_cache: bool | None, tokens_BT: Tensor
    ) -> DecodingCache | None:
        """Return the checked cache of the call, a new one if needed, or None without."""
        rows, num_tokens = tokens_BT.shape
        if use_cache is None:
            # a program with a cache is exported only if the cache is passed
            is_possible = not self.training and not torch.compiler.is_exporting()
            use_cache = self.config.use_cache and is_possible
        if use_cache and self.training and self.is_gradient_checkpointing:
            logger.warning_once("use_cache is off, which gradient checkpointing needs")
            use_cache = False
            past_key_values = None
        if past_key_values is None and not use_cache:
            self.check_length(num_tokens)
            return None

        cache = past_key_values
        if cache is None:
            cache = DecodingCache(self.args)
        if not isinstance(cache, DecodingCache):
            raise ValueError(
                f"past_key_values is a {type(cache).__name__}, expected DecodingCache: leave it "
                "out, or make one of fixed size by model.static_cache(max_cache_len)"
            )
        if torch.compiler.is_exporting() and not isinstance(cache, StaticDecodingCache):
            raise ValueError(
                "torch.export needs a cache of fixed size: pass past_key_values = "
                "model.static_cache(max_cache_len), or leave out use_cache"
            )

        # An empty cache takes any number of rows. An exported step is for any position.
        if not (cache.is_fixed and torch.compiler.is_compiling()):
            self.check_length(num_tokens + cache.get_seq_length())
        if cache.num_rows not in (0, rows):
            raise ValueError(f"past_key_values has {cache.num_rows} rows, input_ids {rows}")
        return cache

    def check_length(self, num_tokens: int) -> None:
        """Raise ValueError for more tokens than the model has positions."""
        limit = self.config.max_position_embeddings
        if num_tokens > limit:
            raise ValueError(
                f"{num_tokens} tokens > max_position_embeddings = {limit}; "
                "for more use from_pretrained(..., max_position_embeddings=N)"
            )


class LlamaCanonForCausalLM(LlamaCanonPreTrainedModel, GenerationMixin):
    """`Transformer`: the model with its output layer."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: LlamaCanonConfig) -> None:
        super().__init__(config)
        self.model = LlamaCanonModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *others: Any
    ) -> None:
        """Let `generate` use a DecodingCache, unless the caller passes one or wants none."""
        generation_mode, _, max_cache_length = others  # and the number of rows
        self.model.check_length(max_cache_length)

        implementation = generation_config.cache_implementation
        # transformers 4.57 sets "dynamic_full" for assisted decoding
        if implementation not in (None, "dynamic", "dynamic_full", "static"):
            raise ValueError(
                f'cache_implementation = "{implementation}" is unsupported: expected "static", '
                "or leave it out"
            )

        cache = model_kwargs.get("past_key_values")
        if cache is None and generation_config.use_cache is not False:
            cache = DecodingCache(self.model.args)
            if implementation == "static":
                larger = getattr(generation_config, "max_cache_len", None) or 0
                cache = self.static_cache(max(max_cache_length, larger))
            model_kwargs["past_key_values"] = cache
        # what is generated by guesses may be undone
        is_assistant = getattr(generation_config, "is_assistant", False)
        is_assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
        if isinstance(cache, DecodingCache) and (is_assistant or is_assisted):
            cache.activate_past_recording()

    def _valid_auto_compile_criteria(
        self, model_kwargs: dict[str, Any], generation_config: Any
    ) -> bool:
        """Let `generate` compile the pass over a token if `compile_config` is set, on a CPU too.

        Only then: the CUDA graphs of transformers' default have not been tried.
        """
        is_asked = generation_config.compile_config and not generation_config.disable_compile
        if is_asked and isinstance(model_kwargs.get("past_key_values"), StaticDecodingCache):
            return True
        others = super()._valid_auto_compile_criteria  # type: ignore[misc]  # self is a Protocol
        return others(model_kwargs, generation_config)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DecodingCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits [B, T, V], or those of the last `logits_to_keep` tokens.

        The other arguments are those of LlamaCanonModel. `labels` [B, T]: the input ids, -100 for
        positions without loss; the loss is that of the next token. A tensor `logits_to_keep` holds
        positions.
        """
        if use_cache is None and labels is not None:
            use_cache = False
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BTV = self.lm_head(outputs.last_hidden_state[:, kept])

        # transformers' loss shifts the labels by one.
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits_BTV, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits_BTV,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class LlamaCanonForSequenceClassification(
    GenericForSequenceClassification, LlamaCanonPreTrainedModel
):
    """The model with a score per class, of the last token that is no padding."""

    def __init__(self, config: LlamaCanonConfig) -> None:
        LlamaCanonPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = LlamaCanonModel(config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()


class LlamaCanonForTokenClassification(GenericForTokenClassification, LlamaCanonPreTrainedModel):
    """The model with a score per class, of each token."""

    def __init__(self, config: LlamaCanonConfig) -> None:
        LlamaCanonPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = LlamaCanonModel(config)
        self.dropout = nn.Dropout(getattr(config, "classifier_dropout", None) or 0.0)
        self.score = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()


@contextmanager
def _recorded(attends: Mapping[str, Attend], attentions: list[Tensor]) -> Iterator[None]:
    """Add the attention weights of each layer to `attentions`; outputs are computed from them."""

    def record(attend: Attend, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        q_BTHK, k_BSGK, v_BSGK, *others = inputs
        weights_BHTS = attend.weights(q_BTHK, k_BSGK, *others)
        attentions.append(weights_BHTS)
        return attend.weighted(weights_BHTS, v_BSGK)

    handles = [attend.register_forward_hook(record) for attend in attends.values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _real_tokens(
    attention_mask: Tensor | None, tokens_BT: Tensor, cache: DecodingCache | None
) -> Tensor | None:
    """Return which of these tokens are not padding [B, T]; None if all are."""
    if attention_mask is None:
        return None

    # A mask also of the cached tokens, as transformers passes it, or of these tokens only. An
    # exported step does not know how many are cached.
    rows, num_tokens = tokens_BT.shape
    is_any_length = cache is not None and cache.is_fixed and torch.compiler.is_compiling()
    if attention_mask.shape != (rows, num_tokens) and not is_any_length:
        num_cached = cache.get_seq_length() if cache is not None else 0
        expected_shape = (rows, num_cached + num_tokens)
        if attention_mask.shape != expected_shape:
            shape = tuple(attention_mask.shape)
            raise ValueError(f"attention_mask has shape {shape}, expected {expected_shape}")

    is_real_BT = attention_mask[:, -num_tokens:].bool()
    # attention is faster without a mask; torch.compile can't branch on values of a tensor
    if not torch.compiler.is_compiling() and bool(is_real_BT.all()):
        return None
    return is_real_BT


def _check_positions(position_ids: Tensor | None, is_real_BT: Tensor | None) -> None:
    """Raise ValueError unless the positions of neighboring tokens differ by 1."""
    if position_ids is None or position_ids.shape[-1] < 2:
        return

    steps_BT = position_ids.diff(dim=-1)
    if is_real_BT is not None:  # positions of padding have no meaning
        are_both_real = is_real_BT[:, 1:] & is_real_BT[:, :-1]
        steps_BT = torch.where(are_both_real, steps_BT, 1)
    if not bool((steps_BT == 1).all()):
        raise ValueError("position_ids must be consecutive; leave them out")
