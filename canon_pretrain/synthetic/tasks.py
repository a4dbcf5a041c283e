"""The tasks by name, and the section `[data.task]`, which has the settings of all tasks."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from types import MappingProxyType
from typing import Any, Literal, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from canon_pretrain.core.errors import UserError, check_choice, suggestion
from canon_pretrain.core.fields import help_of, optional_fields
from canon_pretrain.synthetic.brevo import Brevo1, Brevo2
from canon_pretrain.synthetic.capo import Capo
from canon_pretrain.synthetic.copying import Copy
from canon_pretrain.synthetic.depo import Depo1, Depo2
from canon_pretrain.synthetic.lano import Lano
from canon_pretrain.synthetic.mano import Mano
from canon_pretrain.synthetic.task import Task

TASKS: Mapping[str, type[Task]] = MappingProxyType(
    {
        "brevo1": Brevo1,
        "brevo2": Brevo2,
        "capo": Capo,
        "copy": Copy,
        "depo1": Depo1,
        "depo2": Depo2,
        "lano": Lano,
        "mano": Mano,
    }
)
_ORDER = (
    *("n", "k", "vocab", "name_tokens", "n_weight", "exact_n", "exact_k", "last_query"),
    *("l", "modulus", "synonyms", "exact_l", "grammar", "root", "people", "exposures", "loss_on"),
)
"""The order of the keys in --help-all and in config.json; other settings follow."""


def _section() -> Any:
    """Return a dataclass of the settings that any task declares, but for training.seq_len."""
    # A class that declares a setting first, or says what it means, comes first.
    classes = dict.fromkeys(base for cls in TASKS.values() for base in reversed(cls.__mro__))
    kinds: dict[str, Any] = {}
    texts: dict[str, str] = {}
    for cls in filter(is_dataclass, classes):
        hints = get_type_hints(cls)
        kinds |= {each.name: hints[each.name] for each in dataclasses.fields(cls)}
        texts |= help_of(cls)
    del kinds["seq_len"]

    # TOML has lists, and a task refuses other choices than its own itself.
    for name, kind in kinds.items():
        if kind == tuple[int, int] | int:
            kinds[name] = int | list[int]
        elif get_origin(kind) is Literal and name not in Task.__annotations__:
            kinds[name] = str
    names = sorted(kinds, key=lambda name: (*_ORDER, name).index(name))
    return optional_fields({name: kinds[name] for name in names}, texts, frozen=True)


@dataclass(frozen=True)
class TaskName:
    name: str = ""
    """Generate the data: depo1, depo2, brevo1, brevo2, capo, mano, lano or copy."""


@dataclass(frozen=True)
class TaskSection(_section(), TaskName):  # type: ignore[misc]  # the class is made by a call
    """The `[data.task]` section: a synthetic task instead of shards. Unset: the task's value."""

    @property
    def given(self) -> dict[str, Any]:
        """The settings that are set."""
        settings = {key: value for key, value in vars(self).items() if key != "name"}
        return {key: value for key, value in settings.items() if value is not None}


def build_task(name: str, settings: Mapping[str, Any]) -> Task:
    """Return the task `name`; settings that are not given have its defaults. Raises UserError."""
    check_choice("data.task.name", name, TASKS)
    default = TASKS[name]()
    known = {field.name: field.type for field in dataclasses.fields(default)}
    for key in settings:
        if key not in known:
            text = f"task {name} has no setting {key}; it has {', '.join(known)}."
            text += suggestion(key, known)
            raise UserError("task.unknown_setting", text, task=name, key=key)
    try:
        return TypeAdapter(type(default)).validate_python(default.settings | dict(settings))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(
            "task.setting",
            f"task {name}: {key} = {first['input']!r}: {first['msg']}",
            task=name,
            key=key,
        ) from None
