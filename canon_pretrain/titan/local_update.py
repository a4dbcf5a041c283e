"""What optimizers of our own share: they update this rank's part of each parameter."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class LocalOptimizer(torch.optim.Optimizer):
    """Keeps a momentum per parameter, and skips bad steps on the device.

    A parameter may be a DTensor. `found_inf` may be set to a tensor that is 1 if the step must
    change nothing, as for torch's fused optimizers. Each of `groups` has lr and weight_decay.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        self.found_inf: Tensor | None = None

    def momentum_and_grad(self, parameter: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Return this rank's parts of the momentum, `name` in the state, and of the gradient."""
        state = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(parameter)
        momentum = local_part(state[name])
        grad = local_part(parameter.grad)
        if self.found_inf is not None:  # moves the momentum to itself, and no NaN into it
            grad = torch.where(self.found_inf.bool(), momentum, grad)
        return momentum, grad

    def apply(
        self, parameter: Tensor, group: dict[str, Any], update: Tensor, *, lr_ratio: float = 1.0
    ) -> None:
        """Decay this rank's part of a parameter, and subtract lr * `lr_ratio` times the update."""
        lr = group["lr"]
        decay: Tensor | float = lr * group["weight_decay"]
        if self.found_inf is not None:
            is_taken = 1 - self.found_inf.double()
            decay = decay * is_taken
            update = update * is_taken

        local = local_part(parameter)
        local.mul_(1 - decay)
        local.add_(update, alpha=-lr * lr_ratio)


def local_part(tensor: Tensor | None) -> Tensor:
    """Return this rank's part of a tensor, which a change of it changes."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
