"""The plugin of vLLM (entry point group vllm.general_plugins): it serves exports of this package.

`register` is called in each of vLLM's processes before it reads a model. The model itself is in
vllm_model.py, which needs vLLM; what it can't compute is refused here.
"""

from collections.abc import Iterator
from typing import Any

from canon_pretrain.core.errors import UserError
from canon_pretrain.hf.config import ARCHITECTURE, MODEL_TYPE, to_args
from canon_pretrain.model.args import ModelArgs

MODEL = "canon_pretrain.serve.vllm_model:CanonForCausalLM"
"""The class of ARCHITECTURE for vLLM, imported when an export is served."""


def register() -> None:
    """Add the exports' config and model to vLLM; a second call changes nothing."""
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    from canon_pretrain.hf.modeling_canon import LlamaCanonConfig

    class CheckedConfig(VerifyAndUpdateConfig):
        """Refuses what is not served before vLLM starts its workers."""

        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            # then vLLM plans no states
            config = model_config.hf_config
            if not any(map(state_shapes, args_of(config).kinds.values())):
                config.layer_types = ["attention"] * config.num_hidden_layers

        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            check_options(vllm_config)
            check_served(args_of(vllm_config.model_config.hf_config))

    # with it, vLLM needs no code of the export's folder: no --trust-remote-code
    AutoConfig.register(MODEL_TYPE, LlamaCanonConfig, exist_ok=True)
    MODELS_CONFIG_MAP[ARCHITECTURE] = CheckedConfig
    ModelRegistry.register_model(ARCHITECTURE, MODEL)


def args_of(hf_config: Any) -> ModelArgs:
    """Return the model of an export, without the fields that vLLM adds to its config."""
    fields = hf_config.to_dict()
    for added in ("rope_parameters", "layer_types"):
        fields.pop(added, None)
    return to_args(fields)


def check_options(vllm_config: Any) -> None:
    """Raise UserError for options of vLLM that the plugin does not have."""
    parallel = vllm_config.parallel_config
    required = {
        "--tensor-parallel-size": (parallel.tensor_parallel_size, 1),
        "--pipeline-parallel-size": (parallel.pipeline_parallel_size, 1),
        "--quantization": (vllm_config.model_config.quantization, None),
        "--speculative-config": (vllm_config.speculative_config, None),
    }
    for name, (value, expected) in required.items():
        if value != expected:
            raise UserError(
                "serve.vllm_option",
                f"{name} {value} is not supported for exports of canon_pretrain: leave it out; "
                "for more throughput, start a server per GPU",
                name=name,
                given=str(value),
            )

    # not tried: whether a captured graph reads the pages of later batches
    is_cpu = vllm_config.device_config.device_type == "cpu"
    if not is_cpu and not vllm_config.model_config.enforce_eager:
        raise UserError(
            "serve.vllm_eager",
            "exports of canon_pretrain run without CUDA graphs: add --enforce-eager "
            "(enforce_eager=True)",
        )


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
    if kind.is_own_mixer:
        yield "model.mixer", kind.mixer
    if kind.position in ("alibi", "h_alibi", "relative"):
        yield "model.position", kind.position
    if kind.canon_filter in ("dynamic", "dynamic_heads"):
        yield "model.canon_filter", kind.canon_filter
    if kind.document_mask:
        yield "model.document_mask", kind.document_mask
    if kind.smear:
        yield "model.smear", kind.smear


def state_shapes(kind: ModelArgs) -> list[tuple[int, ...]]:
    """Return the shapes of the states of a layer: of its convolutions, then of its recurrence."""
    shapes: list[tuple[int, ...]] = []
    num_channels = sum(kind.canon_channels.values())
    if kind.mixer_conv:
        num_channels += kind.conv_channels
    if num_channels:
        shapes.append((kind.canon_kernel - 1, num_channels))
    if kind.recurrent is not None:
        shapes.append((kind.num_heads, kind.key_dim, kind.value_dim))
    return shapes
