"""Cached and sliced encoding gives the ids of the whole text; special tokens in it stay text."""

import io
import json
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from canon_pretrain.data import hf_tokenizer
from canon_pretrain.data.cached_encoder import CachedEncoder, SentencePieceInfo
from canon_pretrain.data.hf_tokenizer import SplitEncoder
from canon_pretrain.data.tokenizer import Tokenizer
from data_prep.planning import train_tokenizer
from tests.support import refused

WORDS = "word cache"
SLICES = "slices"
WHOLE = "whole texts"
"""How a tokenizer encodes a text, as its `method` says."""

LINES = (
    "the cat sat on the mat, and the end of it came: don't ask (why)!",
    "def f(x, y=10):",
    "    return x[10:] + y.value(x)  # the end, the END",
    "\tif a == b:   the   value  and  the values",
    "  12 345 000 6789  caf\u00e9 na\u00efve",
    "\u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u0442\u0435\u043a\u0441\u0442",
    "\u6f22\u5b57\u6587\u7ae0\u3002\u6f22\u5b57 \u65e5\u672c\u8a9e\u6587\u7ae0",
)
LLAMA: dict[str, Any] = {
    "model_type": "bpe",
    "vocab_size": 430,
    "character_coverage": 0.98,
    "byte_fallback": True,
    "split_digits": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
}
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "default": ({}, WORDS),
    "without a dummy prefix": ({"add_dummy_prefix": False}, WORDS),
    "letters beside signs": ({"split_by_unicode_script": False, "split_by_number": False}, WORDS),
    "across spaces": ({"split_by_whitespace": False}, SLICES),
    "unigram": ({"model_type": "unigram", "hard_vocab_limit": False}, WHOLE),
    "no byte fallback": ({"byte_fallback": False, "vocab_size": 150}, WHOLE),
    "normalizing": ({"normalization_rule_name": "nmt_nfkc"}, WHOLE),
    "dropping spaces": ({"remove_extra_whitespaces": True}, WHOLE),
    "spaces as suffixes": ({"treat_whitespace_as_suffix": True}, WHOLE),
    "user-defined": ({"user_defined_symbols": ["the c"]}, WHOLE),
}  # fmt: skip

# Difficult characters, mixed with text of the vocabulary.
FRAGMENTS = [
    *"abcthe .,'()_=\t\r\x00019\u00a0\u200d\u0301\u3000\ufeff\U0001f642",
    *(word for line in LINES for word in line.split(" ") if word),
    " ", "  ", "    ", "\n", "\n\n", "\u2581", "\u2581the", " \u2581 ", "</s>", "<s>", "<unk>",
    "<0x0A>", "'ll", "a b c d", "x" * 70, "-" * 60, "\u6f22" * 60,
]  # fmt: skip
texts = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
)


def trained(**changes):
    """Train a SentencePiece model like Llama's, with these changes."""
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 4),
        model_writer=content,
        minloglevel=2,
        **LLAMA | changes,
    )
    return content.getvalue()


model = cache(lambda name: trained(**MODELS[name][0]))


@cache
def encoders(name):
    """Return the reference, ours, and ours with tiny slices and cache, to reach every branch."""
    reference = sentencepiece.SentencePieceProcessor(model_proto=model(name))
    encoders = [reference, Tokenizer(model(name), name)]
    if MODELS[name][1] != WHOLE:
        info = SentencePieceInfo.read(model(name))
        # the model without its dummy prefix
        raw = sentencepiece.SentencePieceProcessor(model_proto=model(name) + b"\x1a\x02\x18\x00")
        prefix = " " if info.dummy_prefix else ""
        tiny = CachedEncoder(raw.encode, info.tokens, prefix, slice_characters=7, capacity=5)
        encoders.append(tiny)
    return encoders


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=100, deadline=None)
@given(texts)
def test_any_text_has_the_ids_of_sentencepiece(name, text):
    reference, tokenizer, *tiny = encoders(name)
    expected = reference.encode(text)

    assert tokenizer.method.startswith("sentencepiece, " + MODELS[name][1])
    for encoder in (tokenizer, *tiny):
        assert encoder.encode(text).tolist() == expected


# ---- tokenizer.json


