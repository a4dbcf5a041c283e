"""A reference of the released LlamaCanonForCausalLM, in float32, without a cache or padding.

Written from facebookresearch/PhysicsLM4, huggingface/ (Llama of transformers 4.47 with Canon,
QK-norm and rope_dim); shares no code with canon_pretrain.

Shapes: B batch, T tokens, C channels, H heads, K head dim, R rotated dims of a head.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None, "rope_dim": None,
    "rope_version": "huggingface", "tie_word_embeddings": False, "qk_norm": False,
    "canon_set": "", "canon_kernel": 4, "canon_activation": False, "canon_residual": True,
}  # fmt: skip
NO_POSITIONS = {"rope_type": "linear", "factor": 1e30}
ACTIVATIONS = {"silu": F.silu, "relu2": lambda x: F.relu(x).square()}


def read_config(folder: Path) -> dict[str, Any]:
    """Return the fields for `logits` as the released class reads them from FOLDER/config.json.

    Keys count even if null: PretrainedConfig sets them, and the rotary embedding uses
    partial_rotary_factor (modeling_rope_utils.py, 4.47).
    """
    file = json.loads((folder / "config.json").read_text())
    c = DEFAULTS | {"hidden_act": "silu", "num_key_value_heads": None, "head_dim": None} | file
    for bias in ("attention_bias", "mlp_bias", "canon_bias"):
        assert not c.get(bias)

    heads = c["num_attention_heads"]
    if c["num_key_value_heads"] is None:
        c["num_key_value_heads"] = heads
    if c["head_dim"] is None:
        c["head_dim"] = c["hidden_size"] // heads

    rotary_share = 1.0 if c["rope_dim"] is None else c["rope_dim"] / c["head_dim"]
    c.setdefault("partial_rotary_factor", rotary_share)
    num_angles = int(c["head_dim"] * c["partial_rotary_factor"]) // 2
    # it uses the first angles, however many there are: another number is another model
    assert 2 * num_angles == (c["rope_dim"] or c["head_dim"])
    return c


def logits(config: dict[str, Any], state: dict[str, Tensor], tokens_BT: Tensor) -> Tensor:
    """Return logits [B, T, vocabulary] in float32."""
    c = DEFAULTS | config
    w = {name: tensor.float() for name, tensor in state.items()}

    h = w["model.embed_tokens.weight"][tokens_BT]
    for i in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        layer = {name.removeprefix(prefix): t for name, t in w.items() if name.startswith(prefix)}

        x = _rms(h, layer["input_layernorm.weight"], c)
        x = _canon(x, "A", layer.get("canonA.weight"), c)
        h = h + _attention(x, layer, c)

        x = _rms(h, layer["post_attention_layernorm.weight"], c)
        x = _canon(x, "C", layer.get("canonC.weight"), c)
        h = h + _mlp(x, layer, c)

    head = w["model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"]
    return _rms(h, w["model.norm.weight"], c) @ head.T


def _rms(x: Tensor, gain: Tensor, c: dict[str, Any]) -> Tensor:
    return gain * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + c["rms_norm_eps"]))


def _canon(x_BTC: Tensor, site: str, weight_C1K: Tensor | None, c: dict[str, Any]) -> Tensor:
    if site not in c["canon_set"]:
        return x_BTC
    assert weight_C1K is not None

    x_BCT = F.pad(x_BTC.transpose(1, 2), (c["canon_kernel"] - 1, 0))
    y_BTC = F.conv1d(x_BCT, weight_C1K, groups=len(weight_C1K)).transpose(1, 2)
    if c["canon_activation"]:
        y_BTC = F.silu(y_BTC)
    if c["canon_residual"]:
        y_BTC = x_BTC + y_BTC
    return y_BTC


def _attention(x: Tensor, layer: dict[str, Tensor], c: dict[str, Any]) -> Tensor:
    q, k, v = (x @ layer[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    if c["qk_norm"]:
        q = _rms(q, layer["self_attn.q_norm.weight"], c)
        k = _rms(k, layer["self_attn.k_norm.weight"], c)

    # Canon-B mixes q, k and v as one
    widths = [part.shape[-1] for part in (q, k, v)]
    qkv = _canon(torch.cat((q, k, v), -1), "B", layer.get("self_attn.canonB.weight"), c)

    head_dim = c["hidden_size"] // c["num_attention_heads"]
    q, k, v = (_heads(part, head_dim) for part in qkv.split(widths, -1))
    q = _rotate(q, c)
    k = _rotate(k, c)

    q_heads_per_k_head = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(q_heads_per_k_head, 1)
    v = v.repeat_interleave(q_heads_per_k_head, 1)
    scores = q @ k.transpose(2, 3) / math.sqrt(head_dim)
    past = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    out = scores.masked_fill(~past, -math.inf).softmax(-1) @ v
    return out.transpose(1, 2).flatten(2) @ layer["self_attn.o_proj.weight"].T


def _heads(x_BTC: Tensor, head_dim: int) -> Tensor:
    """Return x_BHTK."""
    return x_BTC.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def _rotate(x_BHTK: Tensor, c: dict[str, Any]) -> Tensor:
    size = c["rope_dim"] or x_BHTK.shape[-1]
    x = x_BHTK[..., :size]
    rest = x_BHTK[..., size:]

    frequency = c["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    if c["rope_scaling"] is not None:
        assert c["rope_scaling"]["rope_type"] == "linear"
        frequency = frequency / c["rope_scaling"]["factor"]
    angle_TR = torch.arange(x.shape[2])[:, None] * frequency
    cos = angle_TR.cos()
    sin = angle_TR.sin()

    if c["rope_version"] == "huggingface":  # dim i turns with dim i + R/2
        a, b = x.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    else:  # lingua: dim 2i turns with dim 2i + 1
        assert c["rope_version"] == "lingua"
        a, b = x[..., 0::2], x[..., 1::2]
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((turned, rest), -1)


def _mlp(x: Tensor, layer: dict[str, Tensor], c: dict[str, Any]) -> Tensor:
    gate = x @ layer["mlp.gate_proj.weight"].T
    up = x @ layer["mlp.up_proj.weight"].T
    mixed = _canon(torch.cat((gate, up), -1), "D", layer.get("mlp.canonD.weight"), c)
    gate, up = mixed.chunk(2, -1)
    act = ACTIVATIONS[c.get("hidden_act", "silu")]
    return (act(gate) * up) @ layer["mlp.down_proj.weight"].T


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters by name."""
    c = DEFAULTS | config
    dim = c["hidden_size"]
    layer = _layer_shapes(c)

    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], dim)}
    for i in range(c["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (dim,)
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], dim)
    return shapes


