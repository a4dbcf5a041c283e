"""An export as a model of vLLM: the modules of model/, with vLLM's attention and state pages.

vLLM passes the new tokens of all requests as one row [1, N]. Its attention layers hold keys and
values; for Canon each layer has a page per request, that of a short convolution (`MambaBase`), with
one state of all sites. vLLM assigns pages, and copies them for prefix caching.

Needs vLLM, which is not a dependency of this package: vllm_plugin.py names this module.

Shapes: N new tokens of all requests, D hidden, V vocabulary, H heads, G key-value heads, K head
dim.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
from vllm.v1.attention.selector import get_mamba_attn_backend

from canon_pretrain.hf.config import HUGGINGFACE, layout, name_to_ours
from canon_pretrain.hf.rotary_rows import interleave_orders
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.cache import Context
from canon_pretrain.model.transformer import Transformer, input_of_blocks
from canon_pretrain.serve.paged_state import Batch, BySequence, Group, PagedCache
from canon_pretrain.serve.vllm_plugin import args_of, check_options, check_served, state_shapes


class CanonForCausalLM(nn.Module, HasInnerState, IsHybrid):
    """The model of an export, with the interface of vLLM's models."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        args = served_args(vllm_config)
        self.layout = layout(vllm_config.model_config.hf_config.to_dict())
        self.transformer = Transformer(args, attention_backend="sdpa", canon_backend="compiled")

        # The server's layers next to ours: attention, and the pages of Canon's state.
        self.caches: list[PagedCache] = []
        self.pages: list[LayerPages] = []
        # before mixers get a wrapper, and with it other names
        self.tensors: dict[str, Tensor] = {}
        self.tensors |= dict(self.transformer.named_parameters())
        self.tensors |= dict(self.transformer.named_buffers())
        blocks: Iterable[Any] = self.transformer.layers.values()
        for i, (block, kind) in enumerate(zip(blocks, args.layer_args, strict=True)):
            place = f"{prefix}.layers.{i}" if prefix else f"layers.{i}"
            self.caches.append(PagedCache(block, kind.canon_kernel - 1))
            self.pages.append(LayerPages(kind, vllm_config, f"{place}.canon"))
            if kind.recurrent is None:
                block.attention.attend = PagedAttention(kind, vllm_config, f"{place}.attention")
            else:
                block.attention = BySequence(block.attention)

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

        # layers whose pages have the same numbers share the indices
        batches: dict[tuple[int, int], Batch] = {}
        h_1ND = input_of_blocks(h_1ND, self.transformer.embed_norm, None, Context())
        blocks = self.transformer.layers.values()
        for block, cache, pages in zip(blocks, self.caches, self.pages, strict=True):
            cache.positions_1N = positions_1N
            if not pages.shapes:
                h_1ND = block(h_1ND, Context(cache=cache))
                continue

            metadata = pages.metadata()
            key = id(metadata), cache.state.reach
            if key not in batches:
                batches[key] = batch_of(metadata, h_1ND, cache.state.reach)
            with pages.reading(cache, metadata, batches[key], h_1ND):
                h_1ND = block(h_1ND, Context(cache=cache))
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

        names = {id(parameter): name for name, parameter in self.named_parameters()}
        loaded = set()
        for hf_name, weight in weights:
            name = name_to_ours(hf_name)
            if name == "output.weight" and args.tie_embeddings:
                continue
            if name in orders:
                weight = weight[orders[name]]
            parameter = self.tensors[name]
            default_weight_loader(parameter, weight)
            loaded.add(names.get(id(parameter), name))
        return loaded

    # -- the size of the state, for vLLM's plan of the memory --

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[Any, ...]:
        """Return the shapes of the largest state of a layer."""
        return tuple(state_shapes(_largest_kind(vllm_config)))

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return state_dtypes(_largest_kind(vllm_config), vllm_config)

    @classmethod
    def get_mamba_state_copy_funcs(cls, mamba_types: set[Any]) -> dict[Any, Any]:
        return {mamba_type: COPY_FUNCTIONS[mamba_type] for mamba_type in mamba_types}


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