def byte_level(splitter):
    """Train a byte-level tokenizer; return its tokenizer.json."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES * 3, trainer)
    return json.loads(tokenizer.to_str())


def split_by(pattern):
    """Return the splitter of Llama 3: by a pattern, then into bytes."""
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, byte_level])


def merges_of(vocab):
    """Return the merges of a vocabulary by rank, without its bytes and special tokens."""
    merges = []
    for token, rank in vocab.items():
        if rank < 259:
            continue
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [(left, right) for left, right in pairs if left in vocab and right in vocab]
        merges += sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    return merges


sentencepiece_model = cache(lambda: train_tokenizer(LINES * 3, 430))


def llama_2():
    """Return the tokenizer.json of a SentencePiece model, as transformers converts Llama 2's."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    vocab = {processor.id_to_piece(i): i for i in range(processor.vocab_size())}
    bpe = models.BPE(
        vocab=vocab,
        merges=merges_of(vocab),
        byte_fallback=True,
        fuse_unk=True,
        unk_token="<unk>",
    )
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return json.loads(tokenizer.to_str())


FILES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "gpt-2": (lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)), SLICES),
    "with a prefix": (lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)), SLICES),
    "llama-3": (lambda: byte_level(split_by(hf_tokenizer._SPLITS[0])), SLICES),
    "qwen-2": (lambda: byte_level(split_by(hf_tokenizer._SPLITS[1])), SLICES),
    "other": (lambda: byte_level(split_by(r"\w+ \w+|\s|.")), WHOLE),
    "llama-2": (llama_2, WORDS),
}


content = cache(lambda name: json.dumps(FILES[name][0]()))
ours = cache(lambda name: Tokenizer(content(name).encode(), name))


@cache
def package(name):
    """Return the package's own encoding of a text, with special tokens as text."""
    tokenizer = tokenizers.Tokenizer.from_str(content(name))
    tokenizer.encode_special_tokens = True
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def changed(name="gpt-2", **changes):
    """Return a tokenizer.json with these entries changed."""
    return json.dumps({**json.loads(content(name)), **changes}).encode()


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=100, deadline=None)
@given(texts)
def test_any_text_has_the_ids_of_the_package(name, text):
    expected = package(name)(text)

    ids = ours(name).encode(text)

    assert ours(name).method == f"tokenizers, {FILES[name][1]}"
    assert ids.dtype == np.int64
    assert ids.tolist() == expected
    if FILES[name][1] == SLICES:
        sliced = SplitEncoder(package(name), slice_characters=3)
        assert sliced.encode(text).tolist() == expected
    if name == "llama-2":
        reference = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
        assert reference.encode(text) == expected


def test_a_file_that_changes_text_first_is_encoded_whole():
    added_tokens = [*json.loads(content("gpt-2"))["added_tokens"], token(341, "the end")]
    for changes in ({"normalizer": {"type": "NFC"}}, {"added_tokens": added_tokens}):
        assert Tokenizer(changed(**changes), "x").method == f"tokenizers, {WHOLE}"


TEXTS = [
    "",
    "  two",
    "tab\tand\r\nline\n\n",
    "a\x00b",
    "h\u00e9llo \U0001f642 \u6f22\u5b57",
    "\ufeffmark",
    "<0x0A> 123",
    "a</s><s><unk> </s>",
    *LINES[:2],
]


def assert_round_trip(tokenizer):
    """Texts survive, and none has the ids of special tokens."""
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids.tolist())
        assert tokenizer.decode(np.append(ids, tokenizer.eos_id)) == text


def test_sentencepiece_round_trip_and_special_tokens_are_text():
    assert_round_trip(Tokenizer(sentencepiece_model(), "sentencepiece"))


@pytest.mark.parametrize("name", ["gpt-2", "llama-2"])
def test_round_trip_and_special_tokens_are_text(name):
    tokenizer = ours(name)
    assert_round_trip(tokenizer)
    # unlike the package's default
    assert tokenizer.eos_id in tokenizers.Tokenizer.from_str(content(name)).encode("</s>").ids


