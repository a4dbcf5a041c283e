"""Odd values of every key: what 0, -1, inf and nan mean as a number, and nonsense as a text.

Both tables have a row for each key of the config that takes a number or a text: a new key fails
these tests until its row says what such values mean.
"""

import math
import typing
from typing import Any

import pytest

from canon_pretrain.core.errors import UserError
from canon_pretrain.run.config import to_toml
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.dry_run import make_plans
from canon_pretrain.titan.job_config import UNSUPPORTED, CanonJobConfig, value_of
from tests.job_keys import keys_of
from tests.support import ROOT, refused

DEBUG = ROOT / "train_configs" / "debug.toml"
KEYS = dict(keys_of(CanonJobConfig))


def kinds_of(key):
    """Return the types that the value of a key, or of an item of its list, may have."""
    kinds = {KEYS[key]}
    for _ in range(2):  # of an optional list, then of its items
        kinds |= {part for kind in kinds for part in typing.get_args(kind)}
    return kinds


def job_with(tmp_path, values):
    """Return the checked job of a TOML file with these dotted keys over debug.toml."""
    sections: dict[str, Any] = {"extends": str(DEBUG)}
    for key, value in values.items():
        *outer, name = key.split(".")
        table = sections
        for section in outer:
            table = table.setdefault(section, {})
        table[name] = value
    path = tmp_path / "job.toml"
    path.write_text(to_toml(sections))
    return parse_job(["--config", str(path)])


def is_code(meaning):
    """Return whether a row's entry is the code of a refusal, and not a meaning in words."""
    return "." in meaning and " " not in meaning


# -- numbers

RANGE = "config.invalid_value"
MODEL = "model.out_of_range"
TASK = "task.setting"
MOE = {"model.ffn": "moe", "model.canon_set": "ABC"}
GLA = {"model.mixer": "gla", "model.position": "nope"}
MAMBA2 = {"model.mixer": "mamba2", "model.position": "nope", "model.canon_set": "AB"}
ROTARY = {"model.position": "partial_rope_c"}
H_ALIBI = {"model.position": "h_alibi"}
RELATIVE = {"model.position": "relative"}


def task(name):
    return {"data.task.name": name, "training.seq_len": 512}


