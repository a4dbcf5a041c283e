"""Each setting of a job is declared once: its default, range, choices and help are one fact."""

import ast
import functools
import re
from dataclasses import fields, is_dataclass
from typing import get_type_hints

from canon_pretrain.model.args import CHOICES, FLAVORS, ModelArgs
from canon_pretrain.run.sections import SETTINGS, TORCHTITAN, Sections
from canon_pretrain.run.setting import settings
from canon_pretrain.synthetic.task import Task
from canon_pretrain.synthetic.tasks import TASKS, TaskSection
from canon_pretrain.titan.job_config import CanonJobConfig
from canon_pretrain.titan.keys import SHORT_HELP
from tests.support import ROOT
from tests.weight import modules

MODEL = {field.name for field in fields(ModelArgs)}
TASK = {field.name for field in fields(TaskSection)} - {"name"}
SECTIONS = {field.name for field in fields(CanonJobConfig)}
KEYS = {name for name, _ in settings(CanonJobConfig)}


@functools.cache
def declarations():
    """Return (module, class, its annotated names) of every class of the product."""
    return [
        (module, node.name, {each.target.id for each in node.body if is_field(each)})
        for module, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]


def is_field(node):
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def config_classes():
    """Return the names of the dataclasses of a job's sections, of ModelArgs and of the tasks."""
    hints = [get_type_hints(cls) for cls in (CanonJobConfig, Sections)]
    classes = {kind for each in hints for kind in each.values() if is_dataclass(kind)}
    classes |= {*TASKS.values(), TaskSection, ModelArgs}
    return {base.__name__ for cls in classes for base in cls.__mro__ if is_dataclass(base)}


def task_classes():
    """Return the names of the tasks' classes, each of which has defaults of its own."""
    return {base.__name__ for cls in TASKS.values() for base in cls.__mro__ if is_dataclass(base)}


def test_a_field_of_a_config_class_is_declared_once():
    homes = {f"{module}.{cls}": names & MODEL for module, cls, names in declarations()}
    config = config_classes()
    homes = {home: names for home, names in homes.items() if home.rpartition(".")[2] in config}
    assert {home: names for home, names in homes.items() if names} == {
        "canon_pretrain.model.args.ModelArgs": MODEL,
    }
    assert not [
        (module, cls)
        for module, cls, names in declarations()
        if cls in config - task_classes() and names & TASK
    ]


def test_no_other_class_repeats_settings_of_a_model_or_a_task():
    repeated = {
        f"{module}.{cls}": names
        for module, cls, names in declarations()
        if max(len(names & MODEL), len(names & TASK)) > 2
        and cls not in {"ModelArgs", *task_classes()}
    }
    assert not repeated


def test_a_section_of_ours_does_not_repeat_one_of_torchtitan():
    """Between run/sections.py and titan/job_config.py; torchtitan's limits are of its own keys."""
    ours = {name for name, _ in settings(Sections)}
    assert not ours & TORCHTITAN.keys() and SETTINGS.keys() <= KEYS
    in_job_config = {
        f"{cls.lower()}.{name}"
        for module, cls, names in declarations()
        if module == "canon_pretrain.titan.job_config"
        for name in names
    }
    assert not in_job_config & ours


def test_keys_of_the_model_and_the_task_are_the_declared_ones():
    model = {name.removeprefix("model.") for name in KEYS if name.startswith("model.")}
    assert MODEL - model == {"max_seq_len"}  # training.seq_len
    declared = set().union(*({field.name for field in fields(cls)} for cls in TASKS.values()))
    assert declared == TASK | {"seq_len"}
    assert {field.name for field in fields(Task)} == {"seq_len", "loss_on"}


def test_the_short_help_names_keys_and_choices_that_exist():
    text = SHORT_HELP.read_text()
    keys = set(re.findall(r"--(\w+\.[\w.]+)", text)) - {"section.key"}
    assert len(keys) > 40 and keys <= KEYS
    for name, choices in CHOICES.items():
        if row := re.search(rf"^  --model\.{name} .*", text, re.MULTILINE):
            words = {word.removeprefix("partial_rope") for word in choices}
            assert words <= {*re.findall(r"\w+", row[0].replace("partial_rope", ""))}, name


def test_the_readme_names_keys_and_defaults_that_exist():
    pages = (ROOT / "canon_pretrain").rglob("README.md")
    text = "\n".join(page.read_text() for page in pages)
    keys = set(re.findall(rf"`((?:{'|'.join(SECTIONS)})\.[a-z_.]+)[` ]", text))
    keys = {key for key in keys if not key.endswith((".json", ".py"))}
    assert len(keys) > 20 and {key for key in keys if f"{key}.name" not in KEYS} <= KEYS

    defaults = [
        *re.findall(r"`([a-z_]+\.[a-z_]+)` \(([\d.]+)", text),  # `checkpoint.max_held` (4)
        *re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \|[^|]*\(([\d.]+)[;)]", text, re.MULTILINE),
    ]
    assert len(defaults) > 4
    for name, default in defaults:
        job = CanonJobConfig()
        section, _, key = name.partition(".")
        value = getattr(job.model_args if section == "model" else getattr(job, section), key)
        assert value == float(default), name

    flavors = re.search(r"^\| `model\.flavor` \| a size: (.*) \|$", text, re.MULTILINE)
    assert flavors and flavors[1].split(", ") == [*FLAVORS]
