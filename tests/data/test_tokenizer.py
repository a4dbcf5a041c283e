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
WORDS, SLICES, WHOLE = "word cache", "slices", "whole texts"
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
    content = io.BytesIO()
    options = {"sentence_iterator": iter(LINES * 4), "model_writer": content, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(**options, **LLAMA | changes)
    return content.getvalue()


model = cache(lambda name: trained(**MODELS[name][0]))


@cache
def encoders(name):
    """Return the reference, ours, and ours with tiny slices and cache, to reach every branch."""
    reference = sentencepiece.SentencePieceProcessor(model_proto=model(name))
    built = [reference, Tokenizer(model(name), name)]
    if MODELS[name][1] != WHOLE:
        info = SentencePieceInfo.read(model(name))
        raw = sentencepiece.SentencePieceProcessor(model_proto=model(name) + b"\x1a\x02\x18\x00")
        prefix, tiny = " " if info.dummy_prefix else "", {"slice_characters": 7, "capacity": 5}
        built.append(CachedEncoder(raw.encode, info.tokens, prefix, **tiny))
    return built


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=100, deadline=None)
@given(texts)
def test_any_text_has_the_ids_of_sentencepiece(name, text):
    reference, *ours = encoders(name)
    assert ours[0].method.startswith("sentencepiece, " + MODELS[name][1])
    assert all(encoder.encode(text).tolist() == reference.encode(text) for encoder in ours)


# ---- tokenizer.json


def byte_level(splitter):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    alphabet, names = pre_tokenizers.ByteLevel.alphabet(), ["<s>", "</s>"]
    options = {"vocab_size": 340, "special_tokens": names, "initial_alphabet": alphabet}
    tokenizer.train_from_iterator(LINES * 3, trainers.BpeTrainer(**options, show_progress=False))
    return json.loads(tokenizer.to_str())


def split_by(pattern):
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, byte_level])


sentencepiece_model = cache(lambda: train_tokenizer(LINES * 3, 430))


def llama_2():
    processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    vocab = {processor.id_to_piece(i): i for i in range(processor.vocab_size())}
    merges = []
    for token in [token for token, i in vocab.items() if i >= 259]:
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        known_pairs = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        merges += sorted(known_pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    options = {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    decode = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*decode, decoders.Strip(" ", 1, 0)])
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
    tokenizer = tokenizers.Tokenizer.from_str(content(name))
    tokenizer.encode_special_tokens = True
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def changed(name="gpt-2", **changes):
    return json.dumps({**json.loads(content(name)), **changes}).encode()


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=100, deadline=None)
@given(texts)
def test_any_text_has_the_ids_of_the_package(name, text):
    assert ours(name).method == f"tokenizers, {FILES[name][1]}"
    ids, whole = ours(name).encode(text), package(name)(text)
    assert ids.dtype == np.int64 and ids.tolist() == whole
    if FILES[name][1] == SLICES:
        sliced = SplitEncoder(package(name), slice_characters=3)
        assert sliced.encode(text).tolist() == whole
    if name == "llama-2":
        reference = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
        assert reference.encode(text) == whole


def test_a_file_that_changes_text_first_is_encoded_whole():
    added = [*json.loads(content("gpt-2"))["added_tokens"], token(341, "the end")]
    for changes in ({"normalizer": {"type": "NFC"}}, {"added_tokens": added}):
        assert Tokenizer(changed(**changes), "x").method == f"tokenizers, {WHOLE}"


TEXTS = ["", "  two", "tab\tand\r\nline\n\n", "a\x00b", "h\u00e9llo \U0001f642 \u6f22\u5b57"]
TEXTS += ["\ufeffmark", "<0x0A> 123", "a</s><s><unk> </s>", *LINES[:2]]


@pytest.mark.parametrize("name", ["sentencepiece", "gpt-2", "llama-2"])
def test_round_trip_and_special_tokens_are_text(name):
    is_model = name == "sentencepiece"
    tokenizer = Tokenizer(sentencepiece_model(), name) if is_model else ours(name)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids.tolist())
        assert tokenizer.decode(np.append(ids, tokenizer.eos_id)) == text
    if not is_model:  # the package's default
        assert tokenizer.eos_id in tokenizers.Tokenizer.from_str(content(name)).encode("</s>").ids


