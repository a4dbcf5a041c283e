"""The base model of an export and its heads, its cache, and what tools do with its modules."""

import copy
from functools import partial

import accelerate
import peft
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from canon_pretrain.hf.classes import to_hf
from canon_pretrain.hf.config import to_fields
from canon_pretrain.hf.modeling_canon import (
    DecodingCache,
    LlamaCanonConfig,
    LlamaCanonForCausalLM,
    LlamaCanonForSequenceClassification,
    LlamaCanonForTokenClassification,
    LlamaCanonModel,
)
from tests.hf_models import CLOSE, OTHERS, PLAIN, PROMPTS, args_of, decoded, padded, wrapped_model
from tests.variants import VARIANTS, build, random_tokens

every_export = pytest.mark.parametrize("name", [*VARIANTS, *OTHERS, "moe capacity tied"])


def named_args(name):
    return VARIANTS.get(name) or args_of(name)


def our_hidden_states(ours, ids):
    """Return what each of our layers reads, and what the head reads."""
    states = []
    modules = [*ours.layers.values()]
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
        for module in modules
    ]
    hooks.append(ours.norm.register_forward_hook(lambda _, inputs, output: states.append(output)))
    ours(ids)
    for hook in hooks:
        hook.remove()
    return states


# -- hidden states, attentions, embeddings ---------------------------------------------------------


@decoded
@torch.no_grad()
def test_hidden_states_are_those_of_our_layers(name):
    model, ours = wrapped_model(name)
    ids = random_tokens(ours.args, rows=2, num_tokens=14)
    expected = our_hidden_states(ours, ids)

    states = model(ids, output_hidden_states=True, use_cache=False).hidden_states

    assert len(states) == ours.args.num_layers + 1
    for state, ours_state in zip(states, expected, strict=True):
        torch.testing.assert_close(state, ours_state)
    base = model.model(ids, use_cache=False)
    assert torch.equal(base.last_hidden_state, states[-1]) and base.hidden_states is None


@decoded
@torch.no_grad()
def test_outputs_are_computed_from_the_attentions(name):
    model, ours = wrapped_model(name)
    ids, mask = padded(PROMPTS)
    plain = model(ids, attention_mask=mask)

    output = model(ids, attention_mask=mask, output_attentions=True)

    kinds = [layer for layer in ours.args.layer_args if layer.mixer == "attention"]
    assert len(output.attentions) == len(kinds)
    num_tokens = ids.shape[1]
    future = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    for weights, layer in zip(output.attentions, kinds, strict=True):
        assert weights.shape == (len(ids), layer.num_heads, num_tokens, num_tokens)
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:3]))
        assert not weights[..., future].any()
        assert not weights[0, :, -1, mask[0] == 0].any()
    real = mask.bool()
    torch.testing.assert_close(output.logits[real], plain.logits[real], **CLOSE)


@torch.no_grad()
def test_attentions_with_a_cache_are_rows_of_those_without():
    model, ours = wrapped_model("window_alibi_docs")
    ids = random_tokens(ours.args, rows=1, num_tokens=9)
    whole = model(ids, output_attentions=True, use_cache=False).attentions

    past = model(ids[:, :2], use_cache=True).past_key_values
    parts = model(ids[:, 2:], past_key_values=past, output_attentions=True).attentions

    for weights, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(weights, expected[:, :, 2:])


def test_flex_attention_has_no_attentions():
    model, _ = wrapped_model("nope ABCD", attn_implementation="flex_attention")

    with pytest.raises(ValueError, match="output_attentions"):
        model(torch.tensor([[1, 2, 3]]), output_attentions=True)


def test_gradient_checkpointing_has_no_attentions():
    model, _ = wrapped_model("nope ABCD")
    newer = getattr(model, "activation_checkpointing_enable", None)
    enable = newer or model.gradient_checkpointing_enable
    enable()

    with pytest.raises(ValueError, match="output_attentions"):
        model.train()(torch.tensor([[1, 2, 3]]), output_attentions=True)


