"""Which tokenizer.json encodes a text as its slices, and the encoder that does so.

Used by `hf_tokenizer.py`: the package takes 5 GB and a minute for a document of 30 MB. Two kinds of
file are known, by their exact settings: Llama-2's (one BPE over the whole text, for which the
argument in piece_bounds.py holds), and those that split a text by a known expression first.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from canon_pretrain.data.piece_bounds import SPACE
from canon_pretrain.data.piece_encoder import SLICE_CHARACTERS

_LLAMA_NORMALIZER = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    ],
}
_OTHER_BPE = ("dropout", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Llama-3's and Qwen-2's; GPT-2's is built into ByteLevel.
_SPLITS = (_SPLIT % "{1,3}", _SPLIT % "")
# In all three a match that holds the letter ends at the space, and none that begins there looks
# back: what stands before does not change how the text is split from there on.
_CUT = re.compile("[A-Za-z](?= [A-Za-z])")


class SplitEncoder:
    """`encode` of a text in slices that end before a space between ASCII letters."""

    method = "giant documents in slices"

    def __init__(
        self, encode: Callable[[str], list[int]], slice_characters: int = SLICE_CHARACTERS
    ) -> None:
        self._encode = encode
        self._slice_characters = slice_characters

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, int64 [tokens]."""
        parts = [np.array(self._encode(part), dtype=np.int64) for part in self._cut(text)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _cut(self, text: str) -> Iterator[str]:
        start = 0
        while len(text) - start > self._slice_characters:
            found = _CUT.search(text, start + self._slice_characters)
            if found is None:
                break
            yield text[start : found.end()]
            start = found.end()
        yield text[start:]


def llama_settings(content: dict[str, Any]) -> dict[str, Any] | None:
    """A tokenizer.json that lacks only the prefix of `content`; None where it is no Llama-2's."""
    model = content["model"]
    if (
        content.get("normalizer") != _LLAMA_NORMALIZER
        or content.get("pre_tokenizer") is not None
        or _matches_in_texts(content)
        or model.get("type") != "BPE"
        or not model.get("byte_fallback")
        or any(f"<0x{byte:02X}>" not in model["vocab"] for byte in range(256))
        or any(model.get(option) for option in _OTHER_BPE)
    ):
        return None
    return {**content, "normalizer": _LLAMA_NORMALIZER["normalizers"][1]}


def merged_pieces(content: dict[str, Any]) -> list[str]:
    """Every symbol that the BPE model in `content` can merge characters to."""
    merges = content["model"]["merges"]
    return ["".join(m.split(" ") if isinstance(m, str) else m) for m in merges]


def is_split_first(content: dict[str, Any]) -> bool:
    """Whether `content` splits a text by one of the known expressions and does nothing before."""
    splitter = content.get("pre_tokenizer") or {}
    if content.get("normalizer") is not None or _matches_in_texts(content):
        return False
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


def _matches_in_texts(content: dict[str, Any]) -> bool:
    """Whether added tokens are looked for in a text: those that are not special are."""
    return any(not entry["special"] for entry in content["added_tokens"])