def limited():
    """Return GPT-2's tokenizer with truncation, padding and a template."""
    tokenizer = tokenizers.Tokenizer.from_str(content("gpt-2"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    template = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    byte_level = processors.ByteLevel(trim_offsets=False)
    tokenizer.post_processor = processors.Sequence([byte_level, template])
    return tokenizer


def test_truncation_padding_and_templates_are_ignored():
    ids = Tokenizer(limited().to_str().encode(), "limited").encode(LINES[0]).tolist()
    assert ids == ours("gpt-2").encode(LINES[0]).tolist()


def drawing(name, **options):
    """Return a tokenizer.json whose model has these random options."""
    return changed(name, model={**json.loads(content(name))["model"], **options})


@pytest.mark.parametrize("dropout", [0.002, 0.5, 1.0])
@pytest.mark.parametrize("name", ["gpt-2", "llama-2", "other"])
def test_no_split_is_drawn(name, dropout):
    text = " ".join(LINES * 5)

    tokenizer = Tokenizer(drawing(name, dropout=dropout), name)

    assert tokenizer.encode(text).tolist() == ours(name).encode(text).tolist()
    assert f"dropout = {dropout}" in tokenizer.method
    assert tokenizer.method.startswith(f"tokenizers, {FILES[name][1]}")
    assert tokenizer.probe_ids() == ours(name).probe_ids()


@pytest.mark.parametrize("dropout", [None, 0, 0.0])
@pytest.mark.parametrize("name", ["gpt-2", "llama-2", "other"])
def test_no_dropout_is_not_reported(name, dropout):
    assert Tokenizer(drawing(name, dropout=dropout), name).method == ours(name).method


def test_random_options_of_unigram_are_removed():
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]]}
    file = {"model": {**model, "alpha": 0.1, "nbest_size": -1}, "normalizer": None}

    cleaned, removed = hf_tokenizer.without_random_options(file)

    assert cleaned == {"model": model, "normalizer": None}
    assert removed == ["alpha = 0.1", "nbest_size = -1"]


def token(number, text, *, special=False):
    """Return an entry of added_tokens."""
    return {
        "id": number,
        "content": text,
        "special": special,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
    }


ENDS = [token(340, "<|endoftext|>", special=True), token(341, "<|im_end|>", special=True)]


def test_eos_by_common_name_or_as_requested():
    assert (ours("gpt-2").bos_id, ours("gpt-2").eos_id) == (0, 1)

    file = changed(added_tokens=ENDS)
    tokenizer = Tokenizer(file, "x")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (-1, 340, 342)
    for eos in ("<|im_end|>", 341):
        assert Tokenizer(file, "x", eos=eos).eos_id == 341

    file_of_two = changed(added_tokens=[token(1, "</s>", special=True), *ENDS])
    assert Tokenizer(file_of_two, "x", eos="</s>").eos_id == 1


def test_no_eos_or_several_are_refused():
    common = changed(added_tokens=ENDS)
    two = changed(added_tokens=[token(1, "</s>", special=True), *ENDS])
    none = changed(added_tokens=[token(341, "<|im_end|>")])

    with refused("tokenizer.eos", found=2):
        Tokenizer(two, "x", eos=None)
    with refused("tokenizer.eos", found=0):
        Tokenizer(none, "x", eos=None)
    with refused("tokenizer.eos", found=0):
        Tokenizer(common, "x", eos="<end>")
    with refused("tokenizer.eos", found=1):
        Tokenizer(sentencepiece_model(), "x", eos="<end>")


def test_an_eos_that_is_not_special_stays_text():
    tokenizer = Tokenizer(changed(added_tokens=[token(0, "<s>"), token(1, "</s>")]), "x")
    assert tokenizer.eos_id not in tokenizer.encode("a</s>b")
    assert tokenizer.decode([*tokenizer.encode("ab"), tokenizer.eos_id]) == "ab"


UNIGRAM = {
    "type": "Unigram",
    "unk_id": 0,
    "byte_fallback": False,
    "vocab": [["<unk>", 0.0], ["</s>", -1.0], ["a", -2.0], ["<", -3.0]],
}
ONE_LETTER = {"type": "BPE", "vocab": {"a": 0}, "merges": []}


@pytest.mark.parametrize(
    ("code", "model"),
    [("tokenizer.eos_in_text", UNIGRAM), ("tokenizer.drops_text", ONE_LETTER)],
    ids=["eos in text", "drops text"],
)
def test_tokenizers_that_lose_text_or_find_eos_are_refused(code, model):
    eos = token(1, "</s>", special=True)
    file = changed(model=model, pre_tokenizer=None, added_tokens=[eos])
    with refused(code):
        Tokenizer(file, "x")


@pytest.mark.parametrize(
    "file",
    [b"", b"\x0a\xff", b"{", b'{"model": 1}', b'{"added_tokens": [{"id": 1, "content": "</s>"}]}'],
    ids=["empty", "binary", "cut", "no tokens", "no model"],
)
def test_files_that_are_no_tokenizer_are_refused(file):
    with refused("tokenizer.unreadable"):
        Tokenizer(file, "x")
