"""LlamaCanonForCausalLM, also without this package, and the fields of its config.json."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import accelerate
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import DynamicCache

from canon_pretrain.hf.config import (
    DEFAULTS,
    EXTENSION,
    MODEL_TYPE,
    plain_fields,
    to_fields,
    to_hf,
    to_ours,
)
from canon_pretrain.hf.modeling_canon import LlamaCanonConfig, LlamaCanonForCausalLM
from canon_pretrain.model.transformer import Transformer
from tests.hf_exports import export_model, hub_environment
from tests.variants import VARIANTS, build, every_variant, random_tokens, variant

DECODED = ["nope ABCD", "rope A k3 cst relu2 qk_per_head documents", "partial_rope_c ABCD qk_full"]
DECODED += ["alibi ABCD k3 cst relu2 qk_per_head tied"]
DECODED += ["h_alibi AC k2 cst standard qk_full gqa documents"]
DECODED += ["gla_elu A k3 conv gate_rank", "mamba2 AB documents", "mamba2_mlp k3 conv standard"]
DECODED += ["gdn BD no_res documents", "gdn AC conv", "nope ABC moe capacity"]
TRAINED = "rope AC no_res act standard_relu2 qk_full gqa tied documents"
decoded = pytest.mark.parametrize("name", DECODED)


def wrapped_model(name, **fields):
    ours = build(variant(name)).eval()
    model = LlamaCanonForCausalLM(LlamaCanonConfig(**(to_fields(ours.args) | fields))).eval()
    state = {to_hf(n): tensor for n, tensor in ours.state_dict().items()}
    found = model.load_state_dict(state, strict=False)
    assert found.missing_keys == (["lm_head.weight"] if ours.args.tie_embeddings else [])
    assert not found.unexpected_keys
    return model, ours


@torch.no_grad()
def greedy(model, tokens, count):
    for _ in range(count):
        tokens = [*tokens, int(model(torch.tensor([tokens]))[0, -1].argmax())]
    return tokens


def padded(rows):
    longest = max(map(len, rows))
    ids = torch.tensor([[2] * (longest - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])


PROMPTS = [[5, 9, 3], [7, 2, 11, 4, 30, 8, 2, 19, 6, 3, 21], [2, 13]]
CLOSE = {"atol": 1e-4, "rtol": 0}
PLAIN: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 2}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@decoded
@torch.no_grad()
def test_greedy_decoding_of_prompts_of_different_lengths(name, device):
    model, ours = wrapped_model(name)
    ids, mask = padded(PROMPTS)
    logits = model(ids, attention_mask=mask).logits
    model, ids, mask = model.to(device), ids.to(device), mask.to(device)
    again = model(ids, attention_mask=mask).logits.cpu()
    torch.testing.assert_close(again[:, -1], logits[:, -1], atol=1e-3, rtol=0)
    found = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, **PLAIN)
    for row, prompt in zip(found.tolist(), PROMPTS, strict=True):
        assert row[ids.shape[1] - len(prompt) :] == greedy(ours, prompt, 6)


@decoded
def test_beam_search_equals_that_without_a_cache(name):
    model, _ = wrapped_model(name)
    ids, mask = padded(PROMPTS[:2])
    options = {"num_beams": 3, "num_return_sequences": 3, "do_sample": False, **PLAIN}
    options |= {"attention_mask": mask, "max_new_tokens": 5}
    with_cache = model.generate(ids, **options)
    assert torch.equal(with_cache, model.generate(ids, use_cache=False, **options))
    assert len({tuple(row) for row in with_cache.tolist()}) == 6


@decoded
@torch.no_grad()
def test_a_prompt_in_several_forward_passes(name):
    model, ours = wrapped_model(name)
    prompts = [PROMPTS[1] + [9], PROMPTS[0] + [4, 4]]
    ids, mask = padded(prompts)
    for sizes in ((1,) * 12, (5, 1, 4, 2), (2, 10)):
        past, at, parts = None, 0, []
        for size in sizes:
            at += size
            # the mask may include the cached tokens or not
            given = mask[:, :at] if len(parts) % 2 else mask[:, at - size : at]
            options = {"attention_mask": given, "past_key_values": past, "use_cache": True}
            output = model(ids[:, at - size : at], **options)
            past = output.past_key_values
            parts.append(output.logits)
        assert past.get_seq_length() == 12
        for logits, prompt in zip(torch.cat(parts, dim=1), prompts, strict=True):
            whole = ours(torch.tensor([prompt]))[0]
            torch.testing.assert_close(logits[12 - len(prompt) :], whole, **CLOSE)


@pytest.mark.parametrize("mode", ["eval", "checkpointed"])
# cst: the kernels have no gradient
@pytest.mark.parametrize(
    "name", [TRAINED, DECODED[1], "gla AC conv cst", "mamba2 B", "gdn ABCD", "moe", "moe capacity"]
)
def test_loss_and_gradients(mode, name):
    model, ours = wrapped_model(name)
    if mode == "checkpointed":
        model.train()
        newer = getattr(model, "activation_checkpointing_enable", None)
        (newer or model.gradient_checkpointing_enable)()
    ids = random_tokens(ours.args, rows=2, num_tokens=20)
    labels = ids.clone()
    labels[0, :7] = -100
    loss = model(ids, labels=labels).loss
    loss.backward()
    ours.train(model.training)  # experts drop tokens in training, and in evaluation never
    expected = F.cross_entropy(ours(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    expected.backward()
    torch.testing.assert_close(loss, expected)
    theirs = dict(ours.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[to_ours(name)].grad)


OFFLOADED = ["rope ABCD qk_full", "gla AC conv gate_rank", "mamba2 AB tied", "gdn BD dynamic"]
OFFLOADED += ["gdn ABC gated_moe capacity", "moe capacity tied"]


@pytest.mark.parametrize("offload", ["cpu", "disk"])
@pytest.mark.parametrize("name", OFFLOADED)
@torch.no_grad()
def test_offloaded_weights(name, offload, tmp_path):
    model, ours = wrapped_model(name)
    ids = random_tokens(ours.args, rows=2, num_tokens=12)
    if offload == "cpu":
        accelerate.cpu_offload(model, torch.device("cpu"), offload_buffers=True)
    else:
        places = dict.fromkeys(["model.embed_tokens", "model.layers.0", "lm_head"], "cpu")
        places |= dict.fromkeys(["model.layers.1", "model.norm"], "disk")
        model.save_pretrained(tmp_path)
        options: Any = {"device_map": places, "offload_folder": tmp_path / "offloaded"}
        model = LlamaCanonForCausalLM.from_pretrained(tmp_path, **options)
    for use_cache in (False, True):
        torch.testing.assert_close(model(ids, use_cache=use_cache).logits, ours(ids))
    mask = torch.ones_like(ids)
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, **PLAIN}
    found = model.generate(ids, **options).tolist()
    assert found == [greedy(ours, row, 4) for row in ids.tolist()]
    # and none is kept
    layer = model.model.layers[1]
    assert all(each.is_meta for each in [*layer.parameters(), *layer.block.parameters()])


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, *given):
        self.calls += 1
        return self.inner(*given)


REPLACED = {
    "nope ABCD k2 no_res act standard documents": {"canonA", "canonC", "mlp.canonD"},
    "gla AC conv gate_rank": {"self_attn.gk_proj.1", "self_attn.g_proj.0", "self_attn.conv1d"},
    "mamba2 AB": {"self_attn.in_proj", "self_attn.canonB", "self_attn.norm", "self_attn.out_proj"},
    "gdn ABCD": {"self_attn.a_proj", "self_attn.b_proj", "self_attn.g_proj", "self_attn.canonB"},
}


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", REPLACED)
@torch.no_grad()
def test_replaced_modules_of_a_layer_are_called_once(name, use_cache):
    model, ours = wrapped_model(name)
    ids = random_tokens(ours.args, rows=1, num_tokens=12)
    names = [name for name, _ in model.model.layers[1].named_parameters()]
    places = {name.rpartition(".")[0] for name in names if name.endswith((".weight", ".bias"))}
    assert REPLACED[name] <= places
    places.discard("self_attn.o_norm")  # only its weight is used
    wrapped = []
    for place in places:
        folder, _, part = place.rpartition(".")
        owner = model.model.layers[1].get_submodule(folder)
        wrapped.append(Wrapped(getattr(owner, part)))
        setattr(owner, part, wrapped[-1])
    torch.testing.assert_close(model(ids, use_cache=use_cache).logits, ours(ids))
    assert [each.calls for each in wrapped] == [1] * len(places)


@every_variant
def test_a_new_model_has_the_initial_weights_of_training(args):
    ours, config = Transformer(args), LlamaCanonConfig(**to_fields(args))
    ours.init_weights()
    own = ours.state_dict()
    for name, tensor in LlamaCanonForCausalLM(config).state_dict().items():
        assert torch.equal(tensor, own.get(to_ours(name), own["tok_embeddings.weight"])), name


@pytest.mark.parametrize("name", ["nope ABCD", "nope qk_full gqa tied", "mamba2 AB tied"])
@torch.no_grad()
def test_a_larger_vocabulary(name):
    model, ours = wrapped_model(name)
    size, ids = ours.args.vocab_size, random_tokens(ours.args, rows=1, num_tokens=12)
    model.resize_token_embeddings(size + 8, mean_resizing=False)
    logits = model(torch.cat((ids, torch.full((1, 1), size + 5)), dim=1)).logits
    torch.testing.assert_close(logits[:, :-1, :size], ours(ids))
    assert logits.shape[-1] == model.config.vocab_size == size + 8
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == ours.args.tie_embeddings


@torch.no_grad()
def test_copies_and_casts_keep_the_rotation():
    model, ours = wrapped_model("partial_rope_c ABCD qk_full", max_position_embeddings=200)
    longer = random_tokens(ours.args, rows=1, num_tokens=180)  # than in training
    torch.testing.assert_close(model(longer).logits[:, :160], ours(longer[:, :160]), **CLOSE)
    ids = longer[:, :40]
    low = copy.deepcopy(model).to(torch.bfloat16)
    assert low.core.layers["0"].attention.rope.cos_TR.dtype == torch.float32
    expected = copy.deepcopy(ours).to(torch.bfloat16)(ids)
    # with a cache Canon-D is rounded before the gate: the last bits of bfloat16 differ
    torch.testing.assert_close(low(ids, use_cache=False).logits, expected)
    logits = model(ids).logits
    torch.testing.assert_close(logits, ours(ids))  # the original is unchanged
    torch.testing.assert_close(model(ids, logits_to_keep=3).logits, logits[:, -3:])
    picked = model(ids, logits_to_keep=torch.tensor([2, 5]), return_dict=False)[0]
    torch.testing.assert_close(picked, logits[:, [2, 5]])
    with torch.device("meta"):
        hollow = LlamaCanonForCausalLM(model.config)
    hollow.to_empty(device="cpu").load_state_dict(model.state_dict())
    torch.testing.assert_close(hollow.eval()(ids).logits, ours(ids))


FORWARD: dict[str, Any] = {
    "input_ids": None, "inputs_embeds": torch.zeros(1, 2, 32), "output_attentions": True,
    "output_hidden_states": True, "past_key_values": DynamicCache(),
    "position_ids": torch.tensor([[0, 1, 0, 1]]), "attention_mask": torch.ones(1, 5),
}  # fmt: skip


def test_unsupported_options_raise():
    model, _ = wrapped_model("nope ABCD")
    ids, short = torch.tensor([PROMPTS[1]]), torch.tensor([[1, 2, 3, 4]])
    fields = to_fields(VARIANTS["rope"]) | {"rope_version": "huggingface"}
    past = model(short, use_cache=True).past_key_values
    generate = partial(model.generate, ids, **PLAIN, max_new_tokens=3)
    replica, _ = wrapped_model("nope ABCD")
    replica._is_replica = True  # as nn.parallel.replicate marks them
    calls: list[tuple[str, Callable[[], object]]] = [
        *((name, partial(model, **{"input_ids": short, name: x})) for name, x in FORWARD.items()),
        ("max_position_embeddings = 160", lambda: model(torch.zeros(1, 161, dtype=torch.long))),
        ("assisted generation", lambda: generate(prompt_lookup_num_tokens=2)),
        ("cache_implementation", lambda: generate(cache_implementation="static")),
        ("max_position_embeddings", lambda: generate(max_new_tokens=200)),
        ("cropped", lambda: past.crop(-1)),
        ("cache", lambda: past.update(torch.zeros(1), torch.zeros(1), 0)),
        ("1 rows", lambda: model(torch.tensor([[1], [2]]), past_key_values=past)),
        ("canon hf import", lambda: LlamaCanonForCausalLM(LlamaCanonConfig(**fields))),
        ("DataParallel", lambda: replica(short)),
    ]
    for match, call in calls:
        with pytest.raises((ValueError, NotImplementedError), match=match):
            call()
    assert not model._supports_attention_backend  # vLLM would mix neighboring requests


def test_ids_of_special_tokens_may_be_unknown(tmp_path):
    config = LlamaCanonConfig(**to_fields(VARIANTS["nope ABCD"]))
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None,) * 3
    config.save_pretrained(tmp_path)
    assert None not in json.loads((tmp_path / "config.json").read_text()).values()
    given = LlamaCanonConfig(**to_fields(VARIANTS["nope ABCD"]), eos_token_id=2, pad_token_id=3)
    assert (given.eos_token_id, given.pad_token_id) == (2, 3)


# words of variants that the released class can express
EXPRESSIBLE = {"rope", "nope", "partial_rope_c", "A", "AC", "BD", "ABCD", "k2", "k3", "no_res"}
EXPRESSIBLE |= {"act", "cst", "qk_full", "gqa", "tied", "relu2", "half", "k5"}


@pytest.mark.parametrize("name", VARIANTS)
def test_rope_version_tells_what_the_released_class_supports(name):
    fields = to_fields(VARIANTS[name])
    assert fields.keys() - {EXTENSION} <= DEFAULTS.keys() and None not in fields.values()
    assert fields.get("rope_dim") != 0  # the released class rejects it
    is_expressible = set(name.split()) <= EXPRESSIBLE
    # the released class accepts "lingua" and "huggingface" only
    assert fields["rope_version"] == ("lingua" if is_expressible else "canon_pretrain")
    changes_training_only = {"canon_trainable", "init", "init_seed", "eos_id"}
    has_released_sites = set(fields["canon_set"]) <= set("ABCD")
    changes_nothing_else = fields.get(EXTENSION, {}).keys() <= changes_training_only
    assert is_expressible == (has_released_sites and changes_nothing_else)


OTHERS = ["gla A k3 conv gate_rank cst", "mamba2 conv", "mamba2_mlp conv documents tied"]
OTHERS += ["mamba2 AB mimetic", "gdn ABCD dynamic", "gdn ABC gated_moe capacity"]
OTHERS += ["rope AC moe tied", "nope FO moe"]
LAST = "alibi A no_res act cst standard gqa tied documents"
EXPORTED = [*(name for name in VARIANTS if name != LAST), *OTHERS, LAST]
PROCESS = """
import json, sys
from pathlib import Path

