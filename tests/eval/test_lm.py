"""Our lm_eval model against lm_eval's own, on equal weights, for all three kinds of request."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from canon_pretrain.core.errors import UserError
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.model.transformer import Transformer
from eval.model.lm import CanonLM, request_cost

ARGS = ModelArgs(
    vocab_size=257, num_layers=2, dim=32, num_heads=4, ffn_dim=48, max_seq_len=64, position="rope"
)
MAX_LENGTH = 40
BYTE_PIECES = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
EOS = "</s>"
TEXT = "Now is better than never; though never is often better than *right* now, as is well known."


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a byte, and EOS last."""
    tokenizer = Tokenizer(models.BPE(vocab=BYTE_PIECES | {EOS: 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=EOS, eos_token=EOS, pad_token=EOS
    )


class Adapted:
    """The same tokenizer as ours sees one."""

    vocab_size, eos_id = 257, 256

    def __init__(self) -> None:
        self.tokenizer = byte_tokenizer()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def their_model() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=ARGS.vocab_size,
        hidden_size=ARGS.dim,
        intermediate_size=ARGS.ffn_dim,
        num_hidden_layers=ARGS.num_layers,
        num_attention_heads=ARGS.num_heads,
        num_key_value_heads=ARGS.num_heads,
        max_position_embeddings=ARGS.max_seq_len,
        rms_norm_eps=ARGS.norm_eps,
        tie_word_embeddings=False,
        initializer_range=0.3,  # opinions, so that greedy answers do not hang on a rounding
        bos_token_id=256,
        eos_token_id=256,
        pad_token_id=256,
    )
    model = transformers.LlamaForCausalLM(config).float().eval()
    for piece, token in BYTE_PIECES.items():
        if not (piece.isascii() and piece.isprintable()):
            model.lm_head.weight.data[token] = 0.0  # never the likeliest: bytes may be no text
    return model


def our_model(theirs: transformers.LlamaForCausalLM) -> Transformer:
    """Ours with their weights: pair i is rows 2i and 2i + 1 of a head here, i and i + K/2 there."""

    def interleaved(weight: torch.Tensor) -> torch.Tensor:
        halves = weight.unflatten(0, (ARGS.num_heads, 2, ARGS.head_dim // 2))
        return halves.transpose(1, 2).flatten(0, 2)

    source = theirs.state_dict()
    weights = {
        "tok_embeddings.weight": source["model.embed_tokens.weight"],
        "norm.weight": source["model.norm.weight"],
        "output.weight": source["lm_head.weight"],
    }
    names = {
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    for layer in range(ARGS.num_layers):
        ours, theirs_name = f"layers.{layer}.", f"model.layers.{layer}."
        for mine, other in names.items():
            weights[f"{ours}{mine}.weight"] = source[f"{theirs_name}{other}.weight"]
        for letter in "qk":
            weight = source[f"{theirs_name}self_attn.{letter}_proj.weight"]
            weights[f"{ours}attention.w{letter}.weight"] = interleaved(weight)
    model = Transformer(ARGS)
    model.load_state_dict(weights)
    return model.eval()


@pytest.fixture(scope="module")
def pair() -> tuple[CanonLM, HFLM]:
    theirs = their_model()
    ours = CanonLM(our_model(theirs), Adapted(), max_length=MAX_LENGTH, batch_tokens=150)
    reference = HFLM(
        pretrained=theirs,
        tokenizer=byte_tokenizer(),
        backend="causal",
        max_length=MAX_LENGTH,
        batch_size=3,
        add_bos_token=False,
        device="cpu",
    )
    assert reference.prefix_token_id == ours.prefix_token_id == 256
    return ours, reference


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, given, index) for index, given in enumerate(arguments)]


def test_the_weights_are_equal(pair: tuple[CanonLM, HFLM]) -> None:
    tokens = torch.arange(60).reshape(2, 30)
    with torch.no_grad():
        torch.testing.assert_close(
            pair[0].model(tokens), pair[1].model(tokens).logits, rtol=1e-4, atol=1e-4
        )


def test_loglikelihoods_equal_the_harness_own(pair: tuple[CanonLM, HFLM]) -> None:
    ours, reference = pair
    greedy = reference.generate_until(
        requests("generate_until", [("The answer", {"until": [], "max_gen_toks": 3})])
    )[0]
    asked = [
        ("The answer is", " yes"),
        ("The answer is", " no"),
        ("The answer is ", "a trailing space"),
        ("", "an empty context"),
        ("x", "y"),
        (TEXT, " and this context is longer than max_length"[:30]),
        (TEXT[:20], TEXT[:MAX_LENGTH]),  # a continuation that fills max_length
        (TEXT[: MAX_LENGTH - 3], "abcd"),  # one token more than max_length is read
        ("The answer", greedy),
    ]
    asked += [(TEXT[: n + 1], TEXT[n + 1 : n + 4]) for n in range(20)]
    found = ours.loglikelihood(requests("loglikelihood", asked))
    expected = reference.loglikelihood(requests("loglikelihood", asked), disable_tqdm=True)
    assert [f[0] for f in found] == pytest.approx([e[0] for e in expected], abs=1e-4)
    assert [f[1] for f in found] == [e[1] for e in expected]
    assert found[8][1] and not found[0][1]


def test_rolling_loglikelihoods_equal_the_harness_own(pair: tuple[CanonLM, HFLM]) -> None:
    ours, reference = pair
    texts = ["a", TEXT[: MAX_LENGTH - 1], TEXT[:MAX_LENGTH], TEXT[: MAX_LENGTH + 1], TEXT * 3]
    asked = [(text,) for text in texts]
    found = ours.loglikelihood_rolling(requests("loglikelihood_rolling", asked))
    expected = reference.loglikelihood_rolling(requests("loglikelihood_rolling", asked))
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-4)
    assert ours.loglikelihood_rolling(requests("loglikelihood_rolling", [("",)])) == [0.0]


def test_generations_equal_the_harness_own(pair: tuple[CanonLM, HFLM]) -> None:
    ours, reference = pair
    contexts = ["The answer", "x", TEXT, TEXT[:33], "\n\nAnswer me: Ann Lee May"]
    free = {"until": [], "max_gen_toks": 12}
    asked: list[tuple] = [(context, dict(free)) for context in contexts]
    expected = reference.generate_until(requests("generate_until", asked), disable_tqdm=True)
    # a stop string for each that does occur in its answer, and not at the beginning
    stops = [next((c for c in text[4:] if c not in text[:4]), "zz") for text in expected]
    assert set(stops) != {"zz"}
    for context, stop in zip(contexts, stops, strict=True):
        asked += [(context, {"until": [stop], "max_gen_toks": 12}), (context, {"max_gen_toks": 2})]
        asked.append((context, {"until": stop, "max_gen_toks": 5, "do_sample": False}))
    expected = reference.generate_until(requests("generate_until", asked), disable_tqdm=True)
    assert ours.generate_until(requests("generate_until", asked)) == expected
    assert len(set(expected)) > len(contexts)


def test_an_answer_is_decoded_only_where_a_stop_may_end(pair: tuple[CanonLM, HFLM]) -> None:
    class Counts(Adapted):
        calls = 0

        def decode(self, ids: list[int]) -> str:
            self.calls += len(ids) > 2
            return super().decode(ids)

    text = Counts()
    lm = CanonLM(pair[0].model, text, max_length=MAX_LENGTH)
    free = pair[0].generate_until(requests("generate_until", [(TEXT[:9], {"max_gen_toks": 12})]))[0]
    stop = free[5:7]  # of two tokens
    assert stop not in free[:6]
    asked = [(TEXT[:9], {"until": [stop, "\n"], "max_gen_toks": 12})]
    assert lm.generate_until(requests("generate_until", asked)) == [free[: free.index(stop)]]
    # the answer so far at each token that the stop may end with, and once in the end
    assert text.calls <= free[:7].count(stop[-1]) + 1


def test_generation_ends_at_eos(pair: tuple[CanonLM, HFLM]) -> None:
    class Ends(torch.nn.Module):
        """Counts up from the last token to "d", then EOS."""

        def __init__(self, model: Transformer) -> None:
            super().__init__()
            self.args, self.tok_embeddings = model.args, model.tok_embeddings

        def forward(self, tokens: torch.Tensor, **_: object) -> torch.Tensor:
            following = torch.where(tokens == BYTE_PIECES["d"], 256, tokens + 1)
            return torch.nn.functional.one_hot(following, 257).float()

    lm = CanonLM(Ends(pair[0].model), Adapted(), max_length=MAX_LENGTH)  # type: ignore[arg-type]
    asked = requests(
        "generate_until", [(c, {"max_gen_toks": n}) for c, n in [("a", 2), ("a", 9), ("d", 9)]]
    )
    assert lm.generate_until(asked) == ["bc", "bcd", ""]


def test_answers_do_not_depend_on_the_batch(pair: tuple[CanonLM, HFLM]) -> None:
    """With Canon layers too: padding on the right reaches no scored token."""
    model = Transformer(replace(ARGS, canon_set="ABCD", position="nope")).eval()
    model.init_weights()
    asked = requests("loglikelihood", [(TEXT[:n], TEXT[n : n + 5]) for n in range(1, 30, 3)])
    generated = requests("generate_until", [(TEXT[:n], {"max_gen_toks": 4}) for n in (3, 9, 21)])
    alone = CanonLM(model, Adapted(), max_length=MAX_LENGTH, batch_tokens=1)
    together = CanonLM(model, Adapted(), max_length=MAX_LENGTH, batch_tokens=10_000)
    assert [s for s, _ in alone.loglikelihood(asked)] == pytest.approx(
        [s for s, _ in together.loglikelihood(asked)], abs=1e-5
    )
    assert alone.generate_until(generated) == together.generate_until(generated)


def test_no_bos_and_eos_before_a_text(pair: tuple[CanonLM, HFLM]) -> None:
    ours, _ = pair
    for flag in (None, True, False):
        assert ours.tok_encode("ab", add_special_tokens=flag) == [BYTE_PIECES[c] for c in "ab"]
    (score,) = ours.loglikelihood_rolling(requests("loglikelihood_rolling", [("ab",)]))
    with torch.no_grad():
        logits = ours.model(torch.tensor([[256, BYTE_PIECES["a"]]]))[0].double()
    expected = sum(
        logits[t].log_softmax(-1)[BYTE_PIECES[letter]].item() for t, letter in enumerate("ab")
    )
    assert score == pytest.approx(expected, abs=1e-5)


def test_softmax_is_float32_for_a_bfloat16_model(pair: tuple[CanonLM, HFLM]) -> None:
    model = Transformer(ARGS).eval()
    model.load_state_dict(pair[0].model.state_dict())
    model.to(torch.bfloat16)
    row = list(range(30))
    ((score,),) = CanonLM(model, None, max_length=MAX_LENGTH).score_parts([row], [[20]])
    with torch.no_grad():
        logits = model(torch.tensor([row[:-1]]))[0].double()[-20:]
    exact = logits.log_softmax(-1)[torch.arange(20), torch.tensor(row[-20:])].sum().item()
    assert score == pytest.approx(exact, rel=1e-6)  # bfloat16 would be off by 1e-2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_sample": True}, "only greedy decoding"),
        ({"num_beams": 4}, "only greedy decoding"),
        ({"repetition_penalty": 1.2}, "only greedy decoding"),
        ({"do_sample": True, "temperature": 0.7}, "only greedy decoding"),
        ({"max_gen_toks": MAX_LENGTH}, "leaves no room for a prompt"),
    ],
)
def test_generation_that_cannot_be_done_is_refused(
    pair: tuple[CanonLM, HFLM], options: dict, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        pair[0].generate_until(requests("generate_until", [("x", options)]))


def test_what_does_not_fit_is_refused(pair: tuple[CanonLM, HFLM]) -> None:
    ours, _ = pair
    with pytest.raises(UserError, match=f"a continuation of {MAX_LENGTH + 1} tokens"):
        ours.loglikelihood(requests("loglikelihood", [("x", "y" * (MAX_LENGTH + 1))]))
    for length in (0, 65):
        with pytest.raises(UserError, match=f"max_length {length}: .* takes 1 to 64"):
            CanonLM(ours.model, Adapted(), max_length=length)
    wide = Adapted()
    wide.vocab_size = 300
    with pytest.raises(UserError, match="300 pieces, the model only 257"):
        CanonLM(ours.model, wide, max_length=8)
    with pytest.raises(UserError, match="was given no tokenizer"):
        CanonLM(ours.model, None, max_length=8).tok_encode("a")


@pytest.mark.parametrize("batch_tokens", [1, 50, 100_000])
def test_the_sum_of_what_is_told_is_the_cost_of_the_requests(
    pair: tuple[CanonLM, HFLM], batch_tokens: int
) -> None:
    told: list[int] = []
    lm = CanonLM(
        pair[0].model,
        Adapted(),
        max_length=MAX_LENGTH,
        batch_tokens=batch_tokens,
        answered=told.append,
    )
    asked = requests("loglikelihood", [(TEXT[:9], TEXT[9:n]) for n in (12, 15, 12)])
    rolling = requests("loglikelihood_rolling", [(TEXT * 3,), ("",)])
    written = requests("generate_until", [(TEXT[:9], {"max_gen_toks": 3})] * 2)
    lm.loglikelihood(asked)
    lm.loglikelihood_rolling(rolling)
    lm.generate_until(written)
    assert sum(told) == sum(map(request_cost, asked + rolling + written))
    assert all(cost >= 0 for cost in told)


def test_the_same_prompt_is_continued_once(pair: tuple[CanonLM, HFLM]) -> None:
    rows = []
    handle = pair[0].model.register_forward_hook(lambda *given: rows.append(given[1][0].shape[0]))
    options = {"until": [], "max_gen_toks": 4}
    asked = requests("generate_until", [("The answer", dict(options))] * 5)
    found = pair[0].generate_until(asked)
    handle.remove()
    assert set(rows) == {1} and len(set(found)) == 1 and len(found) == 5


@pytest.fixture(scope="module")
def with_bos() -> tuple[CanonLM, HFLM]:
    """Ours and theirs with BOS, which is EOS as in our exports, before every text."""
    theirs = their_model()
    tokenizer = byte_tokenizer()
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{EOS} $A", special_tokens=[(EOS, 256)]
    )
    ours = CanonLM(our_model(theirs), Adapted(), max_length=MAX_LENGTH, add_bos=True)
    reference = HFLM(
        pretrained=theirs,
        tokenizer=tokenizer,
        backend="causal",
        max_length=MAX_LENGTH,
        batch_size=2,
        add_bos_token=True,
        device="cpu",
    )
    assert reference.prefix_token_id == ours.prefix_token_id == 256
    return ours, reference