def _layer_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    dim = c["hidden_size"]
    inner = c["intermediate_size"]
    heads = c["num_attention_heads"]
    kv = (c.get("num_key_value_heads") or heads) * (dim // heads)
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (dim, dim),
        "self_attn.k_proj": (kv, dim),
        "self_attn.v_proj": (kv, dim),
        "self_attn.o_proj": (dim, dim),
        "mlp.gate_proj": (inner, dim),
        "mlp.up_proj": (inner, dim),
        "mlp.down_proj": (dim, inner),
        "input_layernorm": (dim,),
        "post_attention_layernorm": (dim,),
    }
    if c["qk_norm"]:
        shapes["self_attn.q_norm"] = (dim,)
        shapes["self_attn.k_norm"] = (kv,)

    canon_channels = {
        "canonA": dim,
        "self_attn.canonB": dim + 2 * kv,
        "canonC": dim,
        "mlp.canonD": 2 * inner,
    }
    for name, channels in canon_channels.items():
        if name[-1] in c["canon_set"]:
            shapes[name] = (channels, 1, c["canon_kernel"])
    return shapes


def random_state(
    config: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return random weights, equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes(config).items():
        fan_in = 4 if "canon" in name else shape[-1]
        tensor = torch.randn(shape, generator=generator) * fan_in**-0.5
        if len(shape) == 1:  # gains: no two are the same
            tensor = 0.5 + torch.rand(shape, generator=generator)
        state[name] = tensor.to(dtype)
    return state


LINGUA_NAMES = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
    "self_attn": "attention", "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2", "mlp": "feed_forward",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "model.layers": "layers",
}  # fmt: skip
# lingua's `model` section of the 1B recipe
SECTION: dict[str, Any] = {
    "canon_bias": False, "canon_activation": False, "canon_kernel": 4, "canon_residual": True,
    "qk_norm": False, "head_dim": None, "n_kv_heads": None, "hidden_dim": None,
    "ffn_dim_multiplier": None, "multiple_of": 256, "norm_eps": 1e-5, "rope_theta": 10000.0,
    "rope_dim": None, "init_base_std": None, "init_std_factor": "disabled", "max_seqlen": 32,
    "seed": 42, "weight_tying": False, "attn_impl": "sdpa", "z_loss": True, "sliding_window": None,
}  # fmt: skip


def write_lingua_folder(
    folder: Path, params: dict[str, Any], config: dict[str, Any], state: dict[str, Tensor]
) -> Path:
    """Write default/params.json and default/consolidated.pth, as the released models on the hub.

    `params`: differences from SECTION. The names are the inverse of load_from_lingua_state's.
    """
    (folder / "default").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "LlamaCanon", "auto_map": {}}))

    sizes = {
        "canon_set": config["canon_set"],
        "vocab_size": config["vocab_size"],
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
    }
    content = {
        "name": "x",
        "model": SECTION | sizes | params,
        "data": {"seq_len": 32, "add_bos": True},
        "distributed": {"model_dtype": "bf16"},
    }
    (folder / "default" / "params.json").write_text(json.dumps(content))

    weights = {}
    for name, tensor in state.items():
        for theirs, lingua in LINGUA_NAMES.items():
            name = name.replace(theirs, lingua, 1)
        weights[name] = tensor
    torch.save({"model": weights}, folder / "default" / "consolidated.pth")
    return folder


def write_folder(
    folder: Path, config: dict[str, Any], state: dict[str, Tensor], *, num_files: int = 1
) -> Path:
    """Write a Hugging Face folder: config.json, one file of weights or several with an index."""
    folder.mkdir(parents=True)
    kind = {"model_type": "LlamaCanon", "architectures": ["LlamaCanonForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(kind | config))

    files = ["model.safetensors"]
    if num_files > 1:
        files = [f"model-{k:05d}-of-{num_files:05d}.safetensors" for k in range(1, num_files + 1)]
    for k, file in enumerate(files):
        weights = {name: state[name] for name in list(state)[k::num_files]}
        save_file(weights, folder / file, metadata={"format": "pt"})

    if num_files > 1:
        weight_map = {name: files[i % num_files] for i, name in enumerate(state)}
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
