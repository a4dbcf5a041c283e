"""A cache of fixed size: in `generate`, as a pytree, and in programs of torch.export."""

import io
import logging
from functools import partial

import pytest
import torch
import torch.utils._pytree as pytree
from torch._dynamo.backends.registry import lookup_backend
from transformers.cache_utils import StaticCache
from transformers.generation import CompileConfig, GenerationConfig, GenerationMode

from canon_pretrain.hf.modeling_canon import DecodingCache, StaticDecodingCache
from tests.hf_models import CLOSE, PLAIN, PROMPTS, decoded, padded, wrapped_model
from tests.variants import random_tokens

NUM_PROMPT = 9
NUM_TOKENS = 20
# attention with Canon, documents and biases; states; dynamic filters; a ring; experts
EXPORTED = [
    "nope ABCD",
    "relative FKOV distances6 embed_norm qk_per_head gqa documents",
    "gdn AC conv",
    "gdn ABCD dynamic",
    "window_alibi_docs",
    "nope ABC moe capacity",
]
COMPILED = [
    ("nope ABCD", "eager"),
    pytest.param("nope ABCD", "inductor", marks=pytest.mark.long),
    ("gdn AC conv", "eager"),
    ("window_alibi_docs", "eager"),
    ("nope ABC moe capacity", "eager"),
]


@decoded
@torch.no_grad()
def test_generation_with_a_static_cache(name):
    model, ours = wrapped_model(name)
    ids, mask = padded(PROMPTS)
    generate = partial(
        model.generate, ids, attention_mask=mask, max_new_tokens=8, do_sample=False, **PLAIN
    )

    caches = []
    hook = model.model.register_forward_hook(
        lambda _, inputs, output: caches.append(output.past_key_values)
    )
    texts = generate(cache_implementation="static")
    hook.remove()

    assert torch.equal(texts, generate())
    assert caches[0].max_cache_len == ids.shape[1] + 7
    assert all(cache is caches[0] for cache in caches)
    if name == "nope ABCD":
        beams = generate(cache_implementation="static", num_beams=3)
        assert torch.equal(beams, generate(num_beams=3))


@torch.no_grad()
def test_a_static_cache_has_its_buffers_from_the_start():
    model, ours = wrapped_model("rope gqa")
    ids = random_tokens(ours.args, rows=1, num_tokens=100)
    cache = model.static_cache(100)
    model(ids[:, :3], past_key_values=cache)
    keys = cache.memory.layers[0]._buffers["keys"]

    for start in range(3, 100):
        model(ids[:, start : start + 1], past_key_values=cache)

    assert cache.memory.layers[0]._buffers["keys"] is keys and keys.shape[2] == 100
    assert cache.get_seq_length() == cache.get_max_cache_shape() == 100
    with pytest.raises(ValueError, match="101 tokens > max_cache_len = 100"):
        model(ids[:, :1], past_key_values=cache)
    cache.reset()
    logits = model(ids[:, :5], past_key_values=cache).logits
    torch.testing.assert_close(logits, ours(ids[:, :5]), **CLOSE)


@decoded
@torch.no_grad()
def test_a_step_continues_from_the_leaves_of_a_static_cache(name):
    model, ours = wrapped_model(name)
    ids, mask = padded([[*PROMPTS[1], 9, 2, 6], [*PROMPTS[0], 4, 4, 2]])
    whole = model(ids, attention_mask=mask, use_cache=False).logits
    cache = model.static_cache(20)

    # a prompt, single tokens, two at once, a single one
    end = 0
    for size in (7, 1, 1, 1, 2, 1, 1):
        leaves, spec = pytree.tree_flatten(cache)
        assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
        cache = pytree.tree_unflatten(leaves, spec)
        start, end = end, end + size
        part = slice(start, end)
        output = model(ids[:, part], attention_mask=mask[:, :end], past_key_values=cache)
        torch.testing.assert_close(
            output.logits[mask[:, part] > 0], whole[:, part][mask[:, part] > 0], **CLOSE
        )
        assert cache.get_seq_length() == end
    assert end == ids.shape[1]

    # its tokens can be undone
    cache.activate_past_recording()
    other = torch.tensor([[5], [8]])
    model(other, past_key_values=cache)
    cache.crop(-1)
    assert cache.get_seq_length() == end


@pytest.mark.system
@pytest.mark.filterwarnings("ignore")  # torch's, of its own compiler
@pytest.mark.parametrize(("name", "backend"), COMPILED)
@torch.no_grad()
def test_generation_with_a_compiled_step(name, backend):
    model, _ = wrapped_model(name)
    ids, mask = padded(PROMPTS)
    generate = partial(
        model.generate, ids, attention_mask=mask, max_new_tokens=12, do_sample=False, **PLAIN
    )
    expected = generate()

    torch.compiler.reset()
    programs = []

    def compile_program(graph, inputs):
        programs.append(graph)
        return lookup_backend(backend)(graph, inputs)

    config = CompileConfig(backend=compile_program, mode=None, fullgraph=True)
    for _ in range(2):
        texts = generate(cache_implementation="static", compile_config=config)
        assert torch.equal(texts, expected)

    # of the first length, then of all others; with a window also once it is full
    assert len(programs) <= 4