def test_with_bos_all_answers_equal_the_harness_own(with_bos: tuple[CanonLM, HFLM]) -> None:
    ours, reference = with_bos
    pieces = [256, BYTE_PIECES["a"], BYTE_PIECES["b"]]
    assert reference.tok_encode("ab") == ours.tok_encode("ab") == pieces
    asked = [("The answer is", " yes"), ("", "empty"), ("x ", "y"), (TEXT, " long context")]
    found = ours.loglikelihood(requests("loglikelihood", asked))
    expected = reference.loglikelihood(requests("loglikelihood", asked), disable_tqdm=True)
    assert [f[0] for f in found] == pytest.approx([e[0] for e in expected], abs=1e-4)
    texts = [("a",), (TEXT[:MAX_LENGTH],), (TEXT * 2,)]
    assert ours.loglikelihood_rolling(requests("loglikelihood_rolling", texts)) == pytest.approx(
        reference.loglikelihood_rolling(requests("loglikelihood_rolling", texts)), abs=1e-3
    )
    prompts = [(t, {"until": [], "max_gen_toks": 6}) for t in ("The answer", "x", TEXT)]
    assert ours.generate_until(requests("generate_until", prompts)) == reference.generate_until(
        requests("generate_until", prompts), disable_tqdm=True
    )


