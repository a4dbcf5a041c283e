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
    "model_type": "unigram", "hard_vocab_limit": False, "character_coverage": 1.0,
    "vocab_size": 500, "required_chars": NAMES,
    # two ways to cut a run of spaces can have the same score, but for rounding
    "allow_whitespace_only_pieces": False,
}  # fmt: skip
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
    if name == "byte-level":
        made = limited()
        made.normalizer = normalizers.NFC()
        return Tokenizer(made.to_str().encode(), name)
    if name == "llama as json":
        content = tokenizer_files(training_tokenizer("default"), 64)["tokenizer.json"]
        return Tokenizer(json.dumps(content).encode(), name)
    return Tokenizer(trained(**KINDS[name]), name)


@cache
def exported(name):
    content = tokenizer_files(training_tokenizer(name), 64)["tokenizer.json"]
    made = tokenizers.Tokenizer.from_str(json.dumps(content))
    made.encode_special_tokens = True  # what split_special_tokens does in transformers
    return made


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=texts)
def test_ids_and_text_equal_those_of_training(name, text):
    training, other = training_tokenizer(name), exported(name)
    ids = training.encode(text).tolist()
    assert other.encode(text).ids == ids
    assert other.decode(ids) == training.decode(ids)
    assert other.decode([*ids, training.eos_id]) == training.decode([*ids, training.eos_id])
    if name == "default":  # a truncated character does not drop the line end
        ids = training.encode(f"{text}\n\U0001f642").tolist()[:-2]  # two bytes of four
        assert other.decode(ids) == training.decode(ids)


@pytest.mark.parametrize("name", ["default", "byte-level"])
def test_auto_tokenizer(name, tmp_path):
    training = training_tokenizer(name)
    for file, content in tokenizer_files(training, 64).items():
        (tmp_path / file).write_text(json.dumps(content))
    model = sentencepiece_file(training)
    assert (model is not None) == (name == "default")
    if model is not None:
        (tmp_path / "tokenizer.model").write_bytes(model)

    loaded = AutoTokenizer.from_pretrained(tmp_path)
    loaded.save_pretrained(tmp_path / "copy")
    copied = AutoTokenizer.from_pretrained(tmp_path / "copy", use_fast=True)

    # the ids and texts of training
    generator = random.Random(0)
    texts = ["".join(generator.choices(FRAGMENTS, k=generator.randrange(25))) for _ in range(200)]
    ids = [training.encode(text).tolist() for text in texts]
    assert ids == loaded(texts)["input_ids"] == [copied.encode(text) for text in texts]
    decoded = [loaded.decode([*row, training.eos_id], skip_special_tokens=True) for row in ids]
    assert decoded == [training.decode([*row, training.eos_id]) for row in ids]
    text = "the cat sat on the mat, and it came"
    offsets = loaded(text, return_offsets_mapping=True)["offset_mapping"]
    assert "".join(text[start:stop] for start, stop in offsets) == text

    # what `generate` and lm_eval read
    special_ids = (loaded.eos_token_id, loaded.bos_token_id, loaded.pad_token_id)
    assert special_ids == (training.eos_id,) * 3
    assert (len(loaded), loaded.is_fast, loaded.model_max_length) == (training.vocab_size, True, 64)
    assert sorted(loaded("a")) == ["attention_mask", "input_ids"]


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_tokenizer_without_an_exact_conversion_is_refused(name):
    with refused("hf.inexact_tokenizer"):
        tokenizer_files(training_tokenizer(name), 64)


def test_an_export_draws_no_split():
    content = json.loads(training_tokenizer("byte-level").model)
    content["model"]["dropout"] = 0.5
    tokenizer = Tokenizer(json.dumps(content).encode(), "drawing")
    made = tokenizer_files(tokenizer, 64)["tokenizer.json"]
    assert not made["model"].get("dropout")


# llama.cpp's converter takes every tokenizer.model for BPE with bytes; of the others it is told no
READ_BY_LLAMA_CPP = {"default", "without a dummy prefix", "letters beside signs", "across spaces"}


@pytest.mark.parametrize("name", EXACT)
def test_what_llama_cpp_is_told(name):
    training = training_tokenizer(name)
    assert llama_cpp_reads(training) == (name in READ_BY_LLAMA_CPP)
    is_written = name in READ_BY_LLAMA_CPP | {"dropping spaces"}
    assert sentencepiece_file(training) == (training.model if is_written else None)
    config = tokenizer_files(training, 64)["tokenizer_config.json"]
    assert config["add_bos_token"] is False
    assert config.get("add_prefix_space", True) == (name != "without a dummy prefix")
