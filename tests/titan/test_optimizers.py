"""Groups of parameters: what they match, how they are updated, a run that resumes with others."""

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.config import to_toml
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.sections import Optimizer, ParameterGroup
from canon_pretrain.titan.command_line import parse_job
from canon_pretrain.titan.launch import check_identity, run_identity
from canon_pretrain.titan.optimizers import Optimizers, parameter_groups
from canon_pretrain.titan.spec import build_schedule
from tests.ranks import assert_same_run, events, launch, whole_state
from tests.support import ROOT, debug_run, refused, write_data
from tests.variants import BASE, VARIANTS

DEBUG = ROOT / "train_configs" / "debug.toml"


def config_of(*tables, **values: Any):
    """Return `[optimizer]` with these tables of groups."""
    return Optimizer(**values, groups=[ParameterGroup(**table) for table in tables])


def names_by_title(config, model):
    """Return the names in each group by its title; parts with and without decay together."""
    names = {}
    for group in parameter_groups(config, model):
        names.setdefault(group.title, set()).update(group.parameters)
    return names


def on_meta(args):
    with torch.device("meta"):
        return Transformer(args)


def file_of(tmp_path, **optimizer):
    """Write a config file over debug.toml; return its path."""
    path = tmp_path / "job.toml"
    path.write_text(to_toml({"extends": str(DEBUG), "optimizer": optimizer}))
    return path


def test_the_first_group_that_matches_has_a_parameter():
    model = on_meta(replace(BASE, norm="layernorm", bias=True, canon_set="AB", num_layers=1))
    tables = [{"match": word} for word in ("norm", "embedding", "head", "canon", r"\.w2\.", "bias")]

    names = names_by_title(config_of(*tables), model)

    block = "layers.0."
    norms = [f"{block}attention_norm", f"{block}ffn_norm", "norm"]
    assert names["norm"] == {f"{norm}.{part}" for norm in norms for part in ("weight", "bias")}
    assert names["embedding"] == {"tok_embeddings.weight"}
    assert names["head"] == {"output.weight"}
    assert names["canon"] == {f"{block}canon_a.weight", f"{block}attention.canon_b.weight"}
    # w2's bias belongs to the earlier group
    assert names[r"\.w2\."] == {f"{block}feed_forward.w2.{part}" for part in ("weight", "bias")}
    attention = {f"{block}attention.w{letter}" for letter in "qkvo"}
    others = {f"{block}feed_forward.w1", f"{block}feed_forward.w3"}
    assert names["bias"] == {f"{module}.bias" for module in attention | others}
    assert names[""] == {f"{module}.weight" for module in attention | others}


@pytest.mark.parametrize("name", VARIANTS)
def test_matrices_alone_decay(name):
    """By another rule: what has one dimension in a layer's sense, by the names of its modules."""
    model = on_meta(VARIANTS[name])
    config = config_of(weight_decay=0.1, decay="matrices")
    decays = {}
    for group in parameter_groups(config, model):
        decays |= dict.fromkeys(group.parameters, group.weight_decay)

    for module_name, module in model.named_modules():
        for own_name, parameter in module.named_parameters(module_name, recurse=False):
            if not parameter.requires_grad:
                continue
            is_linear = isinstance(module, torch.nn.Linear | torch.nn.Embedding)
            is_matrix = is_linear and own_name.endswith(".weight") or ".experts." in own_name
            assert decays[own_name] == (0.1 if is_matrix else 0.0), own_name


def test_no_group_is_one_group_of_all():
    model = on_meta(replace(BASE, canon_set="ABCD"))
    (group,) = parameter_groups(config_of(), model)
    assert list(group.parameters) == [name for name, _ in model.named_parameters()]
    assert (group.lr, group.weight_decay, group.betas) == (1e-3, 0.03, (0.9, 0.98))


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_each_group_has_the_update_of_its_own_adamw(implementation):
    """Bitwise, over three steps of a schedule."""
    torch.manual_seed(0)
    model = Transformer(replace(BASE, num_layers=1))
    model.init_weights()
    other = copy.deepcopy(model)
    tables = [{"match": "norm", "lr_scale": 0.5}, {"match": "w[qk]", "weight_decay": 0.2}]
    tables[1]["betas"] = [0.5, 0.6]
    config = config_of(*tables, lr=0.01, weight_decay=0.1, implementation=implementation)
    job = parse_job(["--config", str(DEBUG)])
    optimizers = Optimizers(model, config)
    schedule = build_schedule(optimizers, job.lr_scheduler, job.training.steps)

    # torch's optimizers, by the names of the parameters
    parts = {"norm": [], "w[qk]": [], "": []}
    for name, parameter in other.named_parameters():
        part = next(pattern for pattern in parts if re.search(pattern, name))
        parts[part].append(parameter)
    kinds = {"fused": implementation == "fused", "foreach": implementation == "foreach"}
    references = [
        torch.optim.AdamW(parts["norm"], 0.005, (0.9, 0.98), 1e-6, 0.1, **kinds),
        torch.optim.AdamW(parts["w[qk]"], 0.01, (0.5, 0.6), 1e-6, 0.2, **kinds),
        torch.optim.AdamW(parts[""], 0.01, (0.9, 0.98), 1e-6, 0.1, **kinds),
    ]
    schedules = [
        build_schedule([reference], job.lr_scheduler, job.training.steps)
        for reference in references
    ]

    for _ in range(3):
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            two.grad = one.grad.clone()
        optimizers.step()
        schedule.step()
        for reference, reference_schedule in zip(references, schedules, strict=True):
            reference.step()
            reference_schedule.step()
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two), name


