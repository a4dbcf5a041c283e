"""Encoder of an HF tokenizer.json with the package `tokenizers`, one of `Tokenizer`'s two formats.

By default that package matches special tokens in texts, and if the file says so, it truncates, pads
or splits words at random (BPE dropout): all of that is off here. It needs 5 GB for a document of
30 MB, so texts are encoded in slices for two kinds of file: Llama-2's (see `cached_encoder.py`),
and those that first split by a known regex.
"""

import json
import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tokenizers

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.cached_encoder import PROBE_TEXT, SLICE_CHARACTERS, SPACE, CachedEncoder

EOS_NAMES = (
    "</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip
BOS_NAMES = (
    "<s>", "<|begin_of_text|>", "<bos>", "<|bos|>", "<|startoftext|>", "[BOS]",
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
)  # fmt: skip
# In hardly any vocabulary: must become bytes or the unknown token.
_RARE_CHARACTER = "\U0001f9ec"
_LLAMA_NORMALIZER = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    ],
}
RANDOM_OPTIONS = ("dropout", "alpha", "nbest_size")
"""Options of a model that draw one of the splits of a word: of BPE, and of Unigram."""
# With one of these, a word's tokens are not those of its merges alone.
_OTHER_BPE = ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Llama-3's and Qwen-2's; GPT-2's is built into ByteLevel.
_SPLITS = (_SPLIT % "{1,3}", _SPLIT % "")
# In all three, a match that includes the letter ends at the space, and no match that begins there
# looks back, so the split from there on does not depend on the text before.
_CUT = re.compile("[A-Za-z](?= [A-Za-z])")