@decoded
@torch.no_grad()
def test_embeddings_in_place_of_ids(name):
    model, ours = wrapped_model(name)
    ids = random_tokens(ours.args, rows=2, num_tokens=14)
    embeds = model.get_input_embeddings()(ids)
    assert (ids == ours.args.eos_id).any()  # which ends documents

    torch.testing.assert_close(model(inputs_embeds=embeds).logits, ours(ids))

    generate = partial(model.generate, max_new_tokens=4, do_sample=False, **PLAIN)
    mask = torch.ones_like(ids)
    from_ids = generate(ids, attention_mask=mask)[:, ids.shape[1] :]
    assert torch.equal(generate(inputs_embeds=embeds, attention_mask=mask), from_ids)


# -- heads -----------------------------------------------------------------------------------------


def headed(head, name):
    """Return a model with a head for three classes, and the base of equal weights."""
    config = LlamaCanonConfig(**to_fields(named_args(name)), num_labels=3, pad_token_id=0)
    model = head(config).eval()
    base = LlamaCanonModel(config).eval()
    base.load_state_dict(model.model.state_dict())
    return model, base


@pytest.mark.parametrize("name", ["nope ABCD", "mamba2 AB documents", "moe capacity"])
def test_a_class_per_text_is_that_of_its_last_token(name):
    model, base = headed(LlamaCanonForSequenceClassification, name)
    ids = torch.tensor([[5, 9, 3, 8, 4], [7, 6, 11, 0, 0]])
    mask = (ids != 0).long()
    labels = torch.tensor([2, 1])

    output = model(ids, attention_mask=mask, labels=labels)

    hidden = base(ids, attention_mask=mask).last_hidden_state
    expected = hidden[torch.arange(2), torch.tensor([4, 2])] @ model.score.weight.T
    torch.testing.assert_close(output.logits, expected)
    torch.testing.assert_close(output.loss, F.cross_entropy(expected, labels))
    output.loss.backward()
    assert model.model.embed_tokens.weight.grad.any()


def test_a_class_per_token():
    model, base = headed(LlamaCanonForTokenClassification, "rope")
    ids = torch.tensor([[5, 9, 3, 8, 4]])
    labels = torch.tensor([[0, 1, 2, -100, 1]])

    output = model(ids, labels=labels)

    expected = F.linear(base(ids).last_hidden_state, model.score.weight, model.score.bias)
    torch.testing.assert_close(output.logits, expected)
    torch.testing.assert_close(output.loss, F.cross_entropy(expected[0], labels[0]))


LOADED = ["nope ABCD", "nope qk_full gqa tied", "gdn ABC gated_moe capacity"]


@pytest.mark.parametrize("name", LOADED)
def test_the_base_and_heads_load_the_language_models_weights(name, tmp_path):
    model, _ = wrapped_model(name)
    model.save_pretrained(tmp_path / "lm")
    weights = model.model.state_dict()

    for kind in (LlamaCanonModel, LlamaCanonForSequenceClassification):
        loaded, report = kind.from_pretrained(tmp_path / "lm", output_loading_info=True)
        assert set(report["missing_keys"]) <= {"score.weight"}
        for weight_name, weight in loaded.base_model.state_dict().items():
            assert torch.equal(weight, weights[weight_name]), weight_name

    # and the language model those of the base
    model.model.save_pretrained(tmp_path / "base")
    loaded = LlamaCanonForCausalLM.from_pretrained(tmp_path / "base")
    for weight_name, weight in loaded.model.state_dict().items():
        assert torch.equal(weight, weights[weight_name]), weight_name


# -- the cache is cut back -------------------------------------------------------------------------


