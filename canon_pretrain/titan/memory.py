"""The memory of one GPU in a training step, part by part, before there is a GPU.

The dry run (titan/dry_run.py) and `bench memory` show it. Sizes of weights and states follow from
the parameter count; activations are counted, not guessed: a block runs under FakeTensorMode, which
computes shapes and no numbers, and every tensor that autograd keeps for backward is added up.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from canon_pretrain.model.args import ROTARY, ModelArgs
from canon_pretrain.model.attend import Attend
from canon_pretrain.model.cache import near_segments
from canon_pretrain.model.positions import Rope
from canon_pretrain.model.transformer import Head, TransformerBlock, norm_of
from canon_pretrain.run.config import Loss
from canon_pretrain.titan.loss import head_loss


def memory_by_part(
    args: ModelArgs,
    model: nn.Module,
    *,
    num_shards: int,
    micro_batch: int,
    dtype: torch.dtype,
    param_dtype: torch.dtype,
    loss: Loss | None = None,
    recompute: bool = False,
    keep_gathered: bool = False,
) -> dict[str, int]:
    """Return the bytes on one GPU of `num_shards` that share the weights, by part.

    `model` may be on the meta device; what is not trained (cst-Canon) has weights alone.
    Activations are an upper bound: what eager PyTorch keeps on a CPU, whose RMSNorm holds float32
    copies that a GPU's fused one does not. With `recompute` (full activation checkpointing) they
    are the blocks' inputs, and one block's at a time. FSDP2's own buffers are the gathered weights
    of two blocks (one computes, one is prefetched; of all with `keep_gathered`), of the embedding
    and the head, and one block's gradient in float32 for the reduction.
    """
    parameters, trained = count_parameters(model)
    block = sum(p.numel() for p in model.get_submodule("layers.0").parameters())
    ends = parameters - args.num_layers * block
    gathered = parameters if keep_gathered else 2 * block + ends
    weights, shard = (-(-count // num_shards) * dtype.itemsize for count in (parameters, trained))
    loss = loss or Loss()
    saved_block, saved_head = saved_bytes(args, micro_batch, param_dtype, loss)
    tokens = micro_batch * args.max_seq_len
    activations = args.num_layers * saved_block
    if recompute:
        activations = args.num_layers * tokens * args.dim * param_dtype.itemsize + saved_block
    return {
        "weights": weights,
        "gradients": shard,
        "optimizer (two moments)": 2 * shard,
        "gathered by FSDP2": gathered * param_dtype.itemsize + 4 * block,
        "activations": activations,
        "logits and loss": saved_head + loss_bytes(args, tokens, param_dtype, loss),
    }


def loss_bytes(args: ModelArgs, tokens: int, dtype: torch.dtype, loss: Loss) -> int:
    """Return the peak of what is held of the logits of `tokens` tokens, beside what backward needs.

    Of whole logits, two float32 gradients in backward. Of a chunk, in forward: the logits in
    `dtype`, in float32 and as log-softmax.
    """
    if not loss.chunk_tokens:
        return 2 * tokens * args.vocab_size * 4
    chunks = -(-tokens // loss.chunk_tokens)
    each = 4 if dtype == torch.float32 else dtype.itemsize + 4
    return -(-tokens // chunks) * args.vocab_size * (each + 4)


def saved_bytes(
    args: ModelArgs, micro_batch: int, dtype: torch.dtype, loss: Loss
) -> tuple[int, int]:
    """Return the bytes that autograd keeps for backward: of one block; of norm, head and loss.

    For `micro_batch` sequences of args.max_seq_len tokens, without the weights. Masks and ALiBi are
    counted as on a GPU, where flex attention computes them and keeps what plain attention does.
    """
    shape = (micro_batch, args.max_seq_len)
    plain = args if args.position in ROTARY else dataclasses.replace(args, position="nope")
    before = torch.get_default_dtype()
    with FakeTensorMode():
        torch.set_default_dtype(dtype)
        try:
            rope = Rope(plain) if plain.rope_dim else None
            block = TransformerBlock(plain, rope, Attend(plain))
            norm = norm_of(args)
            output = Head(args.dim, args.vocab_size)
        finally:
            torch.set_default_dtype(before)
        h_BTD = torch.empty(*shape, args.dim, dtype=dtype, requires_grad=True)
        labels_BT = torch.zeros(shape, dtype=torch.int64)
        near_BN = None
        if args.document_mask and args.canon_set:
            near_BN = near_segments(labels_BT.int(), args.max_seq_len, args.canon_kernel - 1)
        function = head_loss(loss)
        modules = nn.ModuleList([block, norm, output])
        return (
            count_saved(lambda: block(h_BTD, None, near_BN), modules),
            count_saved(lambda: output(norm(h_BTD), labels_BT, function)[1], modules),
        )


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return how many parameters a model has, and how many of them are trained."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def count_saved(forward: Callable[[], Tensor], modules: nn.Module) -> int:
    """Return the bytes of storages that `forward` leaves for backward, less the modules' own."""
    own = {t.untyped_storage()._cdata for t in (*modules.parameters(), *modules.buffers())}
    kept: dict[int, Tensor] = {}  # the tensors are held, so that no storage's address is used again

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage()._cdata
        if address not in own:
            kept.setdefault(address, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward()
    del out
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
