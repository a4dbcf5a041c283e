"""An export as a model of vLLM: the modules of model/, with vLLM's attention and state pages.

vLLM passes the new tokens of all requests as one row [1, N]. Its attention layers hold keys and
values; for Canon each layer has a page per request, that of a short convolution (`MambaBase`), with
one state of all sites. vLLM assigns pages, and copies them for prefix caching.

Needs vLLM, which is not a dependency of this package: vllm_plugin.py names this module.

Shapes: N new tokens of all requests, D hidden, V vocabulary, H heads, G key-value heads, K head dim.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateCopyFuncCalculator,
    MambaStateDtypeCalculator,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from canon_pretrain.hf.config import HUGGINGFACE, layout, name_to_ours, to_args
from canon_pretrain.hf.reading import interleave_orders
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.cache import Context
from canon_pretrain.model.transformer import Transformer, input_of_blocks
from canon_pretrain.serve.paged_state import Batch, PagedCache
from canon_pretrain.serve.vllm_plugin import check_served, state_shape


class CanonForCausalLM(nn.Module, HasInnerState, IsHybrid):
    """The model of an export, with the interface of vLLM's models."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        args = served_args(vllm_config)
        self.layout = layout(vllm_config.model_config.hf_config.to_dict())
        self.transformer = Transformer(args, attention_backend="sdpa", canon_backend="compiled")

        # The server's layers next to ours: attention, and the pages of Canon's state.
        self.caches: list[PagedCache] = []
        self.states = nn.ModuleList()
        blocks: Iterable[Any] = self.transformer.layers.values()
        for i, (block, kind) in enumerate(zip(blocks, args.layer_args, strict=True)):
            place = f"{prefix}.layers.{i}" if prefix else f"layers.{i}"
            block.attention.attend = PagedAttention(kind, vllm_config, f"{place}.attention")
            self.caches.append(PagedCache(block, kind.canon_kernel - 1))
            self.states.append(CanonState(kind, vllm_config, f"{place}.canon"))

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.transformer.tok_embeddings(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the hidden states before the head, [N, D]."""
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_input_ids(input_ids)
        h_1ND = inputs_embeds[None]
        positions_1N = positions[None]

        batches: dict[int, Batch] = {}
        h_1ND = input_of_blocks(h_1ND, self.transformer.embed_norm, None, Context())
        blocks = self.transformer.layers.values()
        for block, cache, state in zip(blocks, self.caches, self.states, strict=True):
            cache.positions_1N = positions_1N
            context = Context(cache=cache)
            if not cache.canon:
                h_1ND = block(h_1ND, context)
                continue

            # layers whose pages have the same numbers share the indices
            metadata = state.metadata()
            if id(metadata) not in batches:
                batches[id(metadata)] = batch_of(metadata, h_1ND, cache.state.reach)
            pages = None if metadata is None else state.kv_cache[0]
            batch = batches[id(metadata)]
            with cache.state.reading(batch, pages, h_1ND.dtype, h_1ND.device):
                h_1ND = block(h_1ND, context)
        return self.transformer.norm(h_1ND)[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        head = self.transformer.output or self.transformer.tok_embeddings
        return nn.functional.linear(hidden_states, head.weight)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy the tensors of an export; return our names of those that are loaded."""
        args = self.transformer.args
        orders: dict[str, Tensor] = {}
        if self.layout == HUGGINGFACE:
            orders = interleave_orders(args)

        tensors = dict(self.transformer.named_parameters())
        tensors |= dict(self.transformer.named_buffers())
        loaded = set()
        for hf_name, weight in weights:
            name = name_to_ours(hf_name)
            if name == "output.weight" and args.tie_embeddings:
                continue
            if name in orders:
                weight = weight[orders[name]]
            default_weight_loader(tensors[name], weight)
            loaded.add(f"transformer.{name}")
        return loaded

    # -- the size of the state, for vLLM's plan of the memory --

    @classmethod
    def get_mamba_state_shape_from_config(
        cls, vllm_config: VllmConfig
    ) -> tuple[tuple[int, int], ...]:
        """Return the shape of the largest state of a layer."""
        shapes = [state_shape(kind) for kind in served_args(vllm_config).kinds.values()]
        return (max(shapes, key=lambda shape: shape[0] * shape[1]),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return state_dtypes(vllm_config)

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        return MambaStateCopyFuncCalculator.short_conv_state_copy_func()


class PagedAttention(nn.Module):
    """vLLM's attention in place of `Attend`: it also appends keys and values to its pages."""

    def __init__(self, kind: ModelArgs, vllm_config: VllmConfig, place: str) -> None:
        super().__init__()
        self.attention = Attention(
            kind.num_heads,
            kind.head_dim,
            scale=kind.head_dim**-0.5,
            num_kv_heads=kind.kv_heads,
            cache_config=vllm_config.cache_config,
            per_layer_sliding_window=kind.window or None,
            prefix=place,
        )

    def forward(self, q_1NHK: Tensor, k_1NGK: Tensor, v_1NGK: Tensor, mask: None) -> Tensor:
        """Return the output of each head, [1, N, H, K]."""
        q, k, v = (part[0].flatten(1) for part in (q_1NHK, k_1NGK, v_1NGK))
        return self.attention(q, k, v).view_as(q_1NHK)


class CanonState(nn.Module, MambaBase):
    """The pages of a layer's state, for vLLM those of a short convolution of all its sites."""

    def __init__(self, kind: ModelArgs, vllm_config: VllmConfig, place: str) -> None:
        super().__init__()
        self.place = place
        self.shape = state_shape(kind)
        self.dtypes = state_dtypes(vllm_config)
        self.kv_cache = (torch.empty(0),)
        if not kind.canon_set:
            return

        # vLLM finds the layers that have pages here
        layers = get_current_vllm_config().compilation_config.static_forward_context
        if place in layers:
            raise ValueError(f"there are two layers {place}")
        layers[place] = self

    def metadata(self) -> Any:
        """Return vLLM's description of the batch for this layer; None if it measures memory."""
        metadata = get_forward_context().attn_metadata
        return None if metadata is None else metadata[self.place]

    def get_state_shape(self) -> tuple[tuple[int, int], ...]:
        return (self.shape,)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self.dtypes

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.SHORT_CONV


def batch_of(metadata: Any, h_1ND: Tensor, reach: int) -> Batch:
    """Return the batch that vLLM describes: requests with one token, then those with several."""
    num_tokens = h_1ND.shape[1]
    if metadata is None:
        return Batch.of_one_sequence(num_tokens, reach, h_1ND.device)

    # requests with one token have tokens before it
    num_single = metadata.num_decodes
    starts_X = torch.arange(num_single + 1, device=h_1ND.device)
    pages = []
    is_first_R = torch.zeros(num_single, dtype=torch.bool, device=h_1ND.device)
    if num_single:
        pages.append(metadata.state_indices_tensor_d[:num_single].flatten())
    if metadata.num_prefills:
        starts_X = torch.cat((starts_X[:-1], metadata.query_start_loc_p + num_single))
        pages.append(metadata.state_indices_tensor_p)
        is_first_R = torch.cat((is_first_R, ~metadata.has_initial_states_p))
    return Batch.of(starts_X, torch.cat(pages), is_first_R, num_tokens, reach)


def served_args(vllm_config: VllmConfig) -> ModelArgs:
    """Return the model of the export, as long as it is served. Raises UserError if it can't be."""
    fields = vllm_config.model_config.hf_config.to_dict()
    args = to_args(fields)
    check_served(args)
    return replace(args, max_seq_len=vllm_config.model_config.max_model_len)


def state_dtypes(vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
    """Return the dtype of the state: the inputs' own, unless --mamba-cache-dtype sets another."""
    return MambaStateDtypeCalculator.short_conv_state_dtype(
        vllm_config.model_config.dtype, vllm_config.cache_config.mamba_cache_dtype
    )