class SplitEncoder:
    """`encode` in slices that end before a space between ASCII letters."""

    method = "slices"

    def __init__(
        self, encode: Callable[[str], list[int]], slice_characters: int = SLICE_CHARACTERS
    ) -> None:
        self._encode = encode
        self._slice_characters = slice_characters

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`, int64 [tokens]."""
        ids: list[int] = []
        start = 0
        while letter := _CUT.search(text, start + self._slice_characters):
            ids += self._encode(text[start : letter.end()])
            start = letter.end()
        ids += self._encode(text[start:])
        return np.array(ids, dtype=np.int64)


class HFTokenizer:
    """Encoder of the tokenizer.json in `model`; EOS is `eos` (text or id), else a common name.

    Raises UserError without exactly one EOS, or if texts could contain it or lose characters.
    """

    def __init__(self, model: bytes, name: str, eos: str | int | None = None) -> None:
        self._name = name
        # workers have one core each; with threads the package also warns after every fork
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            content = json.loads(model)
            added = {entry["content"]: int(entry["id"]) for entry in content["added_tokens"]}
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                "tokenizer.unreadable", f"tokenizer {name}: not a tokenizer.json: {error!r}"
            ) from None

        # EOS, and BOS if there is one (else -1).
        self.eos_token = _eos_token(added, name, eos)
        self.eos_id = added[self.eos_token]
        bos_tokens = [token for token in BOS_NAMES if token in added]
        self.bos_id = added[bos_tokens[0]] if bos_tokens else -1
        self._special = [i for i in {self.eos_id, self.bos_id} if i >= 0]

        # The package's tokenizer, without matching of EOS and BOS in texts and without random
        # splits: matching can be turned off for special tokens only.
        for entry in content["added_tokens"]:
            if entry["id"] in (self.eos_id, self.bos_id):
                entry["special"] = True
        content, ignored_options = without_random_options(content)
        self._tokenizer = _load(content, name)
        # ids may have gaps, so the number of tokens could be too small
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocab.values())

        # Slices, if they have the ids of the whole text here.
        self._encoder = self._slice_encoder(content)
        if self._encoder:
            slice_ids = self._encoder.encode(PROBE_TEXT)
            if not np.array_equal(slice_ids, _ids(self._tokenizer, PROBE_TEXT)):
                self._encoder = None
        self.method = "tokenizers, whole texts"
        if self._encoder:
            self.method = f"tokenizers, {self._encoder.method}"
        if ignored_options:
            self.method += f"; ignores {', '.join(ignored_options)}, which splits words at random"

        # No text may have the ids of EOS or BOS, for which `encode` raises, or lose a character.
        for special_id in self._special:
            token = str(self._tokenizer.id_to_token(special_id))
            for probe in (token, f"a{token}b", f" {token} "):
                self.encode(probe)
        if not len(self.encode(_RARE_CHARACTER)):
            raise UserError(
                "tokenizer.drops_text",
                f"tokenizer {name}: drops characters; choose one with byte fallback or <unk>",
            )

    def _slice_encoder(self, content: dict[str, Any]) -> CachedEncoder | SplitEncoder | None:
        """Return an encoder of slices for the two known kinds of files; None for others."""
        if has_known_split(content):
            return SplitEncoder(partial(_ids, self._tokenizer))
        unprefixed = llama_2_without_prefix(content)
        if unprefixed is None:
            return None

        # All tokens of several characters; merges are "a b" or, in later versions, ["a", "b"].
        tokens = []
        for merge in content["model"]["merges"]:
            symbols = merge.split(" ") if isinstance(merge, str) else merge
            tokens.append("".join(symbols))
        return CachedEncoder(partial(_ids, _load(unprefixed, self._name)), tokens, " ")

    def encode(self, text: str) -> np.ndarray:
        if self._encoder is None:
            tokens = np.array(_ids(self._tokenizer, text), dtype=np.int64)
        else:
            tokens = self._encoder.encode(text)
        if any((tokens == special).any() for special in self._special):
            raise UserError(
                "tokenizer.eos_in_text",
                f"tokenizer {self._name}: encodes text to the ids of EOS or BOS; choose another",
            )
        return tokens

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def _eos_token(added: dict[str, int], name: str, eos: str | int | None) -> str:
    """Return the added token that is `eos` (text or id), or else has a common name of EOS."""
    if eos is None:
        expected = "an EOS by name"
        matches = [token for token in added if token in EOS_NAMES]
    else:
        expected = repr(eos)
        matches = [token for token, i in added.items() if eos in (token, i)]
    if len(matches) != 1:
        raise UserError(
            "tokenizer.eos",
            f"tokenizer {name}: {len(matches)} of its added tokens "
            f"({', '.join(list(added)[:8])}) are {expected}, expected one; pass --eos TOKEN",
            found=len(matches),
        )
    return matches[0]


def _load(content: dict[str, Any], name: str) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the package raises nothing more precise
        raise UserError(
            "tokenizer.unreadable", f"tokenizer {name}: not a tokenizer.json: {error}"
        ) from None
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def without_random_options(content: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return `content` whose texts always have the same ids, and the options that were removed."""
    model = content.get("model")
    if not isinstance(model, dict):
        return content, []
    removed = [option for option in RANDOM_OPTIONS if model.get(option)]
    kept = {key: value for key, value in model.items() if key not in RANDOM_OPTIONS}
    removed_settings = [f"{option} = {model[option]}" for option in removed]
    return {**content, "model": kept}, removed_settings


def _ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def llama_2_without_prefix(content: dict[str, Any]) -> dict[str, Any] | None:
    """Return `content` without the prefix of texts; None if it is not like Llama-2's."""
    model = content["model"]
    if (
        content.get("normalizer") != _LLAMA_NORMALIZER
        or content.get("pre_tokenizer") is not None
        or _has_plain_added_tokens(content)
        or model.get("type") != "BPE"
        or not model.get("byte_fallback")
        or any(f"<0x{byte:02X}>" not in model["vocab"] for byte in range(256))
        or any(model.get(option) for option in _OTHER_BPE)
    ):
        return None
    return {**content, "normalizer": _LLAMA_NORMALIZER["normalizers"][1]}


def has_known_split(content: dict[str, Any]) -> bool:
    """Return whether `content` begins by splitting a text by one of the known regexes."""
    splitter = content.get("pre_tokenizer") or {}
    if content.get("normalizer") is not None or _has_plain_added_tokens(content):
        return False

    # GPT-2's regex is an option of ByteLevel; Llama-3's and Qwen-2's are a step before it.
    if splitter.get("type") == "ByteLevel":
        return bool(splitter.get("use_regex", True))
    steps = splitter.get("pretokenizers") or [{}]
    return (
        splitter.get("type") == "Sequence"
        and [step.get("type") for step in steps] == ["Split", "ByteLevel"]
        and steps[0].get("pattern") in [{"Regex": split} for split in _SPLITS]
        and steps[0].get("behavior") == "Isolated"
        and not steps[0].get("invert")
        and not steps[1].get("use_regex", True)
        and not steps[1].get("add_prefix_space", True)
    )


def _has_plain_added_tokens(content: dict[str, Any]) -> bool:
    """Return whether some added tokens are not special: those are matched in texts."""
    return any(not entry["special"] for entry in content["added_tokens"])
