"""Every faster way to encode gives the ids of SentencePieceProcessor.encode, on any text."""

import io
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.pieces import ModelFacts, PieceBounds, PieceEncoder
from canon_pretrain.data.tokenizer import SentencePieceModel, Tokenizer
from data_prep.settle import train_tokenizer

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
WORDS, SLICES, WHOLE = "word cache", "giant documents in slices", "documents whole: "
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "as ours": ({}, WORDS),
    "without a dummy prefix": ({"add_dummy_prefix": False}, WORDS),
    "letters beside signs": ({"split_by_unicode_script": False, "split_by_number": False}, WORDS),
    "across spaces": ({"split_by_whitespace": False}, SLICES),
    "unigram": ({"model_type": "unigram", "hard_vocab_limit": False}, WHOLE + "it is no BPE model"),
    "no byte fallback": ({"byte_fallback": False, "vocab_size": 150}, WHOLE + "it has no byte"),
    "normalising": ({"normalization_rule_name": "nmt_nfkc"}, WHOLE + "it normalises"),
    "dropping spaces": ({"remove_extra_whitespaces": True}, WHOLE + "it drops repeated"),
    "spaces as suffixes": ({"treat_whitespace_as_suffix": True}, WHOLE + "its spaces end"),
    "user-defined": ({"user_defined_symbols": ["the c"]}, WHOLE + "it has user-defined"),
}  # fmt: skip
EXACT = [name for name, (_, method) in MODELS.items() if not method.startswith(WHOLE)]

# What a tokenizer may trip over, mixed with what it has pieces for.
FRAGMENTS = [
    *"abcthe .,'()_=\t\r\x00019\u00a0\u200d\u0301\u3000\ufeff\U0001f642",
    *(word for line in LINES for word in line.split(" ") if word),
    " ", "  ", "    ", "\n", "\n\n", "\u2581", "\u2581the", " \u2581 ", "</s>", "<s>", "<unk>",
    "<0x0A>", "x" * 70, "-" * 60, "\u6f22" * 60,
]  # fmt: skip
texts = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
)


@cache
def model(name: str) -> bytes:
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 4),
        model_writer=content,
        minloglevel=2,
        **{**LLAMA, **MODELS[name][0]},
    )
    return content.getvalue()


def reference(name: str) -> Callable[[str], list[int]]:
    return sentencepiece.SentencePieceProcessor(model_proto=model(name)).encode


@cache
def small_encoder(name: str) -> PieceEncoder:
    """Slices of a few characters and a cache of a few words: every branch, all the time."""
    facts = ModelFacts.read(model(name))
    raw = sentencepiece.SentencePieceProcessor(model_proto=model(name) + b"\x1a\x02\x18\x00")
    prefix = " " if facts.dummy_prefix else ""
    return PieceEncoder(raw.encode, facts.pieces, prefix, slice_characters=7, capacity=5)


@pytest.mark.parametrize("name", MODELS)
def test_the_way_that_is_chosen(name: str) -> None:
    method = SentencePieceModel(model(name), "test").method
    assert method.startswith("sentencepiece, " + MODELS[name][1])


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=150, deadline=None)
@given(texts)
def test_any_text_has_sentencepiece_s_ids(name: str, text: str) -> None:
    assert _tokenizer(name).encode(text).tolist() == _reference(name)(text)


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=400, deadline=None)
@given(texts)
def test_so_has_any_text_in_tiny_slices_and_caches(name: str, text: str) -> None:
    assert small_encoder(name).encode(text).tolist() == _reference(name)(text)


_tokenizer = cache(lambda name: Tokenizer(model(name), name))
_reference = cache(reference)


def test_a_model_that_fails_the_check_at_load_is_encoded_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PieceBounds, "__init__", _no_pairs)
    tokenizer = Tokenizer(model("across spaces"), "test")
    assert tokenizer.method.startswith("sentencepiece, documents whole: this version")
    text = "\n".join(LINES)
    assert tokenizer.encode(text).tolist() == _reference("across spaces")(text)


def _no_pairs(bounds: PieceBounds, pieces: list[str]) -> None:
    bounds.pairs = frozenset()
    bounds.before_spaces = bounds.around_newlines = bounds.around_letters = True


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(train_tokenizer(LINES, 400))
    return path


@pytest.mark.parametrize(
    "text", ["", "  two", "tab\tand\r\nline\n\n", "a\x00b", "h\u00e9llo \U0001f642 \u6f22\u5b57",
             "\ufeffmark", "<0x0A> 123", "a</s><s><unk></s>", *LINES[:2]],
)  # fmt: skip
def test_round_trip_and_control_pieces_are_text(path: Path, text: str) -> None:
    tokenizer = Tokenizer.load(path)
    ids = tokenizer.encode(text)
    assert not {0, tokenizer.bos_id, tokenizer.eos_id} & set(ids.tolist())
    assert tokenizer.decode(np.append(ids, tokenizer.eos_id)) == text


def test_files_that_are_no_model_are_refused(tmp_path: Path) -> None:
    for place, message in ((tmp_path / "none.model", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(UserError, match=f"cannot be read: {message}"):
            Tokenizer.load(place)
    for content, message in ((b"", "is empty"), (b"\x0a\xff", "not a readable Sentence")):
        with pytest.raises(UserError, match=message):
            Tokenizer(content, "bad")
