"""Lion: the sign of a momentum (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms").

The packages that have it update whole tensors or need fused kernels; this one skips bad steps on
the device, as the other optimizers here do.
"""

from typing import Any

import torch
from torch import Tensor

from canon_pretrain.titan.local_update import LocalOptimizer


class Lion(LocalOptimizer):
    """Algorithm 2: the update is sign(beta1 m + (1 - beta1) g); then m is moved by 1 - beta2.

    Each of the groups also has betas. All updates are by element, so that a DTensor may be sharded
    in any way.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        momentum, grad = self.momentum_and_grad(parameter, "exp_avg")
        beta1, beta2 = group["betas"]
        update = momentum.lerp(grad, 1 - beta1).sign_()
        momentum.lerp_(grad, 1 - beta2)
        self.apply(parameter, group, update)
