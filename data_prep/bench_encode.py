"""Our tokenizer beside plain SentencePiece and HF tokenizers, on the same texts and one core."""

import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers

from canon_pretrain.data.piece_bounds import SPACE, ModelFacts
from canon_pretrain.data.tokenizer import HF_FILE, Tokenizer


def measure_encoding(model: Tokenizer, texts: list[str], repeats: int) -> dict[str, Any]:
    """Tokens per second of CPU time: medians over `repeats`, in which all take turns.

    "new text" is every other document after its neighbours. A tokenizer.json has no sp.encode
    beside it, and a SentencePiece model that is no BPE no tokenizers.
    """
    others, notes = _others(model, texts)
    seconds: dict[str, list[float]] = {name: [] for name in (*OURS, *others)}
    whole = sum(len(ids) for ids in model.encode_batch(texts))
    half = sum(len(ids) for ids in model.encode_batch(texts[1::2]))
    tokens = dict.fromkeys(seconds, whole) | {"ours, new text": half}
    for _ in range(repeats):
        ours = Tokenizer(model.model, "bench", eos=model.eos_id)
        seconds[COLD].append(_cpu_s(ours.encode_batch, texts))
        seconds[WARM].append(_cpu_s(ours.encode_batch, texts))
        ours = Tokenizer(model.model, "bench", eos=model.eos_id)
        ours.encode_batch(texts[::2])
        seconds[NEW].append(_cpu_s(ours.encode_batch, texts[1::2]))
        for name, encode in others.items():
            seconds[name].append(_cpu_s(encode, texts))
    rates = {n: [tokens[n] / s for s in taken] for n, taken in seconds.items()}
    ratios: dict[str, float | None] = {
        f"{label} / {other}": statistics.median(
            a / b for a, b in zip(rates[ours_name], rates[other], strict=True)
        )
        for other in others
        for label, ours_name in (("cold", COLD), ("new text", NEW), ("warm", WARM))
    }
    for label in ("cold", "new text", "warm"):
        ratios.setdefault(f"{label} / sp.encode", None)
    return {
        "tokens": whole,
        "rates": {name: statistics.median(values) for name, values in rates.items()},
        "ratios": ratios,
        "notes": notes,
    }


COLD, WARM, NEW = "ours, empty cache", "ours, the same text again", "ours, new text"
OURS = (COLD, WARM, NEW)


def _cpu_s(encode: Callable[[list[str]], Any], texts: list[str]) -> float:
    started = time.process_time()
    encode(texts)
    return time.process_time() - started


def _others(
    model: Tokenizer, texts: list[str]
) -> tuple[dict[str, Callable[[list[str]], Any]], list[str]]:
    """What ours is compared with, and what must be said about it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core
    if model.file_name == HF_FILE:
        plain = tokenizers.Tokenizer.from_str(model.model.decode())
        plain.encode_special_tokens = True
        return {"tokenizers": _batch(plain)}, []
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.model)
    others: dict[str, Callable[[list[str]], Any]] = {
        "sp.encode": lambda batch: [processor.encode(text) for text in batch]
    }
    converted = as_tokenizer_json(model.model)
    if converted is None:
        return others, ["tokenizers, datatrove: not measured, this model is no BPE with bytes"]
    plain = tokenizers.Tokenizer.from_str(converted)
    others["tokenizers"] = _batch(plain)
    plain.encode_special_tokens = True
    some = texts[:200]
    same = sum(
        plain.encode(text, add_special_tokens=False).ids == processor.encode(text) for text in some
    )
    return others, [f"tokenizers: the same model, the same ids in {same} of {len(some)} documents"]


def _batch(plain: tokenizers.Tokenizer) -> Callable[[list[str]], Any]:
    def encode(texts: list[str]) -> list[Any]:
        return plain.encode_batch_fast(texts, add_special_tokens=False)

    return encode


def as_tokenizer_json(model: bytes) -> str | None:
    """A SentencePiece BPE model as the tokenizer.json that Llama-2's HF repository has beside it.

    None for a model that this does not express. A merge for each way to make a piece of two, by
    the piece's score: of two ways to one piece SentencePiece takes the leftmost in the text, HF the
    one listed first, so that ids may differ in rare texts.
    """
    facts = ModelFacts.read(model)
    if facts.refusal() or not facts.dummy_prefix:
        return None
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(processor.vocab_size())
    vocab = {processor.id_to_piece(i): i for i in ids}
    plain = [i for i in ids if not (_is_odd(processor, i) or len(processor.id_to_piece(i)) < 2)]
    merges = []
    for i in sorted(plain, key=lambda i: (-processor.get_score(i), i)):
        piece = processor.id_to_piece(i)
        ways = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        known = [way for way in ways if way[0] in vocab and way[1] in vocab]
        merges += sorted(known, key=lambda way: (vocab[way[0]], vocab[way[1]]))
    unknown = processor.id_to_piece(processor.unk_id())
    hf = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    )
    hf.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    hf.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    special = [i for i in (processor.unk_id(), processor.bos_id(), processor.eos_id()) if i >= 0]
    hf.add_special_tokens([processor.id_to_piece(i) for i in special])
    return json.dumps(json.loads(hf.to_str()), ensure_ascii=False)


def _is_odd(processor: sentencepiece.SentencePieceProcessor, i: int) -> bool:
    return processor.is_control(i) or processor.is_byte(i) or processor.is_unknown(i)
