"""Export and import of models with mixers of the user's own."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from canon_pretrain.checkpoint.architecture import model_args_of
from canon_pretrain.core.errors import UserError
from canon_pretrain.hf.classes import to_hf, to_ours
from canon_pretrain.hf.export import RECORD, export
from canon_pretrain.hf.loading import load_model
from canon_pretrain.hf.reading import MODEL_TOML, import_folder
from canon_pretrain.model.args import ModelArgs, Table, with_mixers_in
from canon_pretrain.run import config as experiment
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.titan.job_config import CanonJobConfig
from tests.hf_exports import hub_environment, plant_run
from tests.hf_exports import quick as quick
from tests.support import HANGS_AFTER_S, ROOT, canon_stage, command_error, refused
from tests.variants import BASE, build, random_tokens

main = canon_stage("hf")

AVERAGE = ROOT / "train_configs" / "mixers" / "decaying_average.py"
# attention with Canon-B, biases, a parameter of its own, and modules in a list
ATTENTION = """
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from canon_pretrain.kernels.decode_step import Parts
from canon_pretrain.model.cache import NO_CONTEXT, Context
from canon_pretrain.model.canon import make_canon
from canon_pretrain.model.mixers import Mixer, ModelArgs


class Scaled(Mixer):
    reads_mask = True
    init = {"scale_H": ("constant", 1.5)}

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.num_heads = args.num_heads
        self.qkv = nn.ModuleList(nn.Linear(args.dim, args.dim) for _ in range(3))
        self.wo = nn.Linear(args.dim, args.dim, bias=False)
        self.scale_H = nn.Parameter(torch.empty(args.num_heads))
        self.canon_b = make_canon("B", args, widths=(args.dim,) * 3)

    def forward(self, x_BTD: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        parts: Parts = tuple(layer(x_BTD) for layer in self.qkv)
        if self.canon_b is not None:
            parts = self.canon_b(parts, context, x_BTD)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)) for part in parts)
        k, v = context.append("keys", k), context.append("values", v)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        scores = q @ k.mT / math.sqrt(q.shape[-1]) * self.scale_H[:, None, None]
        mask = context.mask
        if mask is None:
            offset = k.shape[2] - q.shape[2]
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(offset)
        y = scores.masked_fill(~mask, -math.inf).softmax(-1) @ v
        return self.wo(y.transpose(1, 2).flatten(2))
"""
PROCESS = """
import json, sys

sys.modules["canon_pretrain"] = None  # it may be installed in this environment
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

torch.set_grad_enabled(False)
expected = load_file("expected.safetensors")
tokens, prompts = expected["tokens"], expected["tokens"][:, :9]
options = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
options["attention_mask"] = torch.ones_like(prompts)
answers = []
for folder in ("hf/out", "copy"):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    beams = [model.generate(prompts, use_cache=cache, num_beams=3, **options) for cache in (1, 0)]
    answers.append({
        "difference": float((model(tokens).logits - expected["logits"]).abs().max()),
        "greedy": model.generate(prompts, **options).tolist(),
        "beams": [texts.tolist() for texts in beams],
        "names": sorted(model.state_dict()),
        "frozen": [name for name, p in model.named_parameters() if not p.requires_grad],
    })
    model.save_pretrained("copy")
