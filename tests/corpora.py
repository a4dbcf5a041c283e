"""Small corpora of .jsonl files, and builds of them."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from canon_pretrain.data.shards import TokenShards
from canon_pretrain.data.tokenizer import Tokenizer
from data_prep.build import build
from data_prep.plan import Options
from data_prep.sources import SourceOptions
from tests.data_folders import sentence, tokenizer

# several input groups, most of them of several shards
OPTIONS = Options(holdout=0.1, unit_files=2, max_part_tokens=2500)


def write_corpus(folder: Path, files: int = 9, rows: int = 24, words: int = 60) -> list[str]:
    """Write .jsonl files of `rows` documents of about `words` words; return the texts in order.

    File names need natural sorting; the texts include line ends and wide characters.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = []
    for file in range(files):
        lines = []
        for row in range(rows):
            length = random.Random(1000 * file + row).randrange(1, 2 * words)
            text = f"{file}.{row} naïve \U0001f642\n" + sentence(1000 * file + row, length)
            texts.append(text)
            lines.append(json.dumps({"text": text, "n": row}) + "\n")
        (folder / f"part{file + 1}.jsonl").write_text("".join(lines))
    return texts


def write_tokenizer(path: Path) -> Path:
    path.write_bytes(tokenizer().model)
    return path


def corpus_folder(folder: Path, files: int) -> Path:
    """Make a corpus, its tokenizer, and `data` built from them, in `folder`."""
    write_corpus(folder / "corpus", files=files)
    write_tokenizer(folder / "tokenizer.model")
    build_corpus(folder / "data", folder / "corpus")
    return folder


def build_corpus(out: Path, corpus: Path, *, workers: int = 1, **more: Any) -> None:
    """Build `corpus` into `out` with the tokenizer `corpus`/../tokenizer.model."""
    source = SourceOptions("local", [corpus])
    tokenizer = str(corpus.parent / "tokenizer.model")
    build(out, source, tokenizer, more.pop("options", OPTIONS), workers, **more)


def stored_texts(data: Path, split: str = "train") -> list[str]:
    """Return a split's documents as text; check that each has one EOS at its end, and sizes."""
    known = Tokenizer.find(data)
    with TokenShards.open(data / split) as shards:
        ends, ids = shards.document_ends(), shards.read(0, shards.num_tokens)
        assert len(ends) == shards.num_documents and ends[-1] == shards.num_tokens
        assert np.flatnonzero(ids == known.eos_id).tolist() == (ends - 1).tolist()
        texts = [known.decode(document) for document in np.split(ids, ends[:-1])]
        assert shards.num_bytes == sum(len(text.encode()) for text in texts)
    return texts


def snapshot(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def flip(path: Path, at: int | None = None) -> None:
    content = bytearray(path.read_bytes() or b"\x00")
    content[len(content) // 2 if at is None else at] ^= 1
    path.write_bytes(content)


def prose(seed: int, num_words: int, lexicon_words: int = 2000) -> str:
    """Return random words of a lexicon: the default is enough to train a tokenizer on."""
    letters = random.Random(0)
    lexicon = ["".join(letters.choices("etaoinshrdlu", k=3 + i % 7)) for i in range(lexicon_words)]
    return " ".join(random.Random(seed).choices(lexicon, k=num_words))