NUMBERS = {
    # key: what 0 means, what -1 means: a meaning, or the code of the refusal; what it needs
    "training.local_batch_size": (RANGE, RANGE),
    "training.global_batch_size": (RANGE, RANGE),
    "training.seq_len": (MODEL, MODEL),
    "training.max_norm": ("off: no clipping, as in nanoGPT and transformers", RANGE),
    "training.steps": (RANGE, RANGE),
    "training.gc_freq": (RANGE, RANGE),
    "optimizer.lr": ("a rate of 0, as in transformers: no weight changes", RANGE),
    "optimizer.beta1": ("off: no momentum", RANGE),
    "optimizer.beta2": ("off: this step's gradient alone scales the update", RANGE),
    "optimizer.eps": (RANGE, RANGE),
    "optimizer.weight_decay": ("off", RANGE),
    "optimizer.muon_lr": ("a rate of 0", RANGE),
    "optimizer.muon_momentum": ("off: no momentum", RANGE),
    "optimizer.muon_ns_steps": (RANGE, RANGE),
    "lr_scheduler.warmup_steps": ("off: no warm-up", RANGE),
    "lr_scheduler.total_steps": ("config.schedule", "config.schedule"),
    "lr_scheduler.decay_ratio": (RANGE, RANGE),
    "lr_scheduler.decay_steps": (RANGE, RANGE),
    "lr_scheduler.min_lr_factor": ("decay to a rate of 0", RANGE),
    "loss.z_loss": ("off", RANGE),
    "loss.squared_loss": ("off", RANGE),
    "loss.chunk_tokens": ("off: one chunk for a micro-batch", RANGE),
    "guards.max_bad_steps": (RANGE, RANGE),
    "guards.outlier_sigma": (RANGE, RANGE),
    "guards.outlier_window": (RANGE, RANGE),
    "data.weights": ("data.weights", "data.weights", {"data.paths": ["a", "b"]}),
    "data.data_seed": ("a seed", RANGE),
    "data.read_ahead": ("off: read when needed", RANGE),
    "data.task.n": (TASK, TASK, task("copy")),
    "data.task.k": (TASK, TASK, task("depo1")),
    "data.task.vocab": (TASK, TASK, task("depo1")),
    "data.task.name_tokens": (TASK, TASK, task("depo1")),
    "data.task.l": (TASK, TASK, task("mano")),
    "data.task.modulus": (TASK, TASK, task("mano")),
    "data.task.root": ("the grammar's own", TASK, task("lano")),
    "data.task.people": (TASK, TASK, task("capo")),
    "data.task.exposures": (TASK, TASK, task("capo")),
    "data.task.pairs": (TASK, TASK, task("mqar")),
    "data.task.queries": (TASK, TASK, task("mqar")),
    "data.task.slots": (TASK, TASK, task("mqar")),
    "data.task.power": (TASK, TASK, task("mqar")),
    "data.task.states": (TASK, TASK, task("automata")),
    "data.task.symbols": (TASK, TASK, task("automata")),
    "data.task.examples": (TASK, TASK, task("automata")),
    "data.task.example_tokens": (TASK, TASK, task("automata")),
    "model.vocab_size": (MODEL, MODEL),
    "model.num_layers": (MODEL, MODEL),
    "model.dim": (MODEL, MODEL),
    "model.num_heads": (MODEL, MODEL),
    "model.num_kv_heads": ("off: as many as num_heads", MODEL),
    "model.expand_k": (MODEL, MODEL, GLA),
    "model.expand_v": (MODEL, MODEL, GLA),
    "model.output_gate_rank": ("off: a full matrix", MODEL, GLA),
    "model.o_norm_eps": ("off: norm_eps", MODEL, GLA),
    "model.state_dim": (MODEL, MODEL, MAMBA2),
    "model.ffn_dim": (MODEL, MODEL),
    "model.num_experts": (MODEL, MODEL, MOE),
    "model.experts_per_token": (MODEL, MODEL, MOE),
    "model.num_shared_experts": ("off: no shared expert", MODEL, MOE),
    "model.moe_capacity": ("off: no token is dropped", MODEL, MOE),
    "model.moe_balance_rate": ("off: the load is not evened", MODEL, MOE),
    "model.norm_eps": (MODEL, MODEL),
    "model.h_alibi_heads": ("half of the heads", MODEL, H_ALIBI),
    "model.relative_dim": (MODEL, MODEL, RELATIVE),
    "model.relative_extent": ("the window, or 1024 without one", MODEL, RELATIVE),
    "model.partial_rope_dim": ("a quarter of each head", MODEL, ROTARY),
    "model.rope_theta": (MODEL, MODEL),
    "model.window": ("off: all tokens", MODEL),
    "model.mimetic_rate": (MODEL, MODEL, MAMBA2),
    "model.canon_kernel": (MODEL, MODEL),
    "model.eos_id": ("a token", MODEL),
    "model.init_seed": ("a seed", MODEL),
    "checkpoint.interval": (RANGE, RANGE),
    "checkpoint.keep_latest_k": ("off: keep all, as in torchtitan", RANGE),
    "checkpoint.load_step": ("step 0", "the newest, as in torchtitan"),
    "checkpoint.max_held": ("off: hold none", RANGE),
    "validation.freq": (RANGE, RANGE),
    "validation.windows": (RANGE, "all, as in torchtitan"),
    "validation.last_windows": (RANGE, RANGE),
    "samples.interval": ("off", RANGE),
    "samples.max_tokens": (RANGE, RANGE),
    "samples.temperature": ("off: the most likely token", RANGE),
    "metrics.log_freq": (RANGE, RANGE),
    "run.stop_at": ("config.conflict", "config.conflict"),
    "run.heartbeat_s": (RANGE, RANGE),
    "activation_checkpoint.memory_budget": ("recompute all, as in PyTorch", RANGE),
    "parallelism.data_parallel_replicate_degree": (RANGE, RANGE),
    "parallelism.expert_parallel_degree": (RANGE, RANGE),
    "profiling.profile_freq": (RANGE, RANGE),
    "profiling.profiler_active": (RANGE, RANGE),
    "profiling.profiler_warmup": ("off: no warm-up", RANGE),
    "comm.init_timeout_seconds": (RANGE, RANGE),
    "comm.train_timeout_seconds": (RANGE, RANGE),
    "comm.trace_buf_size": ("off: no flight recorder", RANGE),
}


