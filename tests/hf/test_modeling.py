"""LlamaCanonForCausalLM, also without this package, and the fields of its config.json."""

import copy
import json
import os
import subprocess
import sys
from functools import partial
from typing import Any

import accelerate
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import DynamicCache

from canon_pretrain.hf.classes import CLASSES, plain_fields, to_hf, to_ours
from canon_pretrain.hf.config import (
    ARCHITECTURE,
    AUTO_CLASSES,
    DEFAULTS,
    EXTENSION,
    MODEL_TYPE,
    to_fields,
)
from canon_pretrain.hf.modeling_canon import LlamaCanonConfig, LlamaCanonForCausalLM
from canon_pretrain.hf.qwen3_next import QWEN3_NEXT
from canon_pretrain.model.transformer import Transformer
from tests.hf_exports import export_model, hub_environment
from tests.hf_models import (
    CLOSE,
    OTHERS,
    PLAIN,
    PROMPTS,
    args_of,
    decoded,
    greedy,
    padded,
    wrapped_model,
)
from tests.support import selected
from tests.variants import PATTERNS, VARIANTS, build, every_variant, random_tokens

TRAINED = [
    "rope AC no_res act standard_relu2 qk_full gqa tied documents",
    "rope A k3 cst relu2 qk_per_head documents",  # cst: the kernels have no gradient
    "gla AC conv cst",
    "mamba2 B",
    "gdn ABCD",
    "moe",
    "moe capacity",
    *PATTERNS,
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@decoded
@torch.no_grad()
def test_greedy_decoding_of_prompts_of_different_lengths(name, device):
    model, ours = wrapped_model(name)
    ids, mask = padded(PROMPTS)
    cpu_logits = model(ids, attention_mask=mask).logits
    model = model.to(device)
    ids = ids.to(device)
    mask = mask.to(device)

    logits = model(ids, attention_mask=mask).logits.cpu()
    torch.testing.assert_close(logits[:, -1], cpu_logits[:, -1], atol=1e-3, rtol=0)

    rows = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, **PLAIN)
    for row, prompt in zip(rows.tolist(), PROMPTS, strict=True):
        num_padding = ids.shape[1] - len(prompt)
        assert row[num_padding:] == greedy(ours, prompt, 6)


@decoded
def test_beam_search_equals_that_without_a_cache(name):
    model, _ = wrapped_model(name)
    ids, mask = padded(PROMPTS[:2])
    search = partial(
        model.generate,
        ids,
        attention_mask=mask,
        max_new_tokens=5,
        num_beams=3,
        num_return_sequences=3,
        do_sample=False,
        **PLAIN,
    )

    with_cache = search()

    assert torch.equal(with_cache, search(use_cache=False))
    assert len({tuple(row) for row in with_cache.tolist()}) == 6


@pytest.mark.parametrize("sizes", [(1,) * 12, (5, 1, 4, 2), (2, 10)], ids=["ones", "mixed", "two"])
@decoded
@torch.no_grad()
def test_a_prompt_in_several_forward_passes(name, sizes):
    model, ours = wrapped_model(name)
    prompts = [[*PROMPTS[1], 9], [*PROMPTS[0], 4, 4]]
    ids, mask = padded(prompts)

    past = None
    parts = []
    end = 0
    for size in sizes:
        start = end
        end += size
        # the mask may include the cached tokens or not
        part_mask = mask[:, :end] if len(parts) % 2 else mask[:, start:end]
        output = model(
            ids[:, start:end], attention_mask=part_mask, past_key_values=past, use_cache=True
        )
        past = output.past_key_values
        parts.append(output.logits)

    assert past.get_seq_length() == 12
    for logits, prompt in zip(torch.cat(parts, dim=1), prompts, strict=True):
        expected = ours(torch.tensor([prompt]))[0]
        torch.testing.assert_close(logits[12 - len(prompt) :], expected, **CLOSE)


