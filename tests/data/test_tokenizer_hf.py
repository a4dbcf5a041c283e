"""tokenizer.json: special tokens stay text, nothing is cut off, and slices have the whole's ids."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from canon_pretrain.core.errors import UserError
from canon_pretrain.data import hf_tokenizer
from canon_pretrain.data.hf_tokenizer import SplitEncoder
from canon_pretrain.data.tokenizer import FILE_NAMES, Tokenizer, load_tokenizer
from data_prep.settle import train_tokenizer

LINES = [
    "the cat sat on the mat, and the end of it came: don't ask (why)!",
    "def f(x, y=10):\n    return x[10:] + y.value(x)  # the end, the END\n\n",
    "\tif a == b:   the   value  and  the values 12 345 6789  caf\u00e9 na\u00efve",
]
FRAGMENTS = [
    *"abcthe .,'()_=\t\r\x0019\u00a0\u0301\u6f22\U0001f642", *" ".join(LINES).split(" "), " ",
    "  ", "    ", "\n", "\n\n", " \n ", "\u2581", "</s>", "<s>", "<unk>", "<0x0A>", "'ll",
    "a b c d",
]  # fmt: skip
texts = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
)


def byte_level(splitter: pre_tokenizers.PreTokenizer) -> dict[str, Any]:
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


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


@cache
def sentencepiece_model() -> bytes:
    return train_tokenizer(LINES * 3, 350)


def llama_2() -> dict[str, Any]:
    """The SentencePiece model as the HF conversion writes it: a rank for every way to merge."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    vocab = {processor.id_to_piece(i): i for i in range(processor.vocab_size())}
    merges = [
        (piece[:at], piece[at:])
        for piece, i in vocab.items()
        if i >= 259
        for at in sorted(
            (at for at in range(1, len(piece)) if piece[:at] in vocab and piece[at:] in vocab),
            key=lambda at, piece=piece: (vocab[piece[:at]], vocab[piece[at:]]),
        )
    ]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return json.loads(tokenizer.to_str())


FILES: dict[str, Callable[[], dict[str, Any]]] = {
    "gpt-2": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt-2 with a prefix": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "llama-3": lambda: byte_level(split_by(hf_tokenizer._SPLITS[0])),
    "qwen-2": lambda: byte_level(split_by(hf_tokenizer._SPLITS[1])),
    "other": lambda: byte_level(split_by(r"\w+ \w+|\s|.")),
    "llama-2": llama_2,
}
SLICED = [name for name in FILES if name not in ("other", "llama-2")]


@cache
def content(name: str) -> str:
    return json.dumps(FILES[name]())


@cache
def ours(name: str) -> Tokenizer:
    return Tokenizer(content(name).encode(), name)


@cache
def package(name: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(content(name))
    tokenizer.encode_special_tokens = True
    return tokenizer


@cache
def sliced(name: str) -> SplitEncoder:
    def encode(text: str) -> list[int]:
        return package(name).encode(text, add_special_tokens=False).ids

    return SplitEncoder(encode, slice_characters=3)


def changed(name: str = "gpt-2", **changes: Any) -> bytes:
    return json.dumps({**json.loads(content(name)), **changes}).encode()


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=100, deadline=None)
@given(texts)
def test_any_text_has_the_package_s_ids(name: str, text: str) -> None:
    ids = ours(name).encode(text)
    assert ids.dtype == np.int64
    assert ids.tolist() == package(name).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", SLICED)
@settings(max_examples=200, deadline=None)
@given(texts)
def test_so_has_any_text_in_tiny_slices(name: str, text: str) -> None:
    whole = package(name).encode(text, add_special_tokens=False).ids
    assert sliced(name).encode(text).tolist() == whole


@settings(max_examples=300, deadline=None)
@given(texts)
def test_llama_2_s_two_files_give_the_same_ids(text: str) -> None:
    reference = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    assert ours("llama-2").encode(text).tolist() == reference.encode(text)


def test_the_way_that_is_chosen() -> None:
    methods = {name: ours(name).method for name in FILES}
    assert methods.pop("llama-2") == "tokenizers, word cache"
    assert methods.pop("other") == "tokenizers, documents whole"
    assert set(methods.values()) == {"tokenizers, giant documents in slices"}
    for changes in (
        {"normalizer": {"type": "NFC"}},
        {"added_tokens": [*json.loads(content("gpt-2"))["added_tokens"], token(341, "the end")]},
    ):
        assert Tokenizer(changed(**changes), "x").method == "tokenizers, documents whole"


