"""Convert the training tokenizer to the files that AutoTokenizer reads, with identical ids.

With `split_special_tokens` the name of a special token in a text is not read as that token.
`bos_token` is EOS, as in GPT-2: lm_eval puts it before a text without context.
"""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers

from canon_pretrain.core.errors import UserError
from canon_pretrain.data.cached_encoder import SPACE, SentencePieceInfo
from canon_pretrain.data.hf_tokenizer import without_random_options
from canon_pretrain.data.id_tokenizer import is_id_tokenizer
from canon_pretrain.data.tokenizer import SENTENCEPIECE_FILE, Tokenizer

NUM_PROBES = 2000
# far below all scores: such a piece is used only if nothing else fits, which _compare checks
_NEVER = -1e6
_BPE, _UNIGRAM = 2, 1
_ALL = 1 << 20
UNKNOWN = " \u2047 "
"""How SentencePiece decodes the unknown token."""


def tokenizer_files(tokenizer: Tokenizer, max_length: int) -> dict[str, Any]:
    """Return the contents of both JSON files by name. Raises UserError if ids would differ."""
    if tokenizer.file_name == SENTENCEPIECE_FILE:
        content = _from_sentencepiece(tokenizer.model)
    else:
        content, _ = without_random_options(json.loads(tokenizer.model))
    for entry in content["added_tokens"]:
        # only special tokens can be excluded from matching
        entry["special"] = entry["special"] or entry["id"] in (tokenizer.eos_id, tokenizer.bos_id)
    content |= {"truncation": None, "padding": None}
    content["post_processor"] = _without_special_tokens(content.get("post_processor"))
    if not is_id_tokenizer(tokenizer.model):  # which refuses words
        _compare(tokenizer, content)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), tokenizer.eos_token),
        # as in training; llama.cpp adds a BOS unless told not to
        "add_bos_token": False,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    if tokenizer.file_name == SENTENCEPIECE_FILE:
        if not SentencePieceInfo.read(tokenizer.model).dummy_prefix:
            config["add_prefix_space"] = False  # read by llama.cpp's converter only
    return {"tokenizer.json": content, "tokenizer_config.json": config}


def sentencepiece_file(tokenizer: Tokenizer) -> bytes | None:
    """Return the tokenizer.model of an export, None if there is none.

    llama.cpp's converter reads its scores; from a tokenizer.json alone it gives all tokens the same
    score, and texts get other ids. It takes every tokenizer.model for BPE with bytes: others are
    left out, and it refuses them.
    """
    if tokenizer.file_name != SENTENCEPIECE_FILE:
        return None
    facts = SentencePieceInfo.read(tokenizer.model)
    return tokenizer.model if facts.model_type == _BPE and facts.byte_fallback else None


def llama_cpp_reads(tokenizer: Tokenizer) -> bool:
    """Return whether a GGUF file that llama.cpp's converter writes has the ids of training."""
    if sentencepiece_file(tokenizer) is None:
        return False
    return not SentencePieceInfo.read(tokenizer.model).drops_spaces


def _from_sentencepiece(model: bytes) -> dict[str, Any]:
    facts = SentencePieceInfo.read(model)
    refusals = {
        "it is neither a BPE nor a unigram model": facts.model_type not in (_BPE, _UNIGRAM),
        f"it has user-defined or unused tokens {facts.user_defined[:1]}": facts.user_defined,
        "it normalizes characters": facts.normalizes,
        "spaces are suffixes": facts.space_is_suffix,
        "it does not escape spaces": not facts.escapes_spaces,
    }
    if reasons := [reason for reason, holds in refusals.items() if holds]:
        raise UserError(
            "hf.inexact_tokenizer",
            f"the tokenizer can't be converted to tokenizer.json: {'; '.join(reasons)}",
        )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [processor.id_to_piece(i) for i in range(processor.vocab_size())]
    made = tokenizers.Tokenizer(_model(processor, pieces, facts))
    made.normalizer = normalizers.Sequence(_normalizers(facts))
    made.decoder = decoders.Sequence(_decoders(facts, pieces[processor.unk_id()]))
    control = [piece for i, piece in enumerate(pieces) if processor.is_control(i)]
    made.add_special_tokens([AddedToken(piece, normalized=False) for piece in control])
    return json.loads(made.to_str())