@torch.no_grad()
def exported_step(model, ids, cache):
    """Return a program of torch.export for a token after those in `cache`, saved and loaded."""
    inputs = {"input_ids": ids, "past_key_values": cache}
    program = torch.export.export(model, (), inputs, strict=False)
    file = io.BytesIO()
    # torch's own warning about loading has too few arguments
    logging.getLogger("torch._export.serde.serialize").setLevel(logging.ERROR)
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


@pytest.mark.system  # half a minute each
@pytest.mark.filterwarnings("ignore")  # torch's, of its own exporter
@pytest.mark.parametrize("name", EXPORTED)
@torch.no_grad()
def test_one_exported_step_reads_every_later_token(name):
    model, ours = wrapped_model(name)
    ids = random_tokens(ours.args, rows=2, num_tokens=NUM_TOKENS)
    whole = ours(ids)
    cache = model.static_cache(NUM_TOKENS)
    model(ids[:, :NUM_PROMPT], past_key_values=cache)

    step = exported_step(model, ids[:, NUM_PROMPT : NUM_PROMPT + 1], cache)

    for start in range(NUM_PROMPT, NUM_TOKENS):
        token = ids[:, start : start + 1]
        output = step(input_ids=token, past_key_values=cache)
        cache = output.past_key_values
        torch.testing.assert_close(output.logits[:, 0], whole[:, start], **CLOSE)
        assert cache.get_seq_length() == start + 1
    with pytest.raises(ValueError, match="21 tokens"):
        model(ids[:, :1], past_key_values=cache)


@pytest.mark.system
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_an_exported_pass_over_a_prompt():
    model, ours = wrapped_model("nope ABCD")
    ids = random_tokens(ours.args, rows=2, num_tokens=NUM_PROMPT)
    export = partial(torch.export.export, model, strict=False)

    plain = export((ids,)).module()(ids)
    inputs = {"input_ids": ids, "past_key_values": model.static_cache(NUM_TOKENS)}
    filled = export((), inputs).module()(**inputs)

    assert plain.past_key_values is None
    torch.testing.assert_close(plain.logits, ours(ids))
    torch.testing.assert_close(filled.logits, ours(ids), **CLOSE)
    longer = torch.cat((ids, ids[:, :3]), dim=1)
    more = model(ids[:, :3], past_key_values=filled.past_key_values)
    torch.testing.assert_close(more.logits, ours(longer)[:, NUM_PROMPT:], **CLOSE)


@pytest.mark.system
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_programs_of_transformers_exporter():
    exporters = pytest.importorskip("transformers.exporters")
    model, ours = wrapped_model("nope ABCD")
    ids = random_tokens(ours.args, rows=2, num_tokens=NUM_TOKENS)
    whole = ours(ids)
    cache = model.static_cache(NUM_TOKENS)
    model(ids[:, :NUM_PROMPT], past_key_values=cache)
    export = partial(exporters.DynamoExporter().export, model, config=exporters.DynamoConfig())

    plain = export({"input_ids": ids})
    step = export({"input_ids": ids[:, :1], "past_key_values": cache})

    torch.testing.assert_close(plain(input_ids=ids).logits, whole, **CLOSE)
    for start in range(NUM_PROMPT, NUM_TOKENS):
        output = step(input_ids=ids[:, start : start + 1], past_key_values=cache)
        cache = output.past_key_values
        torch.testing.assert_close(output.logits[:, 0], whole[:, start], **CLOSE)


@pytest.mark.parametrize(
    ("implementation", "kind"),
    [
        (None, DecodingCache),
        ("dynamic_full", DecodingCache),  # of assisted decoding in transformers 4.57
        ("static", StaticDecodingCache),
    ],
)
def test_the_cache_that_generation_begins_with(implementation, kind):
    model, _ = wrapped_model("nope ABCD")
    config = GenerationConfig()
    config.cache_implementation = implementation
    inputs = {}

    model._prepare_cache_for_generation(config, inputs, GenerationMode.GREEDY_SEARCH, 1, 20)

    assert type(inputs["past_key_values"]) is kind


def test_what_no_program_can_have_is_refused():
    model, ours = wrapped_model("nope ABCD")
    ids = torch.tensor([[1, 2, 3]])

    with pytest.raises(ValueError, match="static_cache"):
        torch.export.export(model, (), {"input_ids": ids, "use_cache": True}, strict=False)
    with pytest.raises(ValueError, match=r"StaticCache.*static_cache"):
        model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=8))
    with pytest.raises(ValueError, match="max_position_embeddings"):
        model.static_cache(161)
