"""Small corpora of .jsonl files, and builds of them, for the tests of data_prep's build."""

import json
import random
from pathlib import Path
from typing import Any

from data_prep.build import build
from data_prep.plan import Options
from tests.data_folders import sentence, tokenizer

# several units, several parts in most of them
OPTIONS = Options(holdout=0.1, unit_files=2, max_part_tokens=2500)


def write_corpus(folder: Path, files: int = 9, rows: int = 24, words: int = 60) -> list[str]:
    """Write `files` .jsonl files of `rows` documents of about `words` words; their texts in order.

    File names sort naturally, not by letters; line ends, an empty line's text and wide characters
    are among the documents.
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
    """The SentencePiece model of `data_folders.tokenizer` as a file."""
    path.write_bytes(tokenizer().model)
    return path


def build_corpus(out: Path, corpus: Path, *, workers: int = 1, **more: Any) -> None:
    """Build `corpus` into `out` with the tokenizer beside it, `corpus`/../tokenizer.model."""
    arguments = {"options": OPTIONS, "files": [corpus], **more}
    build(out, "local", str(corpus.parent / "tokenizer.model"), workers=workers, **arguments)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` by its relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
