"""llama.cpp reads an export of a model without Canon: token ids, perplexity, the likeliest token.

Its converter and its binary are those of npm's node-llama-cpp, in the folder NODE_LLAMA_CPP if that
is set, else installed for the test; see tests/README.md.
"""

import json
import math
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from canon_pretrain.data.tokenizer import Tokenizer
from canon_pretrain.hf.export import export
from tests.data.test_tokenizer import FRAGMENTS, LINES, MODELS, trained
from tests.hf_exports import plant_run
from tests.hf_exports import quick as quick
from tests.support import HANGS_AFTER_S
from tests.variants import build, variant

VERSION = "3.22.1"
EXACT = ["default", "without a dummy prefix", "across spaces"]
TEXTS = [*LINES, "".join(FRAGMENTS[12:60]), " ".join(FRAGMENTS[12:30]), "  two  spaces ", "</s> it"]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The folder of npm's package, with llama.cpp for this machine's CPU."""
    if "NODE_LLAMA_CPP" in os.environ:
        return Path(os.environ["NODE_LLAMA_CPP"])
    npm = shutil.which("npm")
    if npm is None or platform.machine() != "x86_64":
        pytest.skip("needs npm on x86_64, or NODE_LLAMA_CPP")

    # its optional packages, which are left out, are for GPUs and other machines
    folder = tmp_path_factory.mktemp("npm")
    packages = [f"node-llama-cpp@{VERSION}", f"@node-llama-cpp/linux-x64@{VERSION}"]
    options = ["--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund"]
    installed = subprocess.run(
        [npm, "install", *options, *packages],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HANGS_AFTER_S,
    )
    if installed.returncode != 0:
        pytest.skip(f"npm can't install {packages[0]}: {installed.stderr[-300:]}")
    return folder / "node_modules" / "node-llama-cpp"


@pytest.fixture(scope="module")
def converter(package, tmp_path_factory):
    """llama.cpp's converter, from the package's bundle of its repository."""
    folder = tmp_path_factory.mktemp("llama.cpp")
    bundle = package / "llama" / "gitRelease.bundle"
    subprocess.run(["git", "clone", "--quiet", bundle, folder], check=True, timeout=HANGS_AFTER_S)
    return folder / "convert_hf_to_gguf.py"


def ask_llama_cpp(package, gguf, texts):
    """Return the ids, their nats and the likeliest next token of each text."""
    script = Path(__file__).with_name("llama_cpp.mjs")
    done = subprocess.run(
        ["node", script, package, gguf],
        input=json.dumps(texts),
        capture_output=True,
        check=True,
        text=True,
        timeout=HANGS_AFTER_S,
    )
    return json.loads(done.stdout)


def check_llama_cpp(variant_name, tokenizer_name, package, converter, tmp_path):
    """Assert that llama.cpp's ids, perplexities and likeliest tokens of an export are ours."""
    path = tmp_path / "tokenizer.model"
    path.write_bytes(trained(**MODELS[tokenizer_name][0]))
    tokenizer = Tokenizer.load(path)
    args = replace(variant(variant_name), vocab_size=tokenizer.vocab_size + 8, dim=64)  # padded
    model = build(args).eval()
    out = tmp_path / "out"
    gguf = tmp_path / "model.gguf"
    export(plant_run(tmp_path / "run", model), out, tokenizer=path)

    command = [sys.executable, converter, out, "--outfile", gguf, "--outtype", "f32"]
    subprocess.run(command, check=True, capture_output=True, timeout=HANGS_AFTER_S)

    for text, answer in zip(TEXTS, ask_llama_cpp(package, gguf, TEXTS), strict=True):
        ids = tokenizer.encode(text)
        logits_TV = model(torch.tensor(ids[None]))[0]
        assert answer["ids"] == ids.tolist()
        assert answer["next"] == int(logits_TV[-1].argmax())

        # the perplexity of the text after its first token
        nats = F.cross_entropy(logits_TV[:-1], torch.tensor(ids[1:]), reduction="sum").item()
        num_tokens = len(ids) - 1
        expected = math.exp(nats / num_tokens)
        assert math.exp(answer["nats"] / num_tokens) == pytest.approx(expected, rel=1e-3)


@pytest.mark.system  # the converter imports transformers
@pytest.mark.parametrize("name", EXACT)
@torch.no_grad()
def test_llama_cpp_has_the_ids_and_the_perplexity_of_training(name, package, converter, tmp_path):
    check_llama_cpp("rope", name, package, converter, tmp_path)


@pytest.mark.system
@pytest.mark.parametrize("name", ["rope qk_per_head gqa"])  # Qwen3ForCausalLM
@torch.no_grad()
def test_llama_cpp_has_the_perplexity_of_other_classes(name, package, converter, tmp_path):
    check_llama_cpp(name, "default", package, converter, tmp_path)