def test_every_number_has_its_row():
    assert {key for key in KEYS if kinds_of(key) & {int, float}} == NUMBERS.keys()


@pytest.mark.parametrize("key", NUMBERS)
def test_what_an_odd_number_means(key, tmp_path):
    zero, minus_one, *needs = NUMBERS[key]
    needed = needs[0] if needs else {}
    is_float = float in kinds_of(key)
    not_finite = code_of_not_finite(key) if is_float else "config.type"
    meanings = {0: zero, -1: minus_one, math.inf: not_finite, math.nan: not_finite}

    for number, meaning in meanings.items():
        value: Any = float(number) if is_float else number
        if key == "data.weights":
            value = [value, 1.0]
        values = {**needed, key: value}
        if is_code(meaning):
            with refused(meaning):
                job_with(tmp_path, values)
        else:
            assert value_of(job_with(tmp_path, values), key) == number


def code_of_not_finite(key):
    """Return the code that refuses inf and nan as the value of a key with a float."""
    if key.startswith("model."):
        return MODEL
    return {"data.weights": "data.weights", "data.task.power": TASK}.get(key, RANGE)


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan"])
def test_an_option_has_the_value_that_the_file_has(text, monkeypatch):
    """Before the checks, which are the same: by one parser for all keys, as each takes 0.3 s."""
    is_finite = text in ("0", "-1")
    keys = [key for key in NUMBERS if is_finite or float in kinds_of(key)]
    monkeypatch.setattr("canon_pretrain.titan.command_line.check_job", lambda job: None)
    job = parse_job(["--config", str(DEBUG), *(f"--{key}={text}" for key in keys)])
    for key in keys:
        value = value_of(job, key)
        number = value[0] if isinstance(value, list) else value
        assert repr(number) in (text, f"{text}.0"), key


@pytest.mark.parametrize("key", ["training.steps", "model.dim", "data.task.name_tokens"])
@pytest.mark.parametrize("text", ["inf", "nan"])
def test_an_option_of_whole_numbers_takes_no_other(key, text):
    """Those keys have the three types: an integer, an optional one, one or several."""
    with refused("config.invalid_value"):
        parse_job(["--config", str(DEBUG), f"--{key}={text}"])


# -- texts

NONSENSE = "non sense \u2605"
CHOICE = "config.unknown_choice"
CONFLICT = "config.conflict"
NAME = "any name"
LATER = "a path, which may be written after the dry run"
OUTPUT = "a path to write to"
TEXTS = {
    # key: why any text is valid, or the code of the refusal; what it needs
    "job.dump_folder": OUTPUT,
    "job.description": "a title",
    "job.save_config_file": OUTPUT,
    "profiling.save_traces_folder": OUTPUT,
    "profiling.save_memory_snapshot_folder": OUTPUT,
    "metrics.save_tb_folder": OUTPUT,
    "metrics.wandb_project": NAME,
    "metrics.wandb_entity": NAME,
    "metrics.wandb_name": NAME,
    "metrics.wandb_tags": NAME,
    "model.flavor": "model.unknown_flavor",
    "model.mixer": CHOICE,
    "model.ffn": CHOICE,
    "model.norm": CHOICE,
    "model.norm_place": CHOICE,
    "model.position": CHOICE,
    "model.gla_feature_map": CHOICE,
    "model.ffn_activation": CHOICE,
    "model.init": CHOICE,
    "model.moe_balance": CHOICE,
    "model.canon_filter": CHOICE,
    "model.canon_scale": CHOICE,
    "model.pattern": "config.type",
    "model.layers": "config.type",
    "model.qk_norm": CHOICE,
    "model.attention_gate": CHOICE,
    "model.canon_backend": CHOICE,
    "model.mixer_backend": CHOICE,
    "model.attention_backend": CHOICE,
    "model.canon_set": "model.canon_set",
    "optimizer.name": CHOICE,
    "checkpoint.folder": OUTPUT,
    "checkpoint.initial_load_path": LATER,
    "activation_checkpoint.selective_ac_option": CONFLICT,
    "activation_checkpoint.determinism_check": RANGE,
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": "names of modules, of "
    "which torchtitan skips those that a model does not have: its default is of another model",
    "compile.components": RANGE,
    "compile.backend": CHOICE,
    "comm.save_traces_folder": OUTPUT,
    "comm.save_traces_file_prefix": OUTPUT,
    "validation.path": LATER,
    "data.path": LATER,
    "data.paths": LATER,
    "data.exclude": LATER,
    "data.task.name": CHOICE,
    "data.task.n_weight": TASK,
    "data.task.grammar": TASK,
    "data.task.group": TASK,
    "data.task.release_path": "task.unknown_setting",
    "data.task.release_tokenizer": "task.unknown_setting",
    "run.allow_changes": "run.unknown_change",
    "samples.prompts": "a text to continue",
}
TASK_OF = {
    "data.task.n_weight": "depo1",
    "data.task.grammar": "lano",
    "data.task.group": "state",
    "data.task.release_path": "capo",
    "data.task.release_tokenizer": "capo",
}