print(json.dumps(answers))
"""


def _run_folder(folder: Path, files: dict[str, str], args: ModelArgs) -> Path:
    """Write a run of `args` with the files of its mixers, and weights; return the run."""
    (folder / "mixers").mkdir(parents=True)
    for name, text in files.items():
        (folder / "mixers" / name).write_text(text)
    plant_run(folder, build(with_mixers_in(args, str(folder / "mixers"))))
    return folder


# a module is called cache.py in the export, and no module can be called my-attention.py
FILES = {"cache.py": AVERAGE.read_text(), "my-attention.py": ATTENTION}
LAYERS = {
    "average": {"mixer": "cache.py:DecayingAverage", "canon_set": "AC", "canon_trainable": False},
    "scaled": {"mixer": "my-attention.py:Scaled", "position": "nope", "canon_set": "AB"},
    "attention": {"window": 4, "canon_set": "ABCD"},
}
MIXED = replace(BASE, num_layers=4, document_mask=True, pattern=tuple(LAYERS), layers=Table(LAYERS))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return _run_folder(tmp_path_factory.mktemp("own") / "run", FILES, MIXED)


@pytest.fixture(scope="module")
def exported(run):
    folder = run.parent / "hf" / "out"
    export(run, folder, with_tokenizer=False)
    return folder


@torch.no_grad()
def _greedy(model, prompts_BT, num_new):
    for _ in range(num_new):
        next_B1 = model(prompts_BT)[:, -1:].argmax(dim=-1)
        prompts_BT = torch.cat((prompts_BT, next_B1), dim=1)
    return prompts_BT.tolist()


@pytest.mark.system  # starts a process that imports transformers
@torch.no_grad()
def test_an_export_is_loaded_without_this_package(run, exported, tmp_path):
    """Its logits and texts are those of the run, also after save_pretrained."""
    model = load_model(run / "checkpoint" / "step-3", torch.device("cpu"))
    tokens_BT = random_tokens(model.args, rows=2, num_tokens=24)
    expected = {"tokens": tokens_BT, "logits": model(tokens_BT)}
    save_file(expected, tmp_path / "expected.safetensors")
    shutil.copytree(exported.parent, tmp_path / "hf")
    command = [sys.executable, "-I", "-c", PROCESS]
    environment = hub_environment(tmp_path)
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        timeout=HANGS_AFTER_S,
        check=True,
        stdout=subprocess.PIPE,
    )

    for answer in json.loads(done.stdout.splitlines()[-1]):
        assert answer["difference"] < 1e-5
        assert answer["greedy"] == _greedy(model, tokens_BT[:, :9], 7)
        assert answer["beams"][0] == answer["beams"][1]
        assert answer["frozen"] == [
            f"model.layers.{number}.{site}.weight"
            for number in (0, 3)
            for site in ("canonA", "canonC")
        ]
        assert set(answer["names"]) == {to_hf(name, args=MIXED) for name in model.state_dict()}
        assert "model.layers.1.mixer.qkv.2.bias" in answer["names"]


def test_the_files_of_an_export(run, exported):
    config = json.loads((exported / "config.json").read_text())
    layers = config["canon_pretrain"]["layers"]
    assert layers["average"]["mixer"] == "mixer_cache.py:DecayingAverage"
    assert layers["scaled"]["mixer"] == "my_attention.py:Scaled"
    files = json.loads((exported / RECORD).read_text())["files"]
    assert {"mixer_cache.py", "cache.py", "my_attention.py"} <= set(files)
    for path in exported.glob("*.py"):
        assert "from canon_pretrain" not in path.read_text(), path
    names = load_file(exported / "model.safetensors").keys()
    assert {to_ours(name) for name in names} == set(build_state(run))


def build_state(run):
    return load_model(run / "checkpoint" / "step-3", torch.device("cpu")).state_dict()


@torch.no_grad()
def test_an_import_needs_trust(run, exported, tmp_path, capsys):
    """Without it no code is run; with it the import evaluates, and its TOML selects the model."""
    planted = tmp_path / "hf"
    shutil.copytree(exported, planted)
    marker = tmp_path / "it-ran"
    mixer = planted / "mixer_cache.py"
    mixer.write_text(f"import os\nos.mkdir({str(marker)!r})\n{mixer.read_text()}")
    for read in (
        lambda: import_folder(planted, tmp_path / "out"),
        lambda: load_model(planted, torch.device("cpu")),
    ):
        with refused("hf.untrusted_mixer"):
            read()
    untrusted = ["import", str(planted), str(tmp_path / "out")]
    assert command_error(capsys, main, untrusted) == "hf.untrusted_mixer"
    assert not marker.exists() and not (tmp_path / "out").exists()
    main(["import", str(planted), str(tmp_path / "trusted"), "--trust-code"])
    assert marker.exists()

    out = tmp_path / "out"
    found = import_folder(exported, out, trust_code=True)
    assert (out / "mixers" / "mixer_cache.py").read_bytes() == AVERAGE.read_bytes()
    assert (out / "mixers" / "my_attention.py").read_text() == ATTENTION
    model = load_model(run / "checkpoint" / "step-3", torch.device("cpu"))
    imported = load_model(found.checkpoint, torch.device("cpu"))
    tokens_BT = random_tokens(model.args, rows=2, num_tokens=24)
    assert torch.equal(imported(tokens_BT), model(tokens_BT))
    assert imported.args == model_args_of(RunFolder(out)) == found.args

    toml = tmp_path / "run.toml"
    toml.write_text(f'extends = ["{out / MODEL_TOML}"]\n[data]\npath = "{tmp_path}"\n')
    values = experiment.read_experiment(toml)
    selected = experiment.build(CanonJobConfig, values, source=str(toml)).model_args
    assert selected.layer_args == found.args.layer_args

    # and out again
    export(out, tmp_path / "again", with_tokenizer=False)
    for name in ("config.json", "model.safetensors", "mixer_cache.py", "my_attention.py"):
        assert (tmp_path / "again" / name).read_bytes() == (exported / name).read_bytes(), name


@pytest.mark.parametrize(
    "line", ["import canon_pretrain.model.cache", "from canon_pretrain.model import cache"]
)
def test_an_import_that_cannot_be_relative(line, tmp_path):
    args = replace(BASE, mixer="average.py:DecayingAverage", position="nope")
    files = {"average.py": f"{AVERAGE.read_text()}\n{line}\n"}
    run = _run_folder(tmp_path / "run", files, args)
    with refused("hf.mixer_import", path=run / "mixers" / "average.py"):
        export(run, tmp_path / "out", with_tokenizer=False)
    assert not (tmp_path / "out").exists()


def test_a_mixer_outside_of_the_export(exported, tmp_path):
    """A name with a folder, also as the name of a layer, is a file of the export."""
    outside = tmp_path / "outside.py"
    outside.write_text(f"import os\nos.mkdir({str(tmp_path / 'it-ran')!r})\n")
    config = json.loads((exported / "config.json").read_text())
    for number, extension in enumerate(
        (
            {"mixer": f"{outside}:Outside"},
            {"pattern": [f"{outside}:Outside"], "layers": {}},
            {"pattern": ["a"], "layers": {"a": {"mixer": f"../{tmp_path.name}/outside.py:O"}}},
        )
    ):
        folder = tmp_path / f"hf-{number}"
        shutil.copytree(exported, folder)
        (folder / "config.json").write_text(json.dumps(config | {"canon_pretrain": extension}))
        with pytest.raises((UserError, FileNotFoundError)) as error:
            import_folder(folder, tmp_path / f"out-{number}", trust_code=True)
        assert isinstance(error.value, UserError) and error.value.code == "mixer.no_file"
    assert not (tmp_path / "it-ran").exists()