@pytest.mark.parametrize("name", ["gpt-2", "llama-2"])
def test_special_tokens_in_a_text_are_text(name: str) -> None:
    text = "a</s><s><unk> </s>"
    ids = ours(name).encode(text).tolist()
    assert not {ours(name).eos_id, ours(name).bos_id} & set(ids)
    assert ours(name).decode(ids) == text
    plain = tokenizers.Tokenizer.from_str(content(name)).encode(text, add_special_tokens=False).ids
    assert ours(name).eos_id in plain  # what the package does when it is not told otherwise


def test_truncation_padding_and_templates_of_the_file_are_not_obeyed() -> None:
    tokenizer = tokenizers.Tokenizer.from_str(content("gpt-2"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    limited = Tokenizer(tokenizer.to_str().encode(), "limited")
    assert limited.encode(LINES[0]).tolist() == ours("gpt-2").encode(LINES[0]).tolist()


def token(number: int, text: str, *, special: bool = False) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, "special": special, **flags}


def test_eos_by_its_usual_name_or_as_named() -> None:
    assert (ours("gpt-2").bos_id, ours("gpt-2").eos_id) == (0, 1)
    ends = [token(340, "<|endoftext|>", special=True), token(341, "<|im_end|>", special=True)]
    added = changed(added_tokens=ends)
    tokenizer = Tokenizer(added, "x")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (-1, 340, 342)
    for eos in ("<|im_end|>", 341):
        assert Tokenizer(added, "x", eos=eos).eos_id == 341
    both = changed(added_tokens=[token(1, "</s>", special=True), *ends])
    with pytest.raises(UserError, match="2 of its added tokens.*endoftext.*--eos TOKEN"):
        Tokenizer(both, "x")
    assert Tokenizer(both, "x", eos="</s>").eos_id == 1
    with pytest.raises(UserError, match="0 of its added tokens.*--eos TOKEN"):
        Tokenizer(changed(added_tokens=[token(341, "<|im_end|>")]), "x")
    with pytest.raises(UserError, match="0 of its added tokens.* are '<end>'"):
        Tokenizer(added, "x", eos="<end>")


def test_an_eos_that_is_not_marked_special_stays_text_too() -> None:
    tokenizer = Tokenizer(changed(added_tokens=[token(0, "<s>"), token(1, "</s>")]), "x")
    assert tokenizer.eos_id not in tokenizer.encode("a</s>b")
    assert tokenizer.decode([*tokenizer.encode("ab"), tokenizer.eos_id]) == "ab"


def test_a_model_that_finds_eos_in_a_text_is_refused() -> None:
    vocab = [["<unk>", 0.0], ["</s>", -1.0], ["a", -2.0], ["<", -3.0]]
    model = {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": False}
    file = changed(model=model, pre_tokenizer=None, added_tokens=[token(1, "</s>", special=True)])
    with pytest.raises(UserError, match="reads its own EOS or BOS .*documents could not be told"):
        Tokenizer(file, "x")


def test_a_model_that_drops_characters_is_refused() -> None:
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    file = changed(model=model, pre_tokenizer=None, added_tokens=[token(1, "</s>", special=True)])
    with pytest.raises(UserError, match="drops characters that it does not know"):
        Tokenizer(file, "x")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"{", "not a tokenizer.json: JSONDecodeError"),
        (b'{"model": 1}', "not a tokenizer.json: KeyError.'added_tokens'"),
        (b'{"added_tokens": [{"id": 1, "content": "</s>"}]}', "not a readable tokenizer.json"),
    ],
)
def test_files_that_are_no_tokenizer_are_refused(file: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Tokenizer(file, "x")


def test_a_data_folder_s_tokenizer_is_found(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no tokenizer, expected one of"):
        Tokenizer.find(tmp_path)
    for name, model in zip(FILE_NAMES, (sentencepiece_model(), changed()), strict=True):
        (tmp_path / name).write_bytes(model)
        for found in (Tokenizer.find(tmp_path), load_tokenizer(tmp_path)):
            assert (found.file_name, found.model) == (name, model)
        assert load_tokenizer(tmp_path / name).file_name == name
        if name == FILE_NAMES[0]:
            (tmp_path / name).unlink()
    (tmp_path / FILE_NAMES[0]).write_bytes(sentencepiece_model())
    with pytest.raises(UserError, match="holds tokenizer.model and tokenizer.json"):
        Tokenizer.find(tmp_path)