@decoded
@torch.no_grad()
def test_recorded_passes_are_undone_to_any_length(name):
    model, ours = wrapped_model(name)
    ids, mask = padded([[*PROMPTS[1], 9], [*PROMPTS[0], 4, 4]])
    # what is read instead of the tokens after a cut
    other = torch.tensor([[17, 2, 21], [30, 5, 12]])

    for length in (5, 6, 8, 11):  # before all, between passes, and inside
        past = DecodingCache(model.model.args)
        model(ids[:, :5], attention_mask=mask[:, :5], past_key_values=past)
        past.activate_past_recording()
        end = 5
        for size in (1, 4, 1, 1):
            end += size
            model(ids[:, end - size : end], attention_mask=mask[:, :end], past_key_values=past)
        past.crop(length - past.get_seq_length())
        assert past.get_seq_length() == length

        changed = torch.cat((ids[:, :length], other), dim=1)
        changed_mask = torch.cat((mask[:, :length], torch.ones_like(other)), dim=1)
        # the second pass reads what the first one has added
        first = model(
            changed[:, length : length + 2],
            attention_mask=changed_mask[:, : length + 2],
            past_key_values=past,
            output_hidden_states=True,
        )
        second = model(changed[:, length + 2 :], attention_mask=changed_mask, past_key_values=past)

        expected = model(changed, attention_mask=changed_mask, use_cache=False).logits
        logits = torch.cat((first.logits, second.logits), dim=1)
        torch.testing.assert_close(logits, expected[:, length:], **CLOSE)
        assert first.hidden_states[0].shape[1] == 2
        assert past.get_seq_length() == length + 3


@pytest.mark.parametrize("name", ["rope gqa", "rope qk_full documents", "window", "alibi BF"])
@torch.no_grad()
def test_what_was_not_recorded(name):
    model, ours = wrapped_model(name)
    ids = random_tokens(ours.args, rows=2, num_tokens=12)
    has_states = bool(ours.args.canon_set or ours.args.window)

    for length in range(1, 12):
        past = model(ids, use_cache=True).past_key_values
        if has_states:
            with pytest.raises(ValueError, match="activate_past_recording"):
                past.crop(length - 12)
            continue
        past.crop(length)  # as transformers 4.57 means it
        logits = model(ids[:, length:], past_key_values=past).logits
        torch.testing.assert_close(logits, ours(ids)[:, length:], **CLOSE)