sys.modules["canon_pretrain"] = None  # it may be installed in this environment
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)

torch.set_grad_enabled(False)
options = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
answers = {}
for name, folder in json.loads(Path("request.json").read_text()).items():
    expected = load_file(Path(folder).parent / "expected.safetensors")
    model, tokens_BT, prompts_BT = load(folder), expected["tokens"], expected["tokens"][:, :9]
    options["attention_mask"] = torch.ones_like(prompts_BT)  # otherwise 0 is taken for padding
    texts = [model.generate(prompts_BT, use_cache=cache, **options) for cache in (True, False)]
    answers[name] = {
        "type": type(model).__name__,
        "difference": float((model(tokens_BT).logits - expected["logits"]).abs().max()),
        "scale": float(expected["logits"].abs().max()),
        "greedy": torch.equal(*texts),
        "names": sorted(model.state_dict()),
        "frozen": sorted(n for n, p in model.named_parameters() if not p.requires_grad),
        "architectures": model.config.architectures,
        "canon_set": getattr(model.config, "canon_set", ""),
        "num_layers": model.config.num_hidden_layers,
    }
for dtype in (torch.float32, torch.bfloat16):
    model = model.to(dtype)
    model.save_pretrained(f"copy-{dtype}")
    again = load(f"copy-{dtype}", dtype="auto")
    assert again.dtype == dtype and torch.equal(model(tokens_BT).logits, again(tokens_BT).logits)
