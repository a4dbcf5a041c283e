"""The tokenizer of an export has the ids of the training tokenizer, for any text."""

import json
import random
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from tokenizers import normalizers
from transformers import AutoTokenizer

from canon_pretrain.data.tokenizer import Tokenizer
from canon_pretrain.hf.tokenizer_files import (
    llama_cpp_reads,
    sentencepiece_file,
    tokenizer_files,
)
from tests.data.test_tokenizer import FRAGMENTS, LLAMA, MODELS, limited, texts, trained
from tests.support import refused

# characters of the names of special tokens
NAMES = "0123456789ABCDEFx<>/s"
UNIGRAM = {
    "model_type": "unigram",
    "hard_vocab_limit": False,
    "character_coverage": 1.0,
    "vocab_size": 500,
    "required_chars": NAMES,
    # two ways to cut a run of spaces can have the same score, but for rounding
    "allow_whitespace_only_pieces": False,
}
KINDS: dict[str, dict[str, Any]] = {
    **{name: options for name, (options, _) in MODELS.items() if name != "unigram"},
    "unigram": UNIGRAM,
    "unigram that drops spaces": UNIGRAM | {"remove_extra_whitespaces": True},
    "bare": LLAMA | {"model_type": "unigram", "hard_vocab_limit": False},
}
# "bare" can write "</s>" only as bytes or as the token, and `tokenizers` would use the token
REFUSED = {"normalizing", "spaces as suffixes", "user-defined", "bare"}
EXACT = sorted(KINDS.keys() - REFUSED) + ["byte-level", "llama as json"]


@cache
def training_tokenizer(name):
    """The training tokenizer of a kind."""
    if name == "byte-level":
        byte_level = limited()
        byte_level.normalizer = normalizers.NFC()
        return Tokenizer(byte_level.to_str().encode(), name)
    if name == "llama as json":
        content = tokenizer_files(training_tokenizer("default"), 64)["tokenizer.json"]
        return Tokenizer(json.dumps(content).encode(), name)
    return Tokenizer(trained(**KINDS[name]), name)


@cache
def exported(name):
    """The tokenizer.json of an export, as `tokenizers` reads it."""
    content = tokenizer_files(training_tokenizer(name), 64)["tokenizer.json"]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    tokenizer.encode_special_tokens = True  # what split_special_tokens does in transformers
    return tokenizer


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=texts)
def test_ids_and_text_equal_those_of_training(name, text):
    training = training_tokenizer(name)
    of_export = exported(name)

    ids = training.encode(text).tolist()
    assert of_export.encode(text).ids == ids
    assert of_export.decode(ids) == training.decode(ids)
    with_eos = [*ids, training.eos_id]
    assert of_export.decode(with_eos) == training.decode(with_eos)

    if name == "default":  # a truncated character does not drop the line end
        ids = training.encode(f"{text}\n\U0001f642").tolist()[:-2]  # two bytes of four
        assert of_export.decode(ids) == training.decode(ids)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_tokenizer_without_an_exact_conversion_is_refused(name):
    with refused("hf.inexact_tokenizer"):
        tokenizer_files(training_tokenizer(name), 64)


@pytest.fixture
def loaded(name, tmp_path):
    """The tokenizer of an export, as transformers loads it from its files."""
    training = training_tokenizer(name)
    for file, content in tokenizer_files(training, 64).items():
        (tmp_path / file).write_text(json.dumps(content))
    model = sentencepiece_file(training)
    assert (model is not None) == (name == "default")
    if model is not None:
        (tmp_path / "tokenizer.model").write_bytes(model)
    return AutoTokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["default", "byte-level"])
def test_auto_tokenizer_has_the_ids_and_texts_of_training(name, loaded, tmp_path):
    training = training_tokenizer(name)
    generator = random.Random(0)
    texts = ["".join(generator.choices(FRAGMENTS, k=generator.randrange(25))) for _ in range(200)]
    ids = [training.encode(text).tolist() for text in texts]

    loaded.save_pretrained(tmp_path / "copy")
    copied = AutoTokenizer.from_pretrained(tmp_path / "copy", use_fast=True)

    assert loaded(texts)["input_ids"] == ids
    assert [copied.encode(text) for text in texts] == ids
    for row in ids:
        with_eos = [*row, training.eos_id]
        assert loaded.decode(with_eos, skip_special_tokens=True) == training.decode(with_eos)

    text = "the cat sat on the mat, and it came"
    offsets = loaded(text, return_offsets_mapping=True)["offset_mapping"]
    assert "".join(text[start:stop] for start, stop in offsets) == text


@pytest.mark.parametrize("name", ["default", "byte-level"])
def test_auto_tokenizer_has_what_generate_and_lm_eval_read(name, loaded):
    training = training_tokenizer(name)

    special_ids = (loaded.eos_token_id, loaded.bos_token_id, loaded.pad_token_id)
    assert special_ids == (training.eos_id, training.eos_id, training.eos_id)
    assert (len(loaded), loaded.is_fast, loaded.model_max_length) == (training.vocab_size, True, 64)
    assert sorted(loaded("a")) == ["attention_mask", "input_ids"]


def test_an_export_draws_no_split():
    content = json.loads(training_tokenizer("byte-level").model)
    content["model"]["dropout"] = 0.5
    tokenizer = Tokenizer(json.dumps(content).encode(), "drawing")

    files = tokenizer_files(tokenizer, 64)

    assert not files["tokenizer.json"]["model"].get("dropout")


# llama.cpp's converter takes every tokenizer.model for BPE with bytes; of the others it is told no
READ_BY_LLAMA_CPP = {"default", "without a dummy prefix", "letters beside signs", "across spaces"}


@pytest.mark.parametrize("name", EXACT)
def test_what_llama_cpp_is_told(name):
    training = training_tokenizer(name)
    is_read = name in READ_BY_LLAMA_CPP
    is_written = is_read or name == "dropping spaces"

    config = tokenizer_files(training, 64)["tokenizer_config.json"]

    assert llama_cpp_reads(training) == is_read
    assert sentencepiece_file(training) == (training.model if is_written else None)
    assert config["add_bos_token"] is False
    assert config.get("add_prefix_space", True) == (name != "without a dummy prefix")