@pytest.mark.parametrize("mode", ["eval", "checkpointed"])
@pytest.mark.parametrize("name", TRAINED)
def test_loss_and_gradients(mode, name):
    model, ours = wrapped_model(name)
    if mode == "checkpointed":
        model.train()
        newer = getattr(model, "activation_checkpointing_enable", None)
        enable = newer or model.gradient_checkpointing_enable
        enable()
    ours.train(model.training)  # experts drop tokens in training, and in evaluation never
    ids = random_tokens(ours.args, rows=2, num_tokens=20)
    labels = ids.clone()
    labels[0, :7] = -100

    loss = model(ids, labels=labels).loss
    loss.backward()

    expected = F.cross_entropy(ours(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    expected.backward()
    torch.testing.assert_close(loss, expected)
    our_weights = dict(ours.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, our_weights[to_ours(name)].grad)


OFFLOADED = [
    "rope ABCD qk_full",
    "gla AC conv gate_rank",
    "mamba2 AB tied",
    "gdn BD dynamic",
    "gdn ABC gated_moe capacity",
    "moe capacity tied",
    "last_attention",
    "four_mixers",
]


def offload_to_disk(model, args, folder):
    """Save a model and load it with all but the first layer on the disk."""
    places = dict.fromkeys(["model.embed_tokens", "model.layers.0", "lm_head"], "cpu")
    places["model.norm"] = "disk"
    for number in range(1, args.num_layers):
        places[f"model.layers.{number}"] = "disk"
    model.save_pretrained(folder)
    return LlamaCanonForCausalLM.from_pretrained(
        folder, device_map=places, offload_folder=folder / "offloaded"
    )


@pytest.mark.parametrize("offload", ["cpu", "disk"])
@pytest.mark.parametrize("name", OFFLOADED)
@torch.no_grad()
def test_offloaded_weights(name, offload, tmp_path):
    model, ours = wrapped_model(name)
    ids = random_tokens(ours.args, rows=2, num_tokens=12)
    if offload == "cpu":
        accelerate.cpu_offload(model, torch.device("cpu"), offload_buffers=True)
    else:
        model = offload_to_disk(model, ours.args, tmp_path)

    for use_cache in (False, True):
        torch.testing.assert_close(model(ids, use_cache=use_cache).logits, ours(ids))

    mask = torch.ones_like(ids)
    rows = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, **PLAIN)
    assert rows.tolist() == [greedy(ours, row, 4) for row in ids.tolist()]

    # and none is kept
    layer = model.model.layers[1]
    assert all(weight.is_meta for weight in layer.parameters())


class Wrapped(nn.Module):
    """A module that counts its calls, as those of PEFT wrap them."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.calls = 0

    def forward(self, *arguments):
        self.calls += 1
        return self.inner(*arguments)


REPLACED = {
    "nope ABCD k2 no_res act standard documents": {"canonA", "canonC", "mlp.canonD"},
    "gla AC conv gate_rank": {"self_attn.gk_proj.1", "self_attn.g_proj.0", "self_attn.conv1d"},
    "mamba2 AB": {"self_attn.in_proj", "self_attn.canonB", "self_attn.norm", "self_attn.out_proj"},
    "gdn ABCD": {"self_attn.a_proj", "self_attn.o_norm", "self_attn.g_proj", "self_attn.canonB"},
    "rope A moe": {"mlp.gate", "canonA"},
}


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", REPLACED)
@torch.no_grad()
def test_replaced_modules_of_a_layer_are_called_once(name, use_cache):
    model, ours = wrapped_model(name)
    ids = random_tokens(ours.args, rows=1, num_tokens=12)
    layer = model.model.layers[1]
    weight_names = [weight_name for weight_name, _ in layer.named_parameters()]
    places = {
        weight_name.rpartition(".")[0]
        for weight_name in weight_names
        if weight_name.endswith((".weight", ".bias"))
    }
    assert REPLACED[name] <= places

    wrappers = []
    for place in places:
        folder, _, attribute = place.rpartition(".")
        owner = layer.get_submodule(folder)
        wrapper = Wrapped(getattr(owner, attribute))
        setattr(owner, attribute, wrapper)
        wrappers.append(wrapper)
    logits = model(ids, use_cache=use_cache).logits

    torch.testing.assert_close(logits, ours(ids))
    assert [wrapper.calls for wrapper in wrappers] == [1] * len(places)


@every_variant
def test_a_new_model_has_the_initial_weights_of_training(args):
    ours = Transformer(args)
    ours.init_weights()
    our_weights = ours.state_dict()

    model = LlamaCanonForCausalLM(LlamaCanonConfig(**to_fields(args)))

    for name, tensor in model.state_dict().items():
        # a tied head has no weights of its own
        expected = our_weights.get(to_ours(name), our_weights["tok_embeddings.weight"])
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("name", ["nope ABCD", "nope qk_full gqa tied", "mamba2 AB tied"])
@torch.no_grad()
def test_a_larger_vocabulary(name):
    model, ours = wrapped_model(name)
    size = ours.args.vocab_size
    ids = random_tokens(ours.args, rows=1, num_tokens=12)
    new_id = torch.full((1, 1), size + 5)

    model.resize_token_embeddings(size + 8, mean_resizing=False)
    logits = model(torch.cat((ids, new_id), dim=1)).logits

    torch.testing.assert_close(logits[:, :-1, :size], ours(ids))
    assert logits.shape[-1] == model.config.vocab_size == size + 8
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert is_tied == ours.args.tie_embeddings


@pytest.fixture
def rotated():
    """A model with rotations of 200 positions, longer than in training, and ours."""
    return wrapped_model("partial_rope_c ABCD qk_full", max_position_embeddings=200)


@torch.no_grad()
def test_positions_beyond_training(rotated):
    model, ours = rotated
    ids = random_tokens(ours.args, rows=1, num_tokens=180)

    torch.testing.assert_close(model(ids).logits[:, :160], ours(ids[:, :160]), **CLOSE)


@torch.no_grad()
def test_copies_and_casts_keep_the_rotation(rotated):
    model, ours = rotated
    ids = random_tokens(ours.args, rows=1, num_tokens=180)[:, :40]
    expected = copy.deepcopy(ours).to(torch.bfloat16)(ids)

    low = copy.deepcopy(model).to(torch.bfloat16)

    assert low.model.rotary_emb[0].cos_TR.dtype == torch.float32
    # with a cache Canon-D is rounded before the gate: the last bits of bfloat16 differ
    torch.testing.assert_close(low(ids, use_cache=False).logits, expected)
    torch.testing.assert_close(model(ids).logits, ours(ids))  # the original is unchanged


@torch.no_grad()
def test_a_model_on_the_meta_device_gets_its_rotation(rotated):
    model, ours = rotated
    ids = random_tokens(ours.args, rows=1, num_tokens=180)[:, :40]

    with torch.device("meta"):
        hollow = LlamaCanonForCausalLM(model.config)
    hollow.to_empty(device="cpu").load_state_dict(model.state_dict())

    torch.testing.assert_close(hollow.eval()(ids).logits, ours(ids))


@torch.no_grad()
def test_logits_to_keep(rotated):
    model, ours = rotated
    ids = random_tokens(ours.args, rows=1, num_tokens=180)[:, :40]
    logits = model(ids).logits

    torch.testing.assert_close(model(ids, logits_to_keep=3).logits, logits[:, -3:])
    picked = model(ids, logits_to_keep=torch.tensor([2, 5]), return_dict=False)[0]
    torch.testing.assert_close(picked, logits[:, [2, 5]])


FORWARD: dict[str, Any] = {
    "input_ids": None,
    "inputs_embeds": torch.zeros(1, 2, 32),
    "past_key_values": DynamicCache(),
    "position_ids": torch.tensor([[0, 1, 0, 1]]),
    "attention_mask": torch.ones(1, 5),
}


@pytest.fixture
def raises():
    """Return the function that expects an error that names something."""
    return partial(pytest.raises, (ValueError, NotImplementedError))


@pytest.mark.parametrize("argument", FORWARD)
def test_unsupported_arguments_of_forward_raise(raises, argument):
    model, _ = wrapped_model("nope ABCD")
    ids = torch.tensor([[1, 2, 3, 4]])

    with raises(match=argument):
        model(**{"input_ids": ids, argument: FORWARD[argument]})


def test_unsupported_options_of_generate_raise(raises):
    model, _ = wrapped_model("nope ABCD")
    ids = torch.tensor([PROMPTS[1]])

    for match, options in (
        ("cache_implementation", {"cache_implementation": "quantized"}),
        ("max_position_embeddings", {"max_new_tokens": 200}),
    ):
        arguments = {"max_new_tokens": 3} | options
        with raises(match=match):
            model.generate(ids, **PLAIN, **arguments)


def test_unsupported_uses_of_a_cache_raise(raises):
    model, _ = wrapped_model("nope ABCD")
    past = model(torch.tensor([[1, 2, 3, 4]]), use_cache=True).past_key_values

    with raises(match="cropped"):  # its pass was not recorded
        past.crop(-1)
    with raises(match="cache"):
        past.update(torch.zeros(1), torch.zeros(1), 0)
    with raises(match="1 rows"):
        model(torch.tensor([[1], [2]]), past_key_values=past)


def test_unsupported_models_raise(raises):
    model, _ = wrapped_model("nope ABCD")
    assert not model._supports_attention_backend  # vLLM would mix neighboring requests
    with raises(match="max_position_embeddings = 160"):
        model(torch.zeros(1, 161, dtype=torch.long))

    huggingface = to_fields(VARIANTS["rope"]) | {"rope_version": "huggingface"}
    with raises(match="canon hf import"):
        LlamaCanonForCausalLM(LlamaCanonConfig(**huggingface))

    model.model._is_replica = True  # as nn.parallel.replicate marks all modules
    with raises(match="DataParallel"):
        model(torch.tensor([[1, 2, 3, 4]]))


def test_ids_of_special_tokens_may_be_unknown(tmp_path):
    fields = to_fields(VARIANTS["nope ABCD"])

    config = LlamaCanonConfig(**fields)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, None)
    config.save_pretrained(tmp_path)
    assert None not in json.loads((tmp_path / "config.json").read_text()).values()

    with_ids = LlamaCanonConfig(**fields, eos_token_id=2, pad_token_id=3)
    assert (with_ids.eos_token_id, with_ids.pad_token_id) == (2, 3)


# words of variants that the released class can express
EXPRESSIBLE = {
    *("rope", "nope", "partial_rope_c", "half"),
    *("A", "AC", "BD", "ABCD", "k2", "k3", "k5", "no_res", "act", "cst"),
    *("qk_full", "gqa", "tied", "relu2"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_rope_version_tells_what_the_released_class_supports(name):
    is_expressible = set(name.split()) <= EXPRESSIBLE

    fields = to_fields(VARIANTS[name])

    assert fields.keys() - {EXTENSION} <= DEFAULTS.keys()
    assert None not in fields.values()
    assert fields.get("rope_dim") != 0  # the released class rejects it
    # the released class accepts "lingua" and "huggingface" only
    assert fields["rope_version"] == ("lingua" if is_expressible else "canon_pretrain")
    changes_training_only = {"canon_trainable", "init", "init_seed", "eos_id"}
    has_released_sites = set(fields["canon_set"]) <= set("ABCD")
    changes_nothing_else = fields.get(EXTENSION, {}).keys() <= changes_training_only
    assert is_expressible == (has_released_sites and changes_nothing_else)


LAST = "alibi A no_res act cst standard gqa tied documents"
EXPORTED = [*(name for name in VARIANTS if name != LAST), *OTHERS, LAST]
PROCESS = """
import json, sys
from pathlib import Path

sys.modules["canon_pretrain"] = None  # it may be installed in this environment
import torch
from safetensors.torch import load_file
import transformers
from transformers import AutoModelForCausalLM

def load(folder, auto=AutoModelForCausalLM, **options):
    return auto.from_pretrained(folder, trust_remote_code=True, **options)

def other_classes(folder, model, tokens_BT):
    # the largest difference of hidden states, and the names of the classes that load
    hidden_states = model(tokens_BT, output_hidden_states=True).hidden_states
    base = load(folder, transformers.AutoModel)
    difference = (base(tokens_BT).last_hidden_state - hidden_states[-1]).abs().max()
    heads = []
    for task in ("SequenceClassification", "TokenClassification"):
        auto = getattr(transformers, f"AutoModelFor{task}")
        head = load(folder, auto, num_labels=3)
        head.config.pad_token_id = 0
        logits = head(tokens_BT).logits
        if logits.shape[-1] == 3 and logits.isfinite().all():
            heads.append(type(head).__name__)
    return float(difference), [type(base).__name__, *heads]

torch.set_grad_enabled(False)
options = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
answers = {}
for name, folder in json.loads(Path("request.json").read_text()).items():
    expected = load_file(Path(folder).parent / "expected.safetensors")
    model, tokens_BT, prompts_BT = load(folder), expected["tokens"], expected["tokens"][:, :9]
    options["attention_mask"] = torch.ones_like(prompts_BT)  # otherwise 0 is taken for padding
    texts = [model.generate(prompts_BT, use_cache=cache, **options) for cache in (True, False)]
    base_difference, other_types = None, []
    if type(model).__name__ == "LlamaCanonForCausalLM":
        base_difference, other_types = other_classes(folder, model, tokens_BT)
    answers[name] = {
        "type": type(model).__name__,
        "base_difference": base_difference,
        "other_types": other_types,
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
def answers(request, tmp_path_factory):
    """What a process without this package finds in the exports of the selected variants."""
    base = tmp_path_factory.mktemp("exports")
    folders = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        for number, name in enumerate(selected(request, "name")):
            model = build(args_of(name)).eval()
            folder = base / f"v{number}"
            folders[name] = str(export_model(folder, model))

            tokens_BT = random_tokens(model.args, rows=2, num_tokens=24, seed=number)
            with torch.no_grad():
                expected = {"tokens": tokens_BT, "logits": model(tokens_BT)}
            save_file(expected, folder / "expected.safetensors")
    (base / "request.json").write_text(json.dumps(folders))

    command = [sys.executable, "-I", "-c", PROCESS]
    subprocess.run(command, cwd=base, env=hub_environment(base), timeout=900, check=True)
    return json.loads((base / "answer.json").read_text())


# every fifth one in the system tier: exports of all are loaded in this process by other tests
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.system if k % 5 == 4 else pytest.mark.long)
        for k, name in enumerate(EXPORTED)
    ],
)
def test_a_variant_is_loaded_without_this_package(name, answers):
    args = args_of(name)
    plain = plain_fields(args) or {"architectures": ["LlamaCanonForCausalLM"]}

    answer = answers[name]

    assert answer["difference"] < 1e-4
    assert answer["scale"] > 0.5
    assert answer["greedy"]
    assert [answer["type"]] == answer["architectures"] == plain["architectures"]
    if answer["type"] == ARCHITECTURE:
        assert answer["base_difference"] == 0
        others = [kind for kind in AUTO_CLASSES.values() if kind != ARCHITECTURE]
        assert answer["other_types"] == others

    kind = plain.get("model_type", MODEL_TYPE)
    weights = build(args).state_dict()
    if kind == QWEN3_NEXT:  # some of whose tensors hold several of ours
        expected_names = {name for name, _ in CLASSES[kind].to_class(weights.items(), args)}
    else:
        expected_names = {to_hf(ours, kind, args) for ours in weights}
    if args.tie_embeddings:  # transformers lists what is tied too
        expected_names.add("lm_head.weight")
    assert set(answer["names"]) == expected_names

    # all folders and config classes have the same name: none is mistaken for another
    assert answer["canon_set"] == args.canon_set
    assert answer["num_layers"] == args.num_layers
    is_frozen = "cst" in name
    frozen = {weight for weight in answer["names"] if ".canon" in weight and is_frozen}
    assert set(answer["frozen"]) == frozen
