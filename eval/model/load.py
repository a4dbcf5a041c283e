"""A checkpoint, or a folder exported from one, as a model on a device.

Rotary tables and log-softmax stay float32 whatever the dtype of the weights. On AMD's processors
torch's float32 products take MKL's slower path: `FastLinear` takes oneDNN, twice as fast there.
"""

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canon_pretrain.checkpoint.architecture import model_args_of, run_of_checkpoint
from canon_pretrain.checkpoint.weights import check_checkpoint, read_weights
from canon_pretrain.hf.reading import folder_args, folder_weights, is_folder
from canon_pretrain.model.transformer import Head, Transformer
from canon_pretrain.run.folder import RunFolder


def dtype_for(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype called `name`; "auto" is bfloat16 on a GPU and float32 on a CPU."""
    auto = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, auto if name == "auto" else name)


def load_model(
    path: Path,
    device: torch.device,
    max_length: int = 0,
    dtype: torch.dtype = torch.float32,
    run: RunFolder | None = None,
) -> Transformer:
    """Return the model of RUN/checkpoint/step-N or of an exported folder, in eval mode."""
    is_exported = is_folder(path)
    if not is_exported:
        check_checkpoint(path)
    args = folder_args(path) if is_exported else model_args_of(run or run_of_checkpoint(path))
    with torch.device("meta"):
        model = Transformer(replace(args, max_seq_len=max(args.max_seq_len, max_length)))
    own = dict(model.named_parameters())
    weights = folder_weights(path, args) if is_exported else read_weights(path, own)
    model.to(dtype)
    model.to_empty(device=device)
    if model.rope is not None:
        model.rope.reset(device)
    model.load_state_dict(weights)
    if is_faster(model):
        use_fast_linear(model)
    return model.eval()


class FastLinear(nn.Linear):
    """`nn.Linear`, forward only, float32 on a CPU."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = weight
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias."""
        if torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        # what torch.compile makes of a linear layer: it takes the weight as it is stored
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def use_fast_linear(model: Transformer) -> None:
    """Replace every linear layer of `model`, and its output, by a FastLinear of equal weights."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) in (nn.Linear, Head):
                setattr(module, name, FastLinear(child.weight, child.bias))  # type: ignore[arg-type]
    if model.output is None:  # tied to the embedding
        model.output = FastLinear(model.tok_embeddings.get_parameter("weight"))


def is_faster(model: Transformer) -> bool:
    """Return whether FastLinear is for this model and machine; equal on every rank of a job."""
    weight = model.tok_embeddings.weight
    fits = weight.device.type == "cpu" and weight.dtype == torch.float32
    return fits and torch.backends.mkldnn.is_available() and cpu_info("vendor_id") == "AuthenticAMD"


def cpu_info(field: str) -> str:
    """Return a field of /proc/cpuinfo; empty elsewhere than on Linux."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    found = (line.partition(":")[2].strip() for line in lines if line.startswith(field))
    return next(found, "")