def limited():
    tokenizer = tokenizers.Tokenizer.from_str(content("gpt-2"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    special = [("<s>", 0), ("</s>", 1)]
    template = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    byte_level = processors.ByteLevel(trim_offsets=False)
    tokenizer.post_processor = processors.Sequence([byte_level, template])
    return tokenizer


def test_truncation_padding_and_templates_are_ignored():
    ids = Tokenizer(limited().to_str().encode(), "limited").encode(LINES[0]).tolist()
    assert ids == ours("gpt-2").encode(LINES[0]).tolist()


def drawing(name, **options):
    return changed(name, model={**json.loads(content(name))["model"], **options})


@pytest.mark.parametrize("name", ["gpt-2", "llama-2", "other"])
def test_no_split_is_drawn(name):
    text = " ".join(LINES * 5)
    for dropout in (0.002, 0.5, 1.0):
        tokenizer = Tokenizer(drawing(name, dropout=dropout), name)
        assert tokenizer.encode(text).tolist() == ours(name).encode(text).tolist()
        assert f"dropout = {dropout}" in tokenizer.method
        assert tokenizer.method.startswith(f"tokenizers, {FILES[name][1]}")
        assert tokenizer.probe_ids() == ours(name).probe_ids()
    for dropout in (None, 0, 0.0):
        assert Tokenizer(drawing(name, dropout=dropout), name).method == ours(name).method


def test_random_options_of_unigram_are_removed():
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]]}
    file = {"model": {**model, "alpha": 0.1, "nbest_size": -1}, "normalizer": None}
    made, removed = hf_tokenizer.without_random_options(file)
    assert made == {"model": model, "normalizer": None}
    assert removed == ["alpha = 0.1", "nbest_size = -1"]


def token(number, text, *, special=False):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, "special": special, **flags}


def test_eos_by_common_name_or_as_given():
    assert (ours("gpt-2").bos_id, ours("gpt-2").eos_id) == (0, 1)
    ends = [token(340, "<|endoftext|>", special=True), token(341, "<|im_end|>", special=True)]
    added = changed(added_tokens=ends)
    tokenizer = Tokenizer(added, "x")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (-1, 340, 342)
    for eos in ("<|im_end|>", 341):
        assert Tokenizer(added, "x", eos=eos).eos_id == 341
    both = changed(added_tokens=[token(1, "</s>", special=True), *ends])
    assert Tokenizer(both, "x", eos="</s>").eos_id == 1
    none = changed(added_tokens=[token(341, "<|im_end|>")])
    for file, eos, count in ((both, None, 2), (none, None, 0), (added, "<end>", 0)):
        with refused("tokenizer.eos", found=count):
            Tokenizer(file, "x", eos=eos)
    with refused("tokenizer.eos", found=1):
        Tokenizer(sentencepiece_model(), "x", eos="<end>")
    # an EOS that is not special in the file stays text, too
    tokenizer = Tokenizer(changed(added_tokens=[token(0, "<s>"), token(1, "</s>")]), "x")
    assert tokenizer.eos_id not in tokenizer.encode("a</s>b")
    assert tokenizer.decode([*tokenizer.encode("ab"), tokenizer.eos_id]) == "ab"


def test_tokenizers_that_lose_text_or_find_eos_are_refused():
    vocab = [["<unk>", 0.0], ["</s>", -1.0], ["a", -2.0], ["<", -3.0]]
    unigram = {"type": "Unigram", "unk_id": 0, "byte_fallback": False, "vocab": vocab}
    tiny = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    for code, model in (("tokenizer.eos_in_text", unigram), ("tokenizer.drops_text", tiny)):
        eos = [token(1, "</s>", special=True)]
        file = changed(model=model, pre_tokenizer=None, added_tokens=eos)
        with refused(code):
            Tokenizer(file, "x")
    no_model = b'{"added_tokens": [{"id": 1, "content": "</s>"}]}'
    for file in (b"", b"\x0a\xff", b"{", b'{"model": 1}', no_model):
        with refused("tokenizer.unreadable"):
            Tokenizer(file, "x")
