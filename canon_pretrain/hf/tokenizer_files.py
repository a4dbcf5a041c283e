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
_UNUSUAL = (
    *("", " ", "  ", "\n", "\t", "\r\n", "\x00", SPACE, "\u200d", "e\u0301", "\U0001f642"),
    *("\ufffd", "</s>", "<s>", "<unk>", "<0x0A>", "\u3000", "0123456789", "\ufb01", "\u0130"),
)
_UNICODE_BLOCKS = (
    range(0, 0x300),  # Latin and combining characters
    range(0x4E00, 0x4E40),  # Chinese
    range(0x1F600, 0x1F610),  # emoji
)
# far below all scores: such a piece is used only if nothing else fits, which _compare checks
_NEVER = -1e6
_BPE = 2  # model_type in SentencePiece's file
_UNIGRAM = 1
_ALL = 1 << 20  # more spaces than any text has
UNKNOWN = " \u2047 "
"""How SentencePiece decodes the unknown token."""


def tokenizer_files(tokenizer: Tokenizer, max_length: int) -> dict[str, Any]:
    """Return the contents of both JSON files by name. Raises UserError if ids would differ."""
    is_sentencepiece = tokenizer.file_name == SENTENCEPIECE_FILE
    if is_sentencepiece:
        content = _from_sentencepiece(tokenizer.model)
    else:
        content, _ = without_random_options(json.loads(tokenizer.model))

    # Ids as in training: nothing is cut, padded or added, and names of EOS and BOS are plain text.
    for entry in content["added_tokens"]:
        # only special tokens can be excluded from matching
        if entry["id"] in (tokenizer.eos_id, tokenizer.bos_id):
            entry["special"] = True
    content["truncation"] = None
    content["padding"] = None
    content["post_processor"] = _without_special_tokens(content.get("post_processor"))
    if not is_id_tokenizer(tokenizer.model):  # which refuses words
        _compare(tokenizer, content)

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.eos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.eos_token,
        # as in training; llama.cpp adds a BOS unless this says not to
        "add_bos_token": False,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    if is_sentencepiece and not SentencePieceInfo.read(tokenizer.model).dummy_prefix:
        config["add_prefix_space"] = False  # read by llama.cpp's converter only
    return {"tokenizer.json": content, "tokenizer_config.json": config}


def sentencepiece_file(tokenizer: Tokenizer) -> bytes | None:
    """Return the tokenizer.model of an export, None if there is none.

    llama.cpp's converter reads its scores; from a tokenizer.json alone it assigns the same score to
    all tokens, and texts get other ids. It takes every tokenizer.model for BPE with bytes: others
    are left out, and it refuses them.
    """
    if tokenizer.file_name == SENTENCEPIECE_FILE:
        info = SentencePieceInfo.read(tokenizer.model)
        if info.model_type == _BPE and info.byte_fallback:
            return tokenizer.model
    return None


def llama_cpp_reads(tokenizer: Tokenizer) -> bool:
    """Return whether a GGUF file that llama.cpp's converter writes has the ids of training."""
    if sentencepiece_file(tokenizer) is None:
        return False
    return not SentencePieceInfo.read(tokenizer.model).drops_spaces


def _from_sentencepiece(model: bytes) -> dict[str, Any]:
    """Return the content of a tokenizer.json. Raises UserError for options that it lacks."""
    info = SentencePieceInfo.read(model)
    # Options that tokenizer.json cannot express, or not exactly.
    refusals = {
        "it is neither a BPE nor a unigram model": info.model_type not in (_BPE, _UNIGRAM),
        f"it has user-defined or unused tokens {info.user_defined[:1]}": info.user_defined,
        "it normalizes characters": info.normalizes,
        "spaces are suffixes": info.space_is_suffix,
        "it does not escape spaces": not info.escapes_spaces,
    }
    reasons = [reason for reason, applies in refusals.items() if applies]
    if reasons:
        raise UserError(
            "hf.inexact_tokenizer",
            f"the tokenizer can't be converted to tokenizer.json: {'; '.join(reasons)}",
        )

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [processor.id_to_piece(i) for i in range(processor.vocab_size())]
    converted = tokenizers.Tokenizer(_model(processor, pieces, info))
    converted.normalizer = normalizers.Sequence(_normalizers(info))
    converted.decoder = decoders.Sequence(_decoders(info, pieces[processor.unk_id()]))

    # Control tokens, such as EOS, are special tokens; as they are written, not normalized.
    control_pieces = [piece for i, piece in enumerate(pieces) if processor.is_control(i)]
    converted.add_special_tokens([AddedToken(piece, normalized=False) for piece in control_pieces])
    return json.loads(converted.to_str())


