"""One door to Canon's arithmetic: every way to compute it, and which one a model takes.

`model/canon.py` calls `canon` with the name that `model.canon_backend` gave. All are the same
function of the same arguments; `reference.py` says which.

Shapes: B batch, T tokens, C channels, K taps of the kernel, P = K - 1, N = P + T.
"""

from torch import Tensor

from canon_pretrain.errors import check_choice
from canon_pretrain.kernels.compiled import canon_compiled
from canon_pretrain.kernels.reference import canon_reference

BACKENDS = ("auto", "reference", "compiled", "causal_conv1d", "triton")


def choose(backend: str) -> str:
    """The backend that `auto` stands for; any other name is itself."""
    return "compiled" if backend == "auto" else backend


def check_canon_backend(backend: str) -> None:
    """Raise UserError unless `backend` is known."""
    check_choice("canon_backend", backend, BACKENDS)


def canon(
    x_BTC: Tensor,
    weight_C1K: Tensor,
    *,
    residual: bool,
    activation: bool,
    before_BPC: Tensor | None = None,
    segments_BN: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """`canon_reference` by `backend`; see there."""
    options = {"residual": residual, "activation": activation}
    if choose(backend) == "compiled" and before_BPC is None:
        return canon_compiled(x_BTC, weight_C1K, **options, segments_BN=segments_BN)
    return canon_reference(
        x_BTC, weight_C1K, **options, before_BPC=before_BPC, segments_BN=segments_BN
    )