Path("answer.json").write_text(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    base = tmp_path_factory.mktemp("exports")
    folders = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        for number, name in enumerate(EXPORTED):
            model, folder = build(variant(name)).eval(), base / f"v{number}"
            folders[name] = str(export_model(folder, model))
            tokens_BT = random_tokens(model.args, rows=2, num_tokens=24, seed=number)
            with torch.no_grad():
                expected = {"tokens": tokens_BT, "logits": model(tokens_BT)}
            save_file(expected, folder / "expected.safetensors")
    (base / "request.json").write_text(json.dumps(folders))
    command = [sys.executable, "-I", "-c", PROCESS]
    subprocess.run(command, cwd=base, env=hub_environment(base), timeout=900, check=True)
    return json.loads((base / "answer.json").read_text())


@pytest.mark.system  # starts a process that imports transformers
@pytest.mark.parametrize("name", EXPORTED)
def test_a_variant_is_loaded_without_this_package(name, answers):
    found, args = answers[name], variant(name)
    plain = plain_fields(args) or {"architectures": ["LlamaCanonForCausalLM"]}
    assert found["difference"] < 1e-4 and found["scale"] > 0.5 and found["greedy"]
    kind = plain.get("model_type", MODEL_TYPE)
    expected = {to_hf(ours, kind) for ours in build(args).state_dict()}
    # transformers lists what is tied too
    assert set(found["names"]) == expected | ({"lm_head.weight"} if args.tie_embeddings else set())
    assert [found["type"]] == found["architectures"] == plain["architectures"]
    # all folders and config classes have the same name: none is mistaken for another
    assert found["canon_set"] == args.canon_set and found["num_layers"] == args.num_layers
    frozen = {n for n in found["names"] if ".canon" in n} if "cst" in name else set()
    assert set(found["frozen"]) == frozen
