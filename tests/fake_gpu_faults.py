"""Faults that only a GPU would show, planted into the trainer before a fake run."""

import torch
from torch import Tensor

from canon_pretrain.model.transformer import FeedForward, Transformer
from canon_pretrain.titan import trainer

KEPT: list[Tensor] = []


def item_in_the_step() -> None:
    """The host reads the loss of each micro-batch."""
    original = trainer.CanonTrainer.forward_backward_step

    def step(self, **batch):
        loss = original(self, **batch)
        loss[0].item()
        return loss

    trainer.CanonTrainer.forward_backward_step = step


def cpu_scalar_in_a_stack() -> None:
    """A 0-dimensional CPU tensor among CUDA tensors: FakeTensorMode alone accepts it."""
    original = trainer.clip_gradients

    def clip(parameters, max_norm):
        norm = original(parameters, max_norm)
        return torch.stack([norm, torch.tensor(0.0)]).sum()

    trainer.clip_gradients = clip


def cpu_tensor_in_the_model() -> None:
    """A table that stayed on the CPU."""
    original = Transformer.forward
    table = torch.ones(1, 1, 2048)

    def forward(self, tokens, **options):
        self.tok_embeddings.register_forward_hook(lambda module, inputs, h: h * table)
        return original(self, tokens, **options)

    Transformer.forward = forward


def break_in_a_block() -> None:
    """Code that dynamo cannot trace, in a block that is compiled as a whole."""
    original = FeedForward.forward

    def forward(self, *inputs):
        torch._dynamo.graph_break()
        return original(self, *inputs)

    FeedForward.forward = forward


def growing_batch() -> None:
    """A shape that changes with every step."""
    original = trainer.CanonTrainer.forward_backward_step
    rows = iter(range(1, 100))

    def step(self, *, input_dict, labels, **options):
        n = next(rows)
        fewer = {name: tensor[:n] for name, tensor in input_dict.items()}
        return original(self, input_dict=fewer, labels=labels[:n], **options)

    trainer.CanonTrainer.forward_backward_step = step


def leak_of_an_activation() -> None:
    """Each step keeps a tensor of [tokens, D]."""
    original = trainer.CanonTrainer.forward_backward_step

    def step(self, *, input_dict, **options):
        ids = input_dict["input"]
        KEPT.append(torch.empty(ids.numel(), 2048, dtype=torch.bfloat16, device=ids.device))
        return original(self, input_dict=input_dict, **options)

    trainer.CanonTrainer.forward_backward_step = step


def experts_on_the_wrong_mesh() -> None:
    """The experts are sharded over all ranks, which already hold different ones."""
    from canon_pretrain.titan import parallelize

    original = parallelize.fsdp_mesh

    def mesh(parallel_dims, *, of_experts=False):
        return original(parallel_dims)

    parallelize.fsdp_mesh = mesh