class LayerPages(nn.Module, MambaBase):
    """The pages of a layer's states; for vLLM those of a short convolution, or a Mamba layer."""

    def __init__(self, kind: ModelArgs, vllm_config: VllmConfig, place: str) -> None:
        super().__init__()
        self.place = place
        self.shapes = state_shapes(kind)
        self.dtypes = state_dtypes(kind, vllm_config)
        self.is_recurrent = kind.recurrent is not None
        self.kv_cache = ()
        if not self.shapes:
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

    @contextmanager
    def reading(
        self, cache: PagedCache, metadata: Any, batch: Batch, h_1ND: Tensor
    ) -> Iterator[None]:
        """Let the block read its states from the pages, and write them back."""
        pages = list(self.kv_cache) if metadata is not None else [None] * len(self.shapes)
        recurrent_pages = pages.pop() if self.is_recurrent else None
        if self.is_recurrent:
            cache.groups = groups_of(metadata, h_1ND.shape[1])
            if recurrent_pages is None:
                shape = (len(batch.is_first_R), *self.shapes[-1])
                cache.recurrent_R = h_1ND.new_zeros(shape, dtype=self.dtypes[-1])
            else:
                cache.recurrent_R = recurrent_pages[batch.pages_R]

        conv_pages = pages[0] if pages else None
        with cache.state.reading(batch, conv_pages, h_1ND.dtype, h_1ND.device):
            yield
        if recurrent_pages is not None:
            recurrent_pages[batch.pages_R] = cache.recurrent_R

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self.shapes)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self.dtypes

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """The type by which vLLM chooses how to copy states."""
        if not self.is_recurrent:
            return MambaAttentionBackendEnum.SHORT_CONV
        if len(self.shapes) == 1:
            return MambaAttentionBackendEnum.LINEAR
        return MambaAttentionBackendEnum.MAMBA2

    def get_attn_backend(self) -> Any:
        # whose description of a batch is that of all, without what kernels of Mamba need
        return get_mamba_attn_backend(MambaAttentionBackendEnum.SHORT_CONV)


COPY_FUNCTIONS = {
    MambaAttentionBackendEnum.SHORT_CONV: MambaStateCopyFuncCalculator.short_conv_state_copy_func(),
    MambaAttentionBackendEnum.MAMBA2: MambaStateCopyFuncCalculator.mamba2_state_copy_func(),
    MambaAttentionBackendEnum.LINEAR: (
        MambaStateCopyFuncCalculator.linear_attention_state_copy_func()
    ),
}
"""How vLLM copies each state of a layer to another page."""


def groups_of(metadata: Any, num_tokens: int) -> list[Group]:
    """Return the requests with one token as a group, then every other request."""
    if metadata is None:
        return [Group(slice(0, 1), slice(0, num_tokens), is_first=True)]

    num_single = metadata.num_decodes
    groups = []
    if num_single:
        groups.append(Group(slice(0, num_single), slice(0, num_single), is_first=False))
    if metadata.num_prefills:
        # the sizes of groups are needed by the host
        bounds = metadata.query_start_loc_p.tolist()
        has_state = metadata.has_initial_states_p.tolist()
        for i in range(metadata.num_prefills):
            row = num_single + i
            tokens = slice(num_single + bounds[i], num_single + bounds[i + 1])
            groups.append(Group(slice(row, row + 1), tokens, is_first=not has_state[i]))
    return groups


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
    args = args_of(vllm_config.model_config.hf_config)
    check_options(vllm_config)
    check_served(args)
    return replace(args, max_seq_len=vllm_config.model_config.max_model_len)


def state_dtypes(kind: ModelArgs, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
    """Return the dtypes of `state_shapes`.

    The inputs of convolutions have the model's, unless --mamba-cache-dtype sets another. A
    recurrence has that of its sums, float32.
    """
    dtypes = [torch.float32 for _ in state_shapes(kind)]
    if kind.canon_set or kind.mixer_conv:
        (dtypes[0],) = MambaStateDtypeCalculator.short_conv_state_dtype(
            vllm_config.model_config.dtype, vllm_config.cache_config.mamba_cache_dtype
        )
    return tuple(dtypes)


def _largest_kind(vllm_config: VllmConfig) -> ModelArgs:
    """Return the kind of layers with the largest states."""

    def num_bytes(kind: ModelArgs) -> int:
        dtypes = state_dtypes(kind, vllm_config)
        sizes = zip(state_shapes(kind), dtypes, strict=True)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in sizes)

    return max(served_args(vllm_config).kinds.values(), key=num_bytes)
