"""vLLM serves exports by the plugin: logits equal full passes, however requests are scheduled.

The tests marked `system` need vLLM: VLLM_PYTHON is the Python of an environment with vLLM
and transformers; see canon_pretrain/serve/README.md.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tomllib
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import openai
import pytest
import torch

from canon_pretrain.hf.export import export
from canon_pretrain.hf.sampling import Sampler
from tests.hf_exports import export_model
from tests.hf_exports import quick as quick
from tests.ports import free_port
from tests.served_runs import write_text_run
from tests.support import HANGS_AFTER_S, wait_until
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


def vllm_python():
    if "VLLM_PYTHON" not in os.environ:
        pytest.skip("needs VLLM_PYTHON, the Python of an environment with vLLM")
    return os.environ["VLLM_PYTHON"]


def environment(folder):
    """Return the environment of a process with vLLM and the plugin of this folder."""
    # the entry point, as an installation of this package has it
    metadata = folder / "site" / "canon_vllm-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: canon-vllm\nVersion: 0\n")
    entries = [f"{name} = {place}\n" for name, place in entry_points().items()]
    (metadata / "entry_points.txt").write_text("".join(["[vllm.general_plugins]\n", *entries]))

    settings = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder / "site")]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    return os.environ | settings


def run_vllm(cases, folder):
    """Return vLLM's answers of each case, by the plugin of this folder."""
    python = vllm_python()
    cases_path = folder / "cases.json"
    answers_path = folder / "answers.jsonl"
    cases_path.write_text(json.dumps(cases))
    script = Path(__file__).with_name("vllm_cases.py")
    done = subprocess.run(
        [python, script, cases_path, answers_path],
        env=environment(folder) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=5 * HANGS_AFTER_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in answers_path.read_text().splitlines()]


@contextlib.contextmanager
def vllm_server(path, folder):
    """Start vLLM's HTTP server on an export; yield its address; end it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = {
        "model": path,
        "served-model-name": "m",
        "port": port,
        "dtype": "float32",
        "max-model-len": 200,
        "max-num-seqs": 8,
        "kv-cache-memory-bytes": 2**26,  # by default 92 % of a memory that others use too
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    log = folder / "server.log"
    with open(log, "w") as file:
        server = subprocess.Popen(
            [vllm_python(), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *words],
            env=environment(folder),
            cwd=folder,
            stdout=file,
            stderr=subprocess.STDOUT,
        )

    def is_up():
        assert server.poll() is None, log.read_text()[-3000:]
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(f"{url}/health", timeout=HANGS_AFTER_S).status == 200

    try:
        wait_until(is_up)
        yield url
    finally:
        server.terminate()
        server.wait(HANGS_AFTER_S)


def largest_error(model, prompt, answered, num_scores):
    """Return the largest difference of log-probabilities; assert that the tokens are the argmax.

    `num_scores`: at least, of each new token.
    """
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
    assert len(answered["ids"]) == NUM_NEW and len(errors) >= NUM_NEW * num_scores
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
            assert largest_error(model, prompt, one, OPTIONS["max_logprobs"]) < 1e-4
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


def complete(client, prompt):
    """Return a choice of the server's completion, with the fields that `largest_error` reads."""
    options = {
        "prompt_logprobs": 0,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    done = client.completions.create(
        model="m", prompt=prompt, max_tokens=NUM_NEW, temperature=0, logprobs=5, extra_body=options
    )
    choice = done.choices[0].to_dict()

    scores_of_prompt = [
        {id_: score["logprob"] for id_, score in (scores or {}).items()}
        for scores in choice["prompt_logprobs"]
    ]
    scores_of_answer = [
        {token.removeprefix("token_id:"): score for token, score in scores.items()}
        for scores in choice["logprobs"]["top_logprobs"]
    ]
    return {
        "prompt": choice["prompt_token_ids"],
        "ids": choice["token_ids"],
        "prompt_logprobs": scores_of_prompt,
        "logprobs": scores_of_answer,
    }


@pytest.mark.system
def test_vllms_server_has_the_scores_of_full_passes(tmp_path):
    run = write_text_run(tmp_path, FIRST, 200, dim=SIZES["dim"], ffn_dim=SIZES["ffn_dim"])
    path = tmp_path / "out"
    export(run / "checkpoint" / "step-3", path)
    sampler = Sampler.load(path)
    prompts = [*prompts_of(LENGTHS), "the river"]

    with vllm_server(path, tmp_path) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=HANGS_AFTER_S)
        with client, ThreadPoolExecutor(len(prompts)) as threads:
            answers = list(threads.map(lambda prompt: complete(client, prompt), prompts))

    # unlike in `canon serve`, a text has no EOS before it
    prompts[-1] = sampler.encode("the river")[1:]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["prompt"] == prompt
        assert largest_error(sampler.model, prompt, answer, num_scores=5) < 1e-4


def test_entry_point_is_the_plugin():
    module, name = entry_points()["canon"].split(":")
    assert callable(getattr(importlib.import_module(module), name))
    # importing it needs no vLLM
    assert "vllm" not in sys.modules