def _normalizers(info: SentencePieceInfo) -> list[Any]:
    """Return what SentencePiece does to spaces before it looks for pieces."""
    steps: list[Any] = []
    if info.drops_spaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if info.dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    if info.drops_spaces:  # at the end of a text also its own U+2581
        steps.append(normalizers.Replace(Regex(rf"{SPACE}+\z"), ""))
    return steps


def _decoders(info: SentencePieceInfo, unknown: str) -> list[Any]:
    """Return what SentencePiece does to pieces; `unknown` is that of the unknown token."""
    steps: list[Any] = [
        decoders.Replace(Regex(rf"\A{re.escape(unknown)}\z"), UNKNOWN),
        decoders.Replace(SPACE, " "),
    ]

    # ByteFallback drops a whole run of invalid UTF-8, as of a truncated character: keep ASCII,
    # such as line ends, out of it.
    if info.byte_fallback:
        for byte in range(128):
            if chr(byte) not in info.tokens:
                steps.append(decoders.Replace(f"<0x{byte:02X}>", chr(byte)))
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())

    # Leading spaces that the normalizers dropped or added.
    if info.drops_spaces:
        steps.append(decoders.Strip(" ", _ALL, 0))
    elif info.dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return steps


def _model(
    processor: sentencepiece.SentencePieceProcessor, pieces: list[str], info: SentencePieceInfo
) -> models.Model:
    """Return a Unigram model, or BPE with all pairs of pieces as merges, the best first."""
    # The score of each piece; only a piece of text can be a part of another one.
    scores: dict[str, float] = {}
    text_pieces: set[str] = set()
    for i, piece in enumerate(pieces):
        scores[piece] = processor.get_score(i)
        if not (processor.is_control(i) or processor.is_unknown(i) or processor.is_byte(i)):
            text_pieces.add(piece)

    if info.model_type == _UNIGRAM:
        scores |= dict.fromkeys(scores.keys() - text_pieces, _NEVER)
        return models.Unigram(list(scores.items()), processor.unk_id(), info.byte_fallback)

    # SentencePiece merges the pair with the best score, whichever two pieces it consists of.
    merges: list[tuple[str, str]] = []
    for piece in sorted(pieces, key=lambda piece: -scores[piece]):
        if piece in text_pieces:
            splits = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
            merges += filter(text_pieces.issuperset, splits)
    ids = {piece: i for i, piece in enumerate(pieces)}
    options: Any = {"fuse_unk": True, "byte_fallback": info.byte_fallback}
    return models.BPE(ids, merges, unk_token=pieces[processor.unk_id()], **options)


def _without_special_tokens(post_processor: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the post-processor without steps that add tokens: only ByteLevel ones are left."""
    if post_processor is None:
        return None
    match post_processor["type"]:
        case "Sequence":
            steps = map(_without_special_tokens, post_processor["processors"])
            return {"type": "Sequence", "processors": [step for step in steps if step]}
        case "ByteLevel":
            return post_processor
        case _:
            return None


def _compare(tokenizer: Tokenizer, content: dict[str, Any]) -> None:
    """Raise UserError if the tokenizer.json of `content` has other ids in some probe text."""
    converted = tokenizers.Tokenizer.from_str(json.dumps(content))
    converted.encode_special_tokens = True
    for text in _probe_texts(converted):
        training_ids = tokenizer.encode(text)
        converted_ids = converted.encode(text).ids
        if not np.array_equal(training_ids, converted_ids):
            raise UserError(
                "hf.inexact_tokenizer",
                "tokenizer.json would differ: "
                f"{text!r} is {training_ids.tolist()} in training, not {converted_ids}",
            )


def _probe_texts(tokenizer: tokenizers.Tokenizer) -> Iterator[str]:
    """Yield texts of random tokens, spaces and unusual characters."""
    yield from _UNUSUAL
    tokens = list(tokenizer.get_vocab(with_added_tokens=True))
    characters = [chr(code) for block in _UNICODE_BLOCKS for code in block]
    vocabularies = (tokens, _UNUSUAL, characters)
    generator = random.Random(0)
    for _ in range(NUM_PROBES):
        # Up to 11 pieces of one vocabulary, some after a space.
        vocabulary = vocabularies[generator.randrange(len(vocabularies))]
        pieces = [generator.choice(vocabulary) for _ in range(generator.randrange(1, 12))]
        text = "".join(piece if generator.random() < 0.8 else f" {piece}" for piece in pieces)

        # Tokens have U+2581 for a space; some texts keep it.
        yield text.replace(SPACE, " ") if generator.random() < 0.9 else text