def test_max_length_may_change_between_suites(pair: tuple[CanonLM, HFLM]) -> None:
    lm = CanonLM(pair[0].model, Adapted(), max_length=MAX_LENGTH)
    asked = requests("loglikelihood", [(TEXT, "abc")])
    (long,) = lm.loglikelihood(asked)
    lm.max_length = 10
    (short,) = lm.loglikelihood(asked)
    alone = CanonLM(pair[0].model, Adapted(), max_length=10).loglikelihood(asked)
    assert short == alone[0] != long
    with pytest.raises(UserError, match="this model takes 1 to 64"):
        lm.max_length = 65


class Full(torch.nn.Module):
    """Runs out of memory with more than so many tokens in a pass, or in a cache."""

    def __init__(self, model: Transformer, most: int) -> None:
        super().__init__()
        self.inner, self.most, self.refused = model, most, 0
        self.args, self.tok_embeddings = model.args, model.tok_embeddings

    def forward(self, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
        cache = options.get("cache")
        held = tokens.shape[0] * (cache.length if cache else 0)
        if tokens.numel() + held > self.most:
            self.refused += 1
            raise torch.OutOfMemoryError("made up")
        return self.inner(tokens, **options)


def test_memory_that_runs_out_halves_the_budget(pair: tuple[CanonLM, HFLM]) -> None:
    said: list[str] = []
    model = Full(pair[0].model, 120)
    lm = CanonLM(model, Adapted(), max_length=MAX_LENGTH, batch_tokens=2000, say=said.append)  # type: ignore[arg-type]
    plenty = CanonLM(pair[0].model, Adapted(), max_length=MAX_LENGTH)
    asked = [(TEXT[n : n + 20], TEXT[n + 20 : n + k]) for n in range(40) for k in (22, 24)]
    found = lm.loglikelihood(requests("loglikelihood", asked))
    expected = plenty.loglikelihood(requests("loglikelihood", asked))
    assert [f[0] for f in found] == pytest.approx([e[0] for e in expected], abs=1e-5)
    assert said == ["out of memory with 2000 tokens a batch: going on with 1000"]
    assert lm.batch_tokens < 250
    prompts = [(TEXT[n : 2 * n], {"until": [], "max_gen_toks": 5}) for n in range(3, 30)]
    lm.batch_tokens = 2000
    found_texts = lm.generate_until(requests("generate_until", prompts))
    assert found_texts == plenty.generate_until(requests("generate_until", prompts))
    assert len(said) == 2
    before = model.refused
    lm.generate_until(requests("generate_until", prompts))  # what fits is remembered
    assert model.refused == before


def test_what_does_not_fit_alone_is_said(pair: tuple[CanonLM, HFLM]) -> None:
    model = Full(pair[0].model, 5)
    lm = CanonLM(model, Adapted(), max_length=MAX_LENGTH, say=lambda text: None)  # type: ignore[arg-type]
    for asked in (
        requests("loglikelihood", [(TEXT[:20], "ab"), (TEXT[:20], "cd"), (TEXT[:3], "e")]),
        requests("generate_until", [(TEXT[:20], {"max_gen_toks": 3}), ("x", {"max_gen_toks": 3})]),
    ):
        ask = lm.loglikelihood if asked[0].request_type == "loglikelihood" else lm.generate_until
        with pytest.raises(UserError, match="one item alone does not fit .* --max_length"):
            ask(asked)