@pytest.mark.parametrize(
    ("tables", "key", "named"),
    [
        ([{"match": "norms"}], "optimizer.groups[0].match", "'norm'"),
        ([{"match": "w_q"}], "optimizer.groups[0].match", "'wq'"),
        ([{"match": "."}, {"match": "norm"}], "optimizer.groups[1].match", "move it up"),
    ],
)
def test_a_group_without_parameters_is_refused(tables, key, named):
    model = on_meta(BASE)
    with refused("optimizer.empty_group", key=key) as caught:
        parameter_groups(config_of(*tables), model)
    assert named in caught.value.message


@pytest.mark.parametrize(
    ("table", "code", "key"),
    [
        ({"match": "("}, "config.invalid_value", "match"),
        ({"lr_scale": 0.5}, "config.invalid_value", "match"),
        ({"match": "norm", "lr_scale": -1.0}, "config.invalid_value", "lr_scale"),
        ({"match": "norm", "betas": [0.9]}, "config.invalid_value", "betas"),
        ({"match": "norm", "betas": [0.9, 1]}, "config.invalid_value", "betas"),
        ({"match": "norm", "lr": 0.5}, "config.unknown_key", "lr"),
        ({"match": "norm", "lr_scale": "1"}, "config.type", "lr_scale"),
    ],
)
def test_a_group_with_bad_values_is_refused(table, code, key, tmp_path):
    with refused(code, key=f"optimizer.groups[0].{key}"):
        parse_job(["--config", str(file_of(tmp_path, groups=[table]))])


def test_the_command_line_changes_a_group_of_the_file(tmp_path):
    path = file_of(tmp_path, groups=[{"match": "norm"}])
    job = parse_job(["--config", str(path), "--optimizer.groups.0.lr_scale", "0.5"])
    assert job.optimizer.groups == [ParameterGroup("norm", lr_scale=0.5)]
    with refused("config.unknown_key"):
        parse_job(["--config", str(path), "--optimizer.groups.0.lr", "0.5"])


def test_changes_of_groups_are_named_key_by_key(tmp_path):
    first = parse_job(["--config", str(file_of(tmp_path, groups=[{"match": "norm"}]))])
    run = RunFolder(tmp_path / "run")
    run.write_config(first.to_dict(), run_identity(first, "shards"))
    tables = [{"match": "norm", "lr_scale": 0.5}, {"match": "head"}]
    now = parse_job(["--config", str(file_of(tmp_path, groups=tables, decay="matrices"))])
    changes = {
        "optimizer.decay": ["all", "matrices"],
        "optimizer.groups[0].lr_scale": [1.0, 0.5],
        "optimizer.groups[1].match": [None, "head"],
        "optimizer.groups[1].lr_scale": [None, 1.0],
    }

    identity = run_identity(now, "shards")
    with refused("run.changed", changes=changes) as caught:
        check_identity(run, identity, [], now.to_dict())
    assert "optimizer.groups[0].lr_scale: 1.0 -> 0.5" in caught.value.message
    assert check_identity(run, identity, list(changes), now.to_dict()) == changes
    parse_job(["--config", str(DEBUG), "--run.allow_changes", *changes])

    # a run from before there were groups
    record = run.read_config()
    del record["identity"]["optimizer.decay"]
    run.write_config(record["config"], record["identity"])
    assert check_identity(run, run_identity(first, "shards"), [], first.to_dict()) == {}


@pytest.mark.system
def test_a_run_resumes_with_its_groups_and_with_others(tmp_path):
    """Bitwise with the same; others take effect, also if they are fewer."""
    data = tmp_path / "data"
    write_data(data)
    tables = [{"match": "norm", "lr_scale": 0.5}, {"match": "w[qk]", "weight_decay": 0.2}]
    path = file_of(tmp_path, groups=tables, decay="matrices")
    straight, run = tmp_path / "straight", tmp_path / "run"

    def start(folder, config, *more):
        command = ["--config", config, *debug_run(data, folder)[2:], *more]
        launch(*command, output=tmp_path / "out")

    start(straight, path, "--checkpoint.interval", 8)
    start(run, path, "--run.stop_at", 6)
    start(run, path, "--run.stop_at", 8)
    assert_same_run(run, straight, step=8)

    # Without groups: the names that may change are those of all keys.
    keys = ("match", "lr_scale", "weight_decay")
    names = [f"optimizer.groups[{number}].{key}" for number in (0, 1) for key in keys]
    start(run, DEBUG, "--run.allow_changes", *names[:2], *names[3:], "optimizer.decay")
    (event,) = events(run, "changed")
    assert event["run"]["optimizer.groups[0].lr_scale"] == [0.5, None]
    state = whole_state(run / "checkpoint" / "step-12")
    values = {name: state[name] for name in state if ".param_groups." in name}
    assert {values[name] for name in values if name.endswith(".initial_lr")} == {3e-3}
    assert {values[name] for name in values if name.endswith(".weight_decay")} == {0.03}
    assert state["lr_scheduler.base_lrs"] == [3e-3]
