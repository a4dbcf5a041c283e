"""The plugin of vLLM (entry point group vllm.general_plugins): it serves exports of this package.

`register` is called in each of vLLM's processes before it reads a model. The model itself is in
vllm_model.py, which needs vLLM; what it can't compute is refused here.
"""

from collections.abc import Iterator

from canon_pretrain.core.errors import UserError
from canon_pretrain.hf.config import ARCHITECTURE, MODEL_TYPE
from canon_pretrain.model.args import ModelArgs

MODEL = "canon_pretrain.serve.vllm_model:CanonForCausalLM"
"""The class of ARCHITECTURE for vLLM, imported when an export is served."""


def register() -> None:
    """Add the exports' config and model to vLLM; a second call changes nothing."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from canon_pretrain.hf.modeling_canon import LlamaCanonConfig

    # with it, vLLM needs no code of the export's folder: no --trust-remote-code
    AutoConfig.register(MODEL_TYPE, LlamaCanonConfig, exist_ok=True)
    ModelRegistry.register_model(ARCHITECTURE, MODEL)


def check_served(args: ModelArgs) -> None:
    """Raise UserError for a model that the plugin can't compute."""
    for kind in args.kinds.values():
        for name, value in _unserved(kind):
            raise UserError(
                "serve.vllm_model",
                f'{name} = "{value}" is not served by vLLM: use `canon serve EXPORT`',
                name=name,
                given=value,
            )


def _unserved(kind: ModelArgs) -> Iterator[tuple[str, object]]:
    """Yield (field, value) of what the plugin can't compute in a kind of layers."""
    if kind.mixer != "attention":
        yield "model.mixer", kind.mixer
    if kind.position in ("alibi", "h_alibi", "relative"):
        yield "model.position", kind.position
    if kind.canon_filter in ("dynamic", "dynamic_heads"):
        yield "model.canon_filter", kind.canon_filter
    if kind.document_mask:
        yield "model.document_mask", kind.document_mask
    if kind.smear:
        yield "model.smear", kind.smear
    if kind.window:
        yield "model.window", kind.window


def state_shape(kind: ModelArgs) -> tuple[int, int]:
    """Return the shape of the state of a layer: the last inputs, by the channels of all sites."""
    return kind.canon_kernel - 1, sum(kind.canon_channels.values())