def _normalizers(facts: SentencePieceInfo) -> list[Any]:
    steps: list[Any] = []
    if facts.drops_spaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if facts.dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    if facts.drops_spaces:  # at the end of a text also its own U+2581
        steps.append(normalizers.Replace(Regex(rf"{SPACE}+\z"), ""))
    return steps


def _decoders(facts: SentencePieceInfo, unknown: str) -> list[Any]:
    steps: list[Any] = [
        decoders.Replace(Regex(rf"\A{re.escape(unknown)}\z"), UNKNOWN),
        decoders.Replace(SPACE, " "),
    ]
    if facts.byte_fallback:
        # ByteFallback drops a whole run of invalid UTF-8, as of a truncated character: keep ASCII,
        # such as line ends, out of it
        lone = [byte for byte in range(128) if chr(byte) not in facts.tokens]
        steps += [decoders.Replace(f"<0x{byte:02X}>", chr(byte)) for byte in lone]
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    leading = _ALL if facts.drops_spaces else int(facts.dummy_prefix)
    return [*steps, decoders.Strip(" ", leading, 0)] if leading else steps


def _model(
    processor: sentencepiece.SentencePieceProcessor, pieces: list[str], facts: SentencePieceInfo
) -> models.Model:
    """Return a Unigram model, or BPE with all pairs of pieces as merges, the best first."""
    scores = {piece: processor.get_score(i) for i, piece in enumerate(pieces)}
    special = (processor.is_control, processor.is_unknown, processor.is_byte)  # match no text
    matched = {piece for i, piece in enumerate(pieces) if not any(test(i) for test in special)}
    if facts.model_type == _UNIGRAM:
        vocab = [(piece, scores[piece] if piece in matched else _NEVER) for piece in pieces]
        return models.Unigram(vocab, processor.unk_id(), facts.byte_fallback)
    merges = [
        (piece[:at], piece[at:])
        for piece in sorted(pieces, key=lambda p: -scores[p])
        if piece in matched
        for at in range(1, len(piece))
        if piece[:at] in matched and piece[at:] in matched
    ]
    ids = {piece: i for i, piece in enumerate(pieces)}
    options: Any = {"fuse_unk": True, "byte_fallback": facts.byte_fallback}
    return models.BPE(ids, merges, unk_token=pieces[processor.unk_id()], **options)


def _without_special_tokens(post_processor: dict[str, Any] | None) -> dict[str, Any] | None:
    if post_processor is None:
        return None
    if post_processor["type"] == "Sequence":
        kept = [_without_special_tokens(step) for step in post_processor["processors"]]
        return {"type": "Sequence", "processors": [step for step in kept if step]}
    return post_processor if post_processor["type"] == "ByteLevel" else None


def _compare(tokenizer: Tokenizer, content: dict[str, Any]) -> None:
    other = tokenizers.Tokenizer.from_str(json.dumps(content))
    other.encode_special_tokens = True
    for text in _probe_texts(other):
        ids = tokenizer.encode(text)
        if not np.array_equal(ids, other.encode(text).ids):
            ids_text = f"{text!r} is {ids.tolist()} in training, not {other.encode(text).ids}"
            raise UserError("hf.inexact_tokenizer", f"tokenizer.json would differ: {ids_text}")


def _probe_texts(tokenizer: tokenizers.Tokenizer) -> Iterator[str]:
    """Yield texts of random tokens, spaces and unusual characters."""
    names = list(tokenizer.get_vocab(with_added_tokens=True))
    odd = ["", " ", "  ", "\n", "\t", "\r\n", "\x00", SPACE, "\u200d", "e\u0301", "\U0001f642"]
    odd += ["\ufffd", "</s>", "<s>", "<unk>", "<0x0A>", "\u3000", "0123456789", "\ufb01", "\u0130"]
    ranges = (range(0, 0x300), range(0x4E00, 0x4E40), range(0x1F600, 0x1F610))
    kinds = (names, odd, [chr(i) for each in ranges for i in each])
    generator = random.Random(0)
    yield from odd
    for _ in range(NUM_PROBES):
        kind = kinds[generator.randrange(3)]
        picked = [generator.choice(kind) for _ in range(generator.randrange(1, 12))]
        text = "".join(word if generator.random() < 0.8 else f" {word}" for word in picked)
        yield text.replace(SPACE, " ") if generator.random() < 0.9 else text