def test_a_cache_cannot_be_cropped_below_nothing():
    model, _ = wrapped_model("rope gqa")
    past = model(torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values

    with pytest.raises(ValueError, match="4 of 3"):
        past.crop(-4)
    past.crop(-3)
    assert past.get_seq_length() == 0


@pytest.mark.parametrize("way", ["lookup", "assistant", "itself"])
@decoded
def test_assisted_generation(name, way):
    model, ours = wrapped_model(name)
    ids = torch.tensor([[*PROMPTS[1], *PROMPTS[1]]])
    generate = partial(
        model.generate,
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=14,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,  # the assistant takes this id for padding
    )
    options = {"prompt_lookup_num_tokens": 3}
    if way == "itself":
        assistant = copy.deepcopy(model)
        assistant.generation_config.assistant_confidence_threshold = 0.0  # it always guesses
        options = {"assistant_model": assistant}
    if way == "assistant":  # which often differs
        assistant, _ = wrapped_model("gdn AC conv")
        options = {"assistant_model": assistant}
    calls = []
    model.model.register_forward_hook(lambda _, inputs, output: calls.append(inputs))

    texts = generate(**options)

    num_calls = len(calls)
    assert torch.equal(texts, generate())
    if way == "itself":  # all guesses are right
        assert num_calls <= 3


# -- what tools do with modules ---------------------------------------------------------------


@every_export
def test_every_weight_is_registered_once_and_under_its_name(name):
    args = named_args(name)
    ours = build(args)
    model = LlamaCanonForCausalLM(LlamaCanonConfig(**to_fields(args)))
    names = {to_hf(our_name) for our_name in ours.state_dict()}

    state = model.state_dict()
    tied = {"lm_head.weight"} if args.tie_embeddings else set()
    assert state.keys() == names | tied
    all_names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert len(all_names) == len(set(all_names))
    owners = [id(weight) for _, weight in model.model.named_parameters(remove_duplicate=False)]
    assert len(owners) == len(set(owners))


@every_export
@torch.no_grad()
def test_offloaded_weights_of_every_variant(name):
    ours = build(named_args(name)).eval()
    model = LlamaCanonForCausalLM(LlamaCanonConfig(**to_fields(ours.args))).eval()
    state = {to_hf(our_name): tensor for our_name, tensor in ours.state_dict().items()}
    model.load_state_dict(state, strict=False)
    ids = random_tokens(ours.args, rows=2, num_tokens=12)
    accelerate.cpu_offload(model, torch.device("cpu"), offload_buffers=True)

    for use_cache in (False, True):
        torch.testing.assert_close(model(ids, use_cache=use_cache).logits, ours(ids))
    assert all(weight.is_meta for weight in model.parameters())


@every_export
@torch.no_grad()
def test_modes_reach_every_module(name):
    ours = build(named_args(name))
    model = LlamaCanonForCausalLM(LlamaCanonConfig(**to_fields(ours.args)))
    state = {to_hf(our_name): tensor for our_name, tensor in ours.state_dict().items()}
    model.load_state_dict(state, strict=False)
    ids = random_tokens(ours.args, rows=2, num_tokens=20)

    logits = {}
    for is_training in (True, False):
        model.train(is_training)
        ours.train(is_training)
        assert all(module.training == is_training for module in model.modules())
        logits[is_training] = model(ids, use_cache=False).logits
        torch.testing.assert_close(logits[is_training], ours(ids))

    # experts drop tokens in training only
    is_dropping = any(layer.moe_capacity for layer in ours.args.layer_args)
    assert torch.equal(logits[True], logits[False]) != is_dropping


ADAPTED = [
    "nope ABCD k2 no_res act standard documents",
    "relative FKOV distances6 embed_norm qk_per_head gqa documents",
    "gla AC conv gate_rank",
    "mamba2 AB",
    "gdn ABCD",
    "nope gated ABCD documents",
    "gdn ABC gated_moe capacity",
    "rope smear gqa tied",
]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft reads it
@pytest.mark.parametrize("name", ADAPTED)
def test_an_adapter_on_every_linear_layer_is_used(name):
    model, ours = wrapped_model(name)
    ids = random_tokens(ours.args, rows=2, num_tokens=20)
    linear = {
        module_name
        for module_name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module_name != "lm_head"
    }
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=sorted(linear), init_lora_weights=True)
    )
    torch.testing.assert_close(adapted(ids).logits, ours(ids))  # adapters begin as 0

    adapted(ids, labels=ids).loss.backward()

    gradients = {
        weight_name: weight.grad
        for weight_name, weight in adapted.named_parameters()
        if "lora_B" in weight_name
    }
    assert len(gradients) == len(linear)
    unused = [weight_name for weight_name, grad in gradients.items() if not grad.any()]
    assert not unused


def test_a_layer_on_another_device_has_its_own_rotations():
    model, _ = wrapped_model("rope gqa")
    (rope,) = model.model.rotary_emb

    cos_TR, sin_TR = rope.tables(torch.device("meta"))

    assert cos_TR.is_meta and sin_TR.shape == rope.sin_TR.shape
    assert rope.tables(torch.device("cpu"))[0] is rope.cos_TR


@pytest.mark.parametrize("name", ["nope ABCD", "moe capacity", "last_attention"])
@torch.no_grad()
def test_whole_models_are_copied_and_pickled(name, tmp_path):
    model, ours = wrapped_model(name)
    ids = random_tokens(ours.args, rows=1, num_tokens=12)
    torch.save(model, tmp_path / "model.pt")
    copies = [copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)]
    for weight in model.parameters():
        weight.zero_()  # the copies have their own

    for copied in copies:
        torch.testing.assert_close(copied(ids).logits, ours(ids))