def test_every_text_has_its_row():
    texts = {key for key in KEYS if str in kinds_of(key)}
    assert texts == TEXTS.keys()
    assert not texts & {*UNSUPPORTED}


@pytest.mark.parametrize("key", [key for key in TEXTS if is_code(TEXTS[key])])
def test_a_text_without_meaning_is_refused_before_the_run(key, tmp_path):
    needed = task(TASK_OF[key]) if key in TASK_OF else {}
    with refused(TEXTS[key]):
        job_with(tmp_path, needed | {key: as_typed(key, NONSENSE)})


def as_typed(key, text):
    return [text] if typing.get_origin(KEYS[key]) is list else text


def test_any_other_text_is_planned(tmp_path):
    """All of them at once, but for data.paths, which excludes data.path."""
    free = [key for key in TEXTS if not is_code(TEXTS[key]) and key != "data.paths"]
    values = {key: as_typed(key, NONSENSE) for key in free}
    assert values
    job = job_with(tmp_path, values)
    for key, value in values.items():
        assert value_of(job, key) == value
    assert make_plans(job, None, None, None, ranks=1)


PATH_KEYS = [key for key, meaning in TEXTS.items() if meaning in (LATER, OUTPUT)]


@pytest.mark.parametrize("key", PATH_KEYS)
def test_what_is_no_path_is_refused(key, tmp_path):
    """A NUL byte, and a home folder, which the trainer would create under the name ~."""
    for text in ("a\0b", "~/runs"):
        needed = {"data.weights": [1.0]} if key == "data.paths" else {}
        with refused(CONFLICT, key=key):
            job_with(tmp_path, needed | {key: as_typed(key, text)})


def test_folders_of_a_run_are_not_the_run_folder_itself(tmp_path):
    """An earlier launch's traces are moved away: with the run's own files, if it were."""
    outputs = [key for key, meaning in TEXTS.items() if meaning == OUTPUT]
    folders_of_run = [key for key in outputs if key.endswith("folder") and key != "job.dump_folder"]
    for key in folders_of_run:
        for text in ("", ".", "./"):
            with refused(CONFLICT, key=key):
                job_with(tmp_path, {key: text})

    for key in ("job.dump_folder", "job.save_config_file"):
        with refused(CONFLICT, key=key):
            job_with(tmp_path, {key: ""})


IGNORED = {
    "debug.seed": 7,
    "fault_tolerance.replica_id": 1,
    "parallelism.pipeline_parallel_schedule": NONSENSE,
    "parallelism.context_parallel_load_balancer": NONSENSE,
}


@pytest.mark.parametrize("key", IGNORED)
def test_what_torchtitan_would_ignore_is_refused(key, tmp_path):
    with pytest.raises(UserError) as caught:
        job_with(tmp_path, {key: IGNORED[key]})
    assert caught.value.code == "config.unsupported"
    assert caught.value.fields["key"] in (key, key.partition(".")[0])


def test_a_memory_budget_needs_the_compiler(tmp_path):
    mode = "activation_checkpoint.mode"
    budget = {mode: "memory_budget"}
    with refused(CONFLICT, key=mode):
        job_with(tmp_path, budget | {"compile.enable": False})
    with refused(CONFLICT, key=mode):
        job_with(tmp_path, budget | {"compile.enable": True, "compile.components": ["loss"]})
    job_with(tmp_path, budget | {"compile.enable": True, "compile.backend": "aot_eager"})
