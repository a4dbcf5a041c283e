"""The tasks by name."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from canon_pretrain.core.errors import UserError, check_choice, suggestion
from canon_pretrain.synthetic.brevo import Brevo1, Brevo2
from canon_pretrain.synthetic.capo import Capo
from canon_pretrain.synthetic.copying import Copy
from canon_pretrain.synthetic.depo import Depo1, Depo2
from canon_pretrain.synthetic.lano import Lano
from canon_pretrain.synthetic.mano import Mano
from canon_pretrain.synthetic.task import Task

TASKS: Mapping[str, Callable[..., Task]] = MappingProxyType(
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
