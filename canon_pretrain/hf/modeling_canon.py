"""The exported model for transformers: from_pretrained(OUT, trust_remote_code=True).

It wraps a copy of `Transformer`, whose modules are registered under the names of
LlamaCanonForCausalLM; modules that are replaced there (LoRA, a larger vocabulary) are used by the
forward pass. B rows, T tokens, S tokens including the cached ones, V vocabulary.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache as HFCache
from transformers.configuration_utils import PretrainedConfig
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

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
from canon_pretrain.model.attention import Rope
from canon_pretrain.model.cache import Cache
from canon_pretrain.model.canon import Canon
from canon_pretrain.model.init import initial_value
from canon_pretrain.model.transformer import Transformer, TransformerBlock


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


class DecodingCache(HFCache):
    """`Cache` with the interface of transformers. It can't be cropped: no assisted generation."""

    is_compileable = False
    is_croppable = False
    is_initialized = True

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(layers=[])
        self.args = args
        self.reset()

    def reset(self) -> None:
        self.memory = Cache.of(self.args)
        self.rows = 0  # before the first tokens

    def __len__(self) -> int:
        return self.args.num_layers

    def get_seq_length(self, *args: object, **kwargs: object) -> int:
        return self.memory.length

    def get_max_cache_shape(self, *args: object, **kwargs: object) -> int:
        return -1

    get_max_length = get_max_cache_shape

    def batch_select_indices(self, indices: Tensor) -> None:
        """Replace row i by row indices[i]."""
        self.memory.select_rows(indices)
        self.rows = len(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.rows).repeat_interleave(repeats))

    def crop(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError("the cache can't be cropped: use greedy, sampling or beam search")

    def activate_past_recording(self) -> None:
        self.crop()

    def update(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("only the model itself updates this cache")


class _Namespace(nn.Module):
    """Holds modules under their names; its forward never runs."""


READ = ("self_attn.o_norm", "mlp.gate")
"""Modules of a layer that the block reads the weight of, without calling them."""


class LlamaCanonDecoderLayer(GradientCheckpointingLayer):
    """A registered wrapper of a block, so that hooks and sharding see its calls."""

    block: TransformerBlock

    def __init__(self, block: TransformerBlock, args: ModelArgs) -> None:
        super().__init__()
        object.__setattr__(self, "block", block)  # unregistered: its modules have other names here
        self.self_attn = _Namespace()
        self.mlp = _Namespace()
        names = LLAMA_NAMING.block
        bare_names = LLAMA_NAMING.bare
        if keeps_names(args):
            setattr(self, OWN_MIXER, block.attention)
            names = _outside_mixer(names)
            bare_names = _outside_mixer(bare_names)
        modules = _register(block, self, names.items())
        bare_tensors = _register(block, self, bare_names.items())
        self._registrations = modules + bare_tensors

        # hooks of modules do not run for these, because the block does not call them
        namespaces = dict.fromkeys(registration.hf_owner for registration in bare_tensors)
        read_modules = [module for name, module in self.named_modules() if name in READ]
        self._uncalled = [*namespaces, *read_modules]

    def train(self, mode: bool = True) -> "LlamaCanonDecoderLayer":
        """Set the mode of the block too: its experts drop tokens in training."""
        super().train(mode)
        self.block.train(mode)
        return self

    def forward(self, *args: Any) -> Any:
        """Return what the block returns; see `TransformerBlock`."""
        # accelerate loads the offloaded weights of a module when it is called
        hooked: list[Any] = [module for module in self._uncalled if hasattr(module, "_hf_hook")]
        for module in hooked:
            module._hf_hook.pre_forward(module)
        _update(self._registrations)
        try:
            return self.block(*args)
        finally:
            for module in hooked:
                module._hf_hook.post_forward(module, None)
            if hooked:
                _update(self._registrations)  # frees the loaded weights


def _outside_mixer(names: Names) -> Names:
    """Return the names of a layer's modules that are not of its mixer."""
    return {ours: hf for ours, hf in names.items() if not ours.startswith("attention.")}


class _Registration(NamedTuple):
    """A module or tensor that is `owner.name` in `Transformer`, and `hf_owner.hf_name` here."""

    owner: Any
    name: str
    hf_owner: Any
    hf_name: str


def _register(
    core: nn.Module, root: nn.Module, names: Iterable[tuple[str, str]]
) -> list[_Registration]:
    """Register under `root`, by their names here, the modules and tensors that `core` has.

    `names` are pairs of a name in `core` and one under `root`.
    """
    registrations: list[_Registration] = []
    for our_name, hf_name in names:
        # Find it in `core`, which has only the modules of its variant.
        *path, name = our_name.split(".")
        owner: Any = core
        for attribute in path:
            owner = getattr(owner, attribute, None)
        value = getattr(owner, name, None)
        if not isinstance(value, nn.Module | Tensor):
            continue
        # a group, such as a projection of two layers, is registered by its children's names
        if isinstance(value, nn.Module) and any(True for _ in value.children()):
            continue

        # Put it under `root`, in namespaces that are created when they are first needed.
        *hf_path, hf_leaf = hf_name.split(".")
        hf_owner: Any = root
        for attribute in hf_path:
            if not hasattr(hf_owner, attribute):
                setattr(hf_owner, attribute, _Namespace())
            hf_owner = getattr(hf_owner, attribute)
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            hf_owner.register_buffer(hf_leaf, value)
        else:
            setattr(hf_owner, hf_leaf, value)
        registrations.append(_Registration(owner, name, hf_owner, hf_leaf))
    return registrations


def _update(registrations: Iterable[_Registration]) -> None:
    """Set in `Transformer` what is registered now: modules and weights may have been replaced."""
    for owner, name, hf_owner, hf_name in registrations:
        value = getattr(hf_owner, hf_name)
        if getattr(owner, name) is not value:
            setattr(owner, name, value)


class LlamaCanonForCausalLM(PreTrainedModel, GenerationMixin):
    """`Transformer` for transformers. Raises ValueError for unsupported options.

    Positions count from the first column, including padding; only differences matter.
    """

    core: Transformer
    model: Any
    lm_head: Any
    config_class = LlamaCanonConfig
    supports_gradient_checkpointing = True
    _no_split_modules = ["LlamaCanonDecoderLayer"]
    _supports_sdpa = True
    _supports_flex_attn = True
    _is_stateful = True  # no standard cache, no assisted generation
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: LlamaCanonConfig) -> None:
        super().__init__(config)
        fields = config.to_dict()
        if layout(fields) != LINGUA:
            raise ValueError(
                'rope_version = "huggingface" is unsupported here: '
                "import these weights with `canon hf import`"
            )
        backend = "flex" if config._attn_implementation == "flex_attention" else "sdpa"
        # the files of own mixers are next to this one
        args = with_mixers_in(to_args(fields), str(Path(__file__).parent))
        core = Transformer(args, attention_backend=backend)
        object.__setattr__(self, "core", core)  # unregistered: its modules have other names here

        # Register the modules in the order of the released class: embedding, layers, output.
        self.model = _Namespace()
        embedding, *norm_and_output = LLAMA_NAMING.ends.items()
        self._registrations = _register(core, self, [embedding])
        blocks: Any = core.layers.values()
        self.model.layers = nn.ModuleList(map(LlamaCanonDecoderLayer, blocks, args.layer_args))
        for number, layer in enumerate(self.model.layers):
            core.layers[str(number)] = layer
        self._registrations += _register(core, self, norm_and_output)
        self._registrations += _register(core, self, LLAMA_NAMING.bare.items())  # of smear
        if config.tie_word_embeddings:  # `Transformer` then has no output layer
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self._registrations.append(_Registration(core, "output", self, "lm_head"))
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load as transformers does; weights frozen in training (cst-Canon) stay frozen."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for layer, layer_args in zip(model.model.layers, model.core.args.layer_args, strict=True):
            for module in layer.modules():
                if isinstance(module, Canon):
                    module.weight.requires_grad_(layer_args.canon_trainable)
        return loaded

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Write the weights that training starts from; see model/init.py."""
        names = {registered: name for name, registered in self.named_modules()}
        if module not in names:  # such as an enlarged embedding, before it replaces the old one
            super()._init_weights(module)
            return

        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta or getattr(parameter, "_is_hf_initialized", False):
                continue
            our_name = name_to_ours(f"{names[module]}.{name}")
            value = initial_value(self.core.args, our_name, parameter.shape)
            parameter.copy_(value.rows(0, len(parameter)))

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *others: Any
    ) -> None:
        """Let `generate` use a DecodingCache, unless the caller passes one or wants none."""
        max_cache_length = others[-1]  # after the generation mode and the number of rows
        self._check_length(max_cache_length)

        implementation = generation_config.cache_implementation
        if implementation not in (None, "dynamic"):
            raise ValueError(
                f'cache_implementation = "{implementation}" is unsupported: leave it out'
            )

        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = DecodingCache(self.core.args)

    def _check_length(self, num_tokens: int) -> None:
        limit = self.config.max_position_embeddings
        if num_tokens > limit:
            raise ValueError(
                f"{num_tokens} tokens > max_position_embeddings = {limit}; "
                "for more use from_pretrained(..., max_position_embeddings=N)"
            )

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: DecodingCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Return logits [B, T, V], or those of the last `logits_to_keep` tokens.

        `attention_mask`: 1 for tokens, 0 for padding on either side, [B, S] or [B, T]. `labels`
        [B, T]: the input ids, -100 for positions without loss; the loss is that of the next token.
        `position_ids` must be consecutive. A tensor `logits_to_keep` holds positions.
        """
        # Refuse what the model cannot compute.
        if input_ids is None or inputs_embeds is not None:
            raise ValueError("expected input_ids; inputs_embeds is unsupported")
        if output_attentions or output_hidden_states:
            raise ValueError("output_attentions and output_hidden_states are unsupported")

        # Which tokens are real, and the cache of those before them: by default none in training.
        tokens_BT = input_ids
        is_real_BT = _real_tokens(attention_mask, tokens_BT, past_key_values)
        _check_positions(kwargs.get("position_ids"), is_real_BT)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and labels is None
        cache = self._cache(past_key_values, bool(use_cache), tokens_BT)
        if getattr(self, "_is_replica", False):
            raise ValueError("nn.DataParallel can't copy this model; use one process per GPU")

        # Let `core` compute with what is registered now, on the device of the tokens.
        _update(self._registrations)
        for layer in self.model.layers:
            rope = getattr(layer.block.attention, "rope", None)
            if isinstance(rope, Rope) and rope.cos_TR.device != tokens_BT.device:
                rope.reset(tokens_BT.device)  # transformers builds models on the meta device

        # `core` computes all logits (0) if their positions are in a tensor.
        is_count = isinstance(logits_to_keep, int)
        logits_BTV = self.core(
            tokens_BT,
            is_real_BT=is_real_BT,
            cache=None if cache is None else cache.memory,
            logits_to_keep=logits_to_keep if is_count else 0,
        )
        if not is_count:
            logits_BTV = logits_BTV[:, logits_to_keep]

        # transformers' loss shifts the labels by one.
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits_BTV, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )

        output = CausalLMOutputWithPast(loss, logits_BTV, past_key_values=cache)
        if return_dict is None:
            return_dict = self.config.return_dict
        return output if return_dict else output.to_tuple()

    def _cache(
        self, past_key_values: Any, use_cache: bool, tokens_BT: Tensor
    ) -> DecodingCache | None:
        """Return the checked cache of the call, a new one if needed, or None without."""
        rows, num_tokens = tokens_BT.shape
        if past_key_values is None and not use_cache:
            self._check_length(num_tokens)
            return None

        cache = past_key_values
        if cache is None:
            cache = DecodingCache(self.core.args)
        if not isinstance(cache, DecodingCache):
            raise ValueError(f"past_key_values is a {type(cache).__name__}, expected DecodingCache")

        # An empty cache takes any number of rows.
        self._check_length(num_tokens + cache.memory.length)
        if cache.rows not in (0, rows):
            raise ValueError(f"past_key_values has {cache.rows} rows, input_ids {rows}")
        cache.rows = rows
        return cache


def _real_tokens(
    attention_mask: Tensor | None, tokens_BT: Tensor, cache: DecodingCache | None
) -> Tensor | None:
    """Return which of these tokens are not padding [B, T]; None if all are."""
    if attention_mask is None:
        return None

    # A mask also of the cached tokens, as transformers passes it, or of these tokens only.
    rows, num_tokens = tokens_BT.shape
    num_cached = cache.get_seq_length() if cache is not None else 0
    expected_shape = (rows, num_cached + num_tokens)
    if attention_mask.shape not in (expected_shape, (rows, num_tokens)):
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
