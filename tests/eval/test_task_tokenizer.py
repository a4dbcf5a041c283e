"""Tokenizers in tasks: ours and an export's give the same ids, texts and cuts."""

import json
import shutil

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from canon_pretrain.data.tokenizer import load_tokenizer
from canon_pretrain.hf.export import export
from eval.task_tokenizer import task_tokenizer
from eval.tasks.jrt.documents import cut
from tests.eval_text_runs import write_run
from tests.support import refused

# characters of one to four bytes, tokens of the vocabulary, and names of special tokens
WORDS = [*"aß€🙂", "the", "of", "which", "</s>", "<s>", "\n", " ", "  ", "\t", "Ada", "\ufffd", "é"]
texts = st.one_of(
    st.lists(st.sampled_from(WORDS), max_size=60).map("".join),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=60),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data folder data/, and the export of a model on it, export/."""
    base = tmp_path_factory.mktemp("tokenizers")
    write_run(base)
    export(base / "run/checkpoint/step-3", base / "export")
    return base


@pytest.fixture(scope="module")
def tokenizers(folder):
    """That of training, and those of tasks on the data and on the export."""
    ours = task_tokenizer({"tokenizer": str(folder / "data"), "pretrained": "of no matter"})
    theirs = task_tokenizer({"pretrained": str(folder / "export"), "dtype": "float32"})
    return load_tokenizer(folder / "data"), ours, theirs


@given(texts, st.integers(2, 30), st.integers(0, 40), st.integers(1, 9))
@example("aaaß\ufffd", 2, 4, 1)  # half of its last character decodes to U+FFFD
@example("\ufffdß", 3, 1, 1)
@settings(max_examples=300, deadline=None)
def test_ids_and_cuts_are_those_of_training(tokenizers, text, limit, start, length):
    training, *pair = tokenizers
    expected = training.encode(text).tolist()
    assert training.eos_id not in expected and training.bos_id not in expected
    for found in pair:
        assert found.encode(text) == expected
        assert found.decode(expected) == text
    answer = text[start : start + length]
    ours, theirs = (cut(text, [answer], found, limit=limit) for found in pair)
    assert ours == theirs
    assert ours.text in text  # no partial character, no added space


def test_no_prompt_to_run_the_models_code(folder, tmp_path, monkeypatch):
    """An export's config.json names the model's code, which its tokenizer does not need."""
    shutil.copytree(folder / "export", tmp_path / "export")
    assert "auto_map" in json.loads((tmp_path / "export" / "config.json").read_text())
    settings = json.loads((tmp_path / "export" / "tokenizer_config.json").read_text())
    del settings["tokenizer_class"]  # as in older versions; transformers then reads config.json
    (tmp_path / "export" / "tokenizer_config.json").write_text(json.dumps(settings))
    asked: list[object] = []  # transformers catches a prompt that fails
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "n")
    found = task_tokenizer({"tokenizer": str(tmp_path / "export")})
    assert found.decode(found.encode("the of")) == "the of"
    assert not asked


def test_missing_tokenizers_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for metadata in ({}, {"tokenizer": str(tmp_path)}, {"pretrained": "nobody/nothing"}):
        with refused("eval.task_tokenizer"):
            task_tokenizer(metadata)
