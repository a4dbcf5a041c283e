"""vLLM serves exports by the plugin: logits equal full passes, however requests are scheduled.

The tests marked `system` need vLLM: VLLM_PYTHON is the Python of an environment with vLLM
and transformers; see canon_pretrain/serve/README.md.
"""

import importlib
import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.hf_exports import export_model
from tests.hf_exports import quick as quick
from tests.support import HANGS_AFTER_S
from tests.variants import WORDS, build, variant

ROOT = Path(__file__).parents[2]
SIZES = {"vocab_size": 64, "dim": 128, "ffn_dim": 96, "max_seq_len": 256}  # heads of 32 channels
FIRST = "rope ABCD gqa"
LENGTHS = [1, 2, 3, 5, 17, 40, 64, 100]
NUM_NEW = 12
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 200,
    "max_num_seqs": 8,
    "max_logprobs": 64,
    "block_size": 32,
    "kv_cache_memory_bytes": 2**26,
    "seed": 0,
}


HYBRID = {
    "position": "nope",
    "canon_set": "ACD",
    "pattern": ("linear", "attention"),
    "layers": {
        "linear": {
            "mixer": "gated_deltanet",
            "num_heads": 4,
            "expand_k": 0.75,
            "expand_v": 1.5,
            "mixer_conv": True,
        },
        "attention": {"canon_set": "AC"},
    },
}
HYBRID_OF_STATES = {
    "position": "nope",
    "pattern": ("linear", "attention"),
    "layers": {"linear": {"mixer": "mamba2", "num_heads": 4, "state_dim": 6}, "attention": {}},
}
WINDOWS = {
    "canon_set": "ABCD",
    "pattern": ("near", "far"),
    "layers": {"near": {"window": 20}, "far": {"canon_set": "", "window": 0}},
}
REUSED = {"enable_prefix_caching": True, "max_num_batched_tokens": 64}
MODELS = {
    "rope ABCD gqa": {},
    "nope A k2 no_res act standard": {},
    "rope FKOV sqrt": {},
    "partial_rope_c half ABCD qk_per_head tied": {},
    "rope moe ABC": {},
    "rope relu2": {},  # no state
    "rope windows": WINDOWS,
    "rope hybrid": HYBRID,
    "rope states": HYBRID_OF_STATES,
}
SCHEDULES = {
    "chunked": {"enable_prefix_caching": False, "max_num_batched_tokens": 16},
    "preempted": {
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": 9,
        "max_model_len": 128,
    },
}


def entry_points():
    """Return the plugins of vLLM that an installation of this package has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["entry-points"]["vllm.general_plugins"]


def prompts_of(lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 60, (length,), generator=generator).tolist() for length in lengths]


def model_of(name):
    words = [word for word in name.split() if word in WORDS]
    args = replace(variant(" ".join(words)), **SIZES, **MODELS.get(name, {}))
    return build(args).eval()


def run_vllm(cases, folder):
    """Return vLLM's answers of each case, by the plugin of this folder."""
    if "VLLM_PYTHON" not in os.environ:
        pytest.skip("needs VLLM_PYTHON, the Python of an environment with vLLM")

    # the entry point, as an installation of this package has it
    metadata = folder / "site" / "canon_vllm-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: canon-vllm\nVersion: 0\n")
    entries = [f"{name} = {place}\n" for name, place in entry_points().items()]
    (metadata / "entry_points.txt").write_text("".join(["[vllm.general_plugins]\n", *entries]))

    cases_path = folder / "cases.json"
    answers_path = folder / "answers.jsonl"
    cases_path.write_text(json.dumps(cases))
    settings = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder / "site")]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    script = Path(__file__).with_name("vllm_cases.py")
    done = subprocess.run(
        [os.environ["VLLM_PYTHON"], script, cases_path, answers_path],
        env=os.environ | settings,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=5 * HANGS_AFTER_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in answers_path.read_text().splitlines()]


def largest_error(model, prompt, answered):
    """Return the largest difference of log-probabilities; assert that the tokens are the argmax."""
    ids = prompt + answered["ids"]
    with torch.no_grad():
        scores_TV = model(torch.tensor([ids]))[0].log_softmax(dim=-1)
    assert answered["ids"] == scores_TV[len(prompt) - 1 : -1].argmax(dim=-1).tolist()

    # the scores of position i are those of token i + 1
    by_position = dict(enumerate(answered["prompt_logprobs"][1:]))
    by_position |= dict(enumerate(answered["logprobs"], start=len(prompt) - 1))
    errors = [
        abs(scores_TV[position, int(id_)].item() - score)
        for position, scores in by_position.items()
        for id_, score in scores.items()
    ]
    assert len(answered["ids"]) == NUM_NEW and len(errors) >= NUM_NEW * OPTIONS["max_logprobs"]
    return max(errors)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What vLLM answers for each model, and for the first one in each schedule, by name."""
    folder = tmp_path_factory.mktemp("vllm")
    options_by_name = {}
    for i, name in enumerate(MODELS):
        path = export_model(folder / str(i), model_of(name))
        options_by_name[name] = OPTIONS | REUSED | {"model": str(path)}
    first = options_by_name[FIRST]["model"]
    for name, schedule in SCHEDULES.items():
        options_by_name[name] = OPTIONS | schedule | {"model": first}
    refused = OPTIONS | {"model": first, "tensor_parallel_size": 2}
    options_by_name["refused"] = refused

    case = {"prompts": prompts_of(LENGTHS), "num_new": NUM_NEW, "rounds": 2}
    cases = [case | {"options": options} for options in options_by_name.values()]
    return dict(zip(options_by_name, run_vllm(cases, folder), strict=True))


def check(model, answer):
    """Assert that all rounds have the scores of full passes; return the tokens that were reused."""
    num_cached = []
    for answered in answer["rounds"]:
        for prompt, one in zip(prompts_of(LENGTHS), answered, strict=True):
            assert largest_error(model, prompt, one) < 1e-4
            num_cached.append(one["num_cached"])
    return sum(num_cached)


@pytest.mark.system
@pytest.mark.parametrize("name", MODELS)
def test_vllm_has_the_scores_of_full_passes(name, answers):
    assert check(model_of(name), answers[name]) > 0


@pytest.mark.system
@pytest.mark.parametrize("name", SCHEDULES)
def test_vllm_has_these_scores_in_every_schedule(name, answers):
    answer = answers[name]
    assert (answer["num_preemptions"] > 0) == (name == "preempted")
    assert check(model_of(FIRST), answer) == 0


@pytest.mark.system
def test_vllm_refuses_options_before_it_starts_workers(answers):
    assert answers["refused"]["code"] == "serve.vllm_option"


def test_entry_point_is_the_plugin():
    module, name = entry_points()["canon"].split(":")
    assert callable(getattr(importlib.import_module(module), name))
    # importing it needs no vLLM
    assert "vllm" not in sys.modules
