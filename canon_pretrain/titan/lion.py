"""Lion: the sign of a momentum (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms").

The packages that have it update whole tensors or need fused kernels; this one skips bad steps on
the device, as the other optimizers here do.
"""

from typing import Any

import torch
from torch import Tensor

from canon_pretrain.titan.muon import local_part


class Lion(torch.optim.Optimizer):
    """Algorithm 2: the update is sign(beta1 m + (1 - beta1) g); then m is moved by 1 - beta2.

    Each of `groups` has lr, weight_decay (decoupled) and betas. All updates are by element, so
    that a DTensor may be sharded in any way. `found_inf` may be set to a tensor that is 1 if the
    step must change nothing, as for torch's fused optimizers.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter)
        momentum = local_part(state["exp_avg"])
        grad = local_part(parameter.grad)
        if self.found_inf is not None:  # moves the momentum to itself, and no NaN into it
            grad = torch.where(self.found_inf.bool(), momentum, grad)

        lr = group["lr"]
        beta1, beta2 = group["betas"]
        update = momentum.lerp(grad, 1 - beta1).sign_()
        momentum.lerp_(grad, 1 - beta2)

        decay: Tensor | float = lr * group["weight_decay"]
        if self.found_inf is not None:
            is_taken = 1 - self.found_inf.double()
            decay = decay * is_taken
            update = update * is_taken
        local = local_part(parameter)
        local.mul_(1 - decay)
        local.add_(update, alpha=-lr)
