"""Matrix products of a model that is only asked, by the faster of torch's two libraries on a CPU.

model.py swaps them in after loading. torch multiplies float32 matrices with MKL, which on AMD's
processors takes a slower path: oneDNN, in the same torch, is twice as fast there. The numbers are
equal but for rounding.
"""

import platform
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canon_pretrain.model.transformer import Head, Transformer


class FastLinear(nn.Linear):
    """`nn.Linear`, forward only, float32 on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias."""
        if torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        # what torch.compile makes of a linear layer: it takes the weight as it lies
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def use_fast_linear(model: Transformer) -> None:
    """Let every linear layer of `model`, and its output, be a FastLinear of the same weights."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) in (nn.Linear, Head):
                setattr(module, name, _of(child.weight, child.bias))  # type: ignore[arg-type]
    if model.output is None:  # tied to the embedding
        model.output = _of(model.tok_embeddings.weight)


def is_faster(model: Transformer) -> bool:
    """Whether FastLinear is for this model on this machine; the same on every rank of a job."""
    weight = model.tok_embeddings.weight
    fits = weight.device.type == "cpu" and weight.dtype == torch.float32
    return fits and torch.backends.mkldnn.is_available() and _vendor() == "AuthenticAMD"


def _of(weight: Tensor, bias: nn.Parameter | None = None) -> FastLinear:
    assert isinstance(weight, nn.Parameter)
    linear = FastLinear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = weight
    linear.register_parameter("bias", bias)
    return linear


def _vendor() -> str:
    """The maker of the processor, as Linux tells it; empty elsewhere."""
    if platform.system() != "Linux":
        return ""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id"))
    return next(found, "")
