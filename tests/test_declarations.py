"""Each setting of a job is declared once: its default, range, choices and help are one fact."""

import ast
import functools
import itertools
import re
from dataclasses import fields, is_dataclass
from typing import get_type_hints

from canon_pretrain.model.args import CHOICES, FLAVORS, ModelArgs
from canon_pretrain.run.sections import SETTINGS, TORCHTITAN, Sections
from canon_pretrain.run.setting import settings
from canon_pretrain.synthetic.task import Task
from canon_pretrain.synthetic.tasks import RELEASED, TASKS, TaskSection
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
    classes = []
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names = {statement.target.id for statement in filter(is_field, node.body)}
                classes.append((module, node.name, names))
    return classes


def is_field(node):
    """Return whether a statement of a class body declares a field."""
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def dataclass_names(classes):
    """Return the names of the dataclasses among some classes and their bases."""
    bases = itertools.chain.from_iterable(cls.__mro__ for cls in classes)
    return {base.__name__ for base in bases if is_dataclass(base)}


def config_classes():
    """Return the names of the dataclasses of a job's sections, of ModelArgs and of the tasks."""
    hints = [*get_type_hints(CanonJobConfig).values(), *get_type_hints(Sections).values()]
    sections = filter(is_dataclass, hints)
    tasks = [*TASKS.values(), *RELEASED.values()]
    return dataclass_names([*sections, *tasks, TaskSection, ModelArgs])


def task_classes():
    """Return the names of the tasks' classes, each of which has defaults of its own."""
    return dataclass_names([*TASKS.values(), *RELEASED.values()])


def test_a_field_of_a_config_class_is_declared_once():
    configs = config_classes()

    model_homes = {
        f"{module}.{cls}": names & MODEL
        for module, cls, names in declarations()
        if cls in configs and names & MODEL
    }
    assert model_homes == {"canon_pretrain.model.args.ModelArgs": MODEL}

    task_homes = [
        (module, cls)
        for module, cls, names in declarations()
        if cls in configs - task_classes() and names & TASK
    ]
    assert not task_homes


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
    assert not ours & TORCHTITAN.keys()
    assert SETTINGS.keys() <= KEYS

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

    tasks = [*TASKS.values(), *RELEASED.values()]
    task_fields = itertools.chain.from_iterable(map(fields, tasks))
    assert {field.name for field in task_fields} == TASK | {"seq_len"}
    assert {field.name for field in fields(Task)} == {"seq_len", "loss_on"}


def test_the_short_help_names_keys_and_choices_that_exist():
    text = SHORT_HELP.read_text()
    keys = set(re.findall(r"--(\w+\.[\w.]+)", text)) - {"section.key"}
    assert len(keys) > 40
    assert keys <= KEYS

    for name, choices in CHOICES.items():
        row = re.search(rf"^  --model\.{name} .*", text, re.MULTILINE)
        if row is not None:
            short_choices = {choice.removeprefix("partial_rope") for choice in choices}
            assert short_choices <= {*re.findall(r"\w+", row[0].replace("partial_rope", ""))}, name


def test_the_readme_names_keys_and_defaults_that_exist():
    pages = (ROOT / "canon_pretrain").rglob("README.md")
    text = "\n".join(page.read_text() for page in pages)
    keys = set(re.findall(rf"`((?:{'|'.join(SECTIONS)})\.[a-z_.]+)[` ]", text))
    keys = {key for key in keys if not key.endswith((".json", ".py"))}
    sections = {key for key in keys if f"{key}.name" in KEYS}
    assert len(keys) > 20
    assert keys - sections <= KEYS

    defaults = [
        *re.findall(r"`([a-z_]+\.[a-z_]+)` \(([\d.]+)", text),  # `checkpoint.max_held` (4)
        *re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \|[^|]*\(([\d.]+)[;)]", text, re.MULTILINE),
    ]
    assert len(defaults) > 4
    job = CanonJobConfig()
    for name, default in defaults:
        section, _, key = name.partition(".")
        values = job.model_args if section == "model" else getattr(job, section)
        assert getattr(values, key) == float(default), name

    flavors = re.search(r"^\| `model\.flavor` \| a size: (.*?); or l-h: .* \|$", text, re.MULTILINE)
    assert flavors and flavors[1].split(", ") == [*FLAVORS]
