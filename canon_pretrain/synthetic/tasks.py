"""The tasks by name, and the section `[data.task]`, which has the settings of all tasks."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from types import MappingProxyType
from typing import Any, Literal, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from canon_pretrain.core.errors import UserError, check_choice, suggestion
from canon_pretrain.core.fields import help_of, optional_fields
from canon_pretrain.synthetic.automata import AutomataTask
from canon_pretrain.synthetic.brevo import Brevo1, Brevo2
from canon_pretrain.synthetic.capo import Capo
from canon_pretrain.synthetic.capo_release import ReleasedCapo
from canon_pretrain.synthetic.copying import Copy
from canon_pretrain.synthetic.depo import Depo1, Depo2
from canon_pretrain.synthetic.lano import Lano
from canon_pretrain.synthetic.mano import Mano
from canon_pretrain.synthetic.mqar import Mqar
from canon_pretrain.synthetic.release import (
    ReleasedBrevo1,
    ReleasedBrevo2,
    ReleasedDepo1,
    ReleasedDepo2,
    ReleasedLano,
    ReleasedMano,
)
from canon_pretrain.synthetic.state import State
from canon_pretrain.synthetic.task import Task

TASKS: Mapping[str, type[Task]] = MappingProxyType(
    {
        "automata": AutomataTask,
        "brevo1": Brevo1,
        "brevo2": Brevo2,
        "capo": Capo,
        "copy": Copy,
        "depo1": Depo1,
        "depo2": Depo2,
        "lano": Lano,
        "mano": Mano,
        "mqar": Mqar,
        "state": State,
    }
)
RELEASED: Mapping[str, type[Task]] = MappingProxyType(
    {
        "depo1": ReleasedDepo1,
        "depo2": ReleasedDepo2,
        "brevo1": ReleasedBrevo1,
        "brevo2": ReleasedBrevo2,
        "capo": ReleasedCapo,
        "lano": ReleasedLano,
        "mano": ReleasedMano,
    }
)
"""The tasks with `release = true`."""
_ORDER = (
    "n",
    "k",
    "vocab",
    "name_tokens",
    "n_weight",
    "exact_n",
    "exact_k",
    "last_query",
    "l",
    "modulus",
    "synonyms",
    "exact_l",
    "grammar",
    "root",
    "people",
    "exposures",
    "pairs",
    "queries",
    "slots",
    "power",
    "group",
    "states",
    "symbols",
    "examples",
    "example_tokens",
    "release",
    "release_path",
    "release_tokenizer",
    "loss_on",
)
"""The order of the keys in --help-all and in config.json; other settings follow."""


def _section() -> Any:
    """Return a dataclass of the settings that any task declares, but for training.seq_len."""
    # A class that declares a setting first, or says what it means, comes first.
    tasks = [*TASKS.values(), *RELEASED.values()]
    classes = dict.fromkeys(base for cls in tasks for base in reversed(cls.__mro__))
    types: dict[str, Any] = {}
    help_texts: dict[str, str] = {}
    for cls in filter(is_dataclass, classes):
        hints = get_type_hints(cls)
        types |= {field.name: hints[field.name] for field in dataclasses.fields(cls)}
        # Tasks that share a key each say what it means to them.
        for key, text in help_of(cls).items():
            earlier = help_texts.get(key, "")
            if text not in earlier:
                help_texts[key] = f"{earlier} {text}".strip()
    del types["seq_len"]

    # TOML has lists, and a task refuses other choices than its own itself.
    for key, declared_type in types.items():
        if declared_type == tuple[int, int] | int:
            types[key] = int | list[int]
        elif get_origin(declared_type) is Literal and key not in Task.__annotations__:
            types[key] = str

    keys = sorted(types, key=lambda key: (*_ORDER, key).index(key))
    return optional_fields({key: types[key] for key in keys}, help_texts, frozen=True)


@dataclass(frozen=True)
class TaskName:
    name: str = ""
    """Generate the data: depo1, depo2, brevo1, brevo2, capo, mano, lano, copy, mqar, state or
    automata."""


@dataclass(frozen=True)
class TaskSection(_section(), TaskName):  # type: ignore[misc]  # the class is made by a call
    """The `[data.task]` section: a synthetic task instead of shards. Unset: the task's value."""

    @property
    def settings(self) -> dict[str, Any]:
        values = vars(self) | {"name": None}
        return {key: value for key, value in values.items() if value is not None}


@functools.cache
def _adapter(kind: type[Task]) -> TypeAdapter[Task]:
    """Return the checker of a task's settings, which takes milliseconds to make."""
    return TypeAdapter(kind)


def build_task(name: str, settings: Mapping[str, Any]) -> Task:
    """Build the task `name`; its defaults hold for all other settings. Raises UserError.

    `release = true` chooses the class of the release, which alone has this setting.
    """
    check_choice("data.task.name", name, TASKS)
    chosen = dict(settings)
    is_released = bool(chosen.get("release")) and name in RELEASED
    cls = RELEASED[name] if is_released else TASKS[name]
    if name in RELEASED and not is_released:
        chosen.pop("release", None)

    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    keys = [field.name for field in dataclasses.fields(RELEASED.get(name, cls))]
    for key in chosen:
        if key not in defaults:
            condition = " without release = true" if key in keys else ""
            raise UserError(
                "task.unknown_setting",
                f"task {name} has no setting {key}{condition}; it has {', '.join(keys)}."
                f"{suggestion(key, keys)}",
                task=name,
                key=key,
            )

    try:
        return _adapter(cls).validate_python(defaults | chosen)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise UserError(
            "task.setting",
            f"task {name}: {key} = {problem['input']!r}: {problem['msg']}",
            task=name,
            key=key,
        ) from None
