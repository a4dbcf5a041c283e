"""What a plan says of its runs, and whether the run in a folder is the planned one. No torch.

A launch writes RUN/planned.json: the plan's config, options and claims at that time. It is not
written again once the run has started, so claims that a plan promised before its runs are known
even if the plan is lost. What was trained is in the run's config.json, whose identity is compared
with the planned one as the trainer does on resume.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

from canon_pretrain.core.errors import UserError, check_choice
from canon_pretrain.core.files import find_record, write_json
from canon_pretrain.core.lock import live_holder
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.model.args import ModelArgs, fill_model, flavor, to_json
from canon_pretrain.run.config import (
    build,
    build_tables,
    check_section,
    check_type,
    merge,
    read_experiment,
)
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.identity import GROUPS, IDENTITY, differences, group_identity
from canon_pretrain.run.limits import check_groups, check_limits, schedule_faults
from canon_pretrain.run.sections import (
    OPTIMIZERS,
    Data,
    ParameterGroup,
    Sections,
    Training,
    optimizer_name,
)
from canon_pretrain.run.setting import option_key
from canon_pretrain.synthetic.tasks import TaskSection, build_task

SHOWN = 4  # differences in a sentence
OLDER_DEFAULTS = ("exact", "valid")
"""Scores that earlier versions took if a board set none, and did not name in its promises."""
JSON_TYPES: dict[str, Any] = {"pattern": list[str], "layers": dict[str, dict[str, Any]]}
"""Types of the fields of ModelArgs that TOML has no type for."""
Values = dict[str, dict[str, Any]]
"""A job's values by section and key, as in TOML"""


# -- the values of a planned run


def planned_values(config: Path, options: Sequence[str] = ()) -> Values:
    """Return the values of a config with --section.key options. Raises UserError."""
    values = read_experiment(config)
    for section, keys in values.items():
        check_section(keys, str(config), section)
    for key, value in _parse(options):
        values = merge(values, nested(key, value))
    return values


def nested(dotted: str, value: Any) -> dict[str, Any]:
    """Return {"a": {"b": value}} for "a.b"."""
    outer, dot, inner = dotted.partition(".")
    return {outer: nested(inner, value) if dot else value}


def _parse(options: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each option, as the trainer's parser reads them."""
    # --KEY VALUE ... or --KEY=VALUE; a word before the first option is ignored
    keys: list[str] = []
    key_texts: list[list[str]] = []
    for word in options:
        if word.startswith("--"):
            _, equals, text = word.partition("=")
            keys.append(option_key(word))
            key_texts.append([text] if equals else [])
        elif keys:
            key_texts[-1].append(word)

    for key, texts in zip(keys, key_texts, strict=True):
        section, _, name = key.rpartition(".")
        if not texts:  # a switch: --KEY or --SECTION.no_KEY
            switch = name.removeprefix("no_")
            yield f"{section}.{switch}", switch == name
            continue
        is_text = str in _types(section, name)
        values = [_literal(text, is_text=is_text) for text in texts]
        is_list = len(values) > 1 or key in LISTS
        yield key, values if is_list else values[0]


LISTS = ("data.paths", "data.weights")


def _types(section: str, name: str) -> set[Any]:
    """Return the type of a key of these sections, and the types in it; {None} for other keys."""
    cls = {"model": ModelArgs, "data": Data, "data.task": TaskSection}.get(section)
    hint = None
    if cls is not None:
        hint = get_type_hints(cls).get(name)
    types = {hint}
    for argument in get_args(hint):
        types |= {argument, *get_args(argument)}
    return types


def _literal(text: str, *, is_text: bool) -> Any:
    """Return an argument of the command line as the value that TOML would have."""
    if text == "None":
        return None
    if is_text:
        return text
    if text in ("true", "True", "false", "False"):
        return text.lower() == "true"
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text


def check_values(values: Values) -> None:
    """Raise UserError for values that the trainer would refuse, as far as torch is not needed."""
    dotted: dict[str, Any] = {}
    for section, keys in values.items():
        for key, value in keys.items():
            dotted[f"{section}.{key}"] = value
    # the default, -1, does not train: a config must set it
    dotted.setdefault("training.global_batch_size", Training.global_batch_size)
    check_limits(dotted)

    name = optimizer_name(_section("optimizer", values)["name"])
    check_choice("optimizer.name", name, OPTIMIZERS)
    check_groups(_groups(values))
    planned_identity(values)
    schedule = SimpleNamespace(**_section("lr_scheduler", values))
    for fault in schedule_faults(schedule, _section("training", values)["steps"]):
        raise UserError("config.schedule", fault)


def num_steps(values: Values) -> int:
    """Return training.steps of values that were checked."""
    return int(_section("training", values)["steps"])


def validation_freq(values: Values) -> int:
    """Return validation.freq of values that were checked: steps between validations."""
    return int(_section("validation", values)["freq"])


def _section(name: str, values: Values) -> dict[str, Any]:
    """Return a section's values, with the trainer's defaults for the others."""
    defaults = asdict(getattr(Sections(), name))
    return defaults | values.get(name, {})


def _groups(values: Values) -> list[ParameterGroup]:
    """Return the optimizer's groups of parameters."""
    tables = _section("optimizer", values)["groups"]
    return build_tables(ParameterGroup, tables, "the plan", GROUPS)


def planned_identity(values: Values) -> dict[str, Any]:
    """Return the identity of a run that trains `values`, without the fields that need its data.

    These are the fingerprints, and the size of the vocabulary if it is not set. Raises UserError.
    """
    # The architecture.
    seq_len = _section("training", values)["seq_len"]
    model = to_json(_model_args(values, seq_len))
    if values.get("model", {}).get("vocab_size") is None:
        del model["vocab_size"]
    identity = {f"model.{key}": value for key, value in model.items()}

    # The settings that are declared as part of the identity.
    data = build(Data, values.get("data", {}), "the plan", "data.")
    for name in IDENTITY:
        section, _, key = name.partition(".")
        settings = asdict(data)
        if section != "data":
            settings = _section(section, values)
        identity[name] = settings[key]
    identity["optimizer.name"] = optimizer_name(identity["optimizer.name"])
    identity |= group_identity(_groups(values))

    # The task, with the defaults that it fills in.
    if data.task.name:
        settings = data.task.settings | {"seq_len": seq_len}
        task = build_task(data.task.name, settings)
        identity["data.task.name"] = task.name
        for key, value in task.settings.items():
            if key != "seq_len":  # as training.seq_len
                identity[f"data.task.{key}"] = value
    return dict(json.loads(json.dumps(identity)))  # lists for tuples, as in config.json


def _model_args(values: Values, seq_len: int) -> ModelArgs:
    """Return the architecture of a plan: its flavor with the values of `[model]`."""
    section = {}
    for key, value in values.get("model", {}).items():
        if value is not None:  # an option may unset a key
            section[key] = value

    base = flavor(str(section.get("flavor", "debug")))
    changes = {}  # without keys that are no fields, such as `flavor`
    for key, hint in (get_type_hints(ModelArgs) | JSON_TYPES).items():
        if key in section:
            check_type(section[key], hint, "the plan", f"model.{key}")
            changes[key] = section[key]
    return fill_model(base, changes | {"max_seq_len": seq_len})


def planned_model(values: Values) -> ModelArgs:
    """Return the model of a plan, with the vocabulary of its task if the plan sets none."""
    training = _section("training", values)
    args = _model_args(values, training["seq_len"])
    data = build(Data, values.get("data", {}), "the plan", "data.")
    if data.task.name and values.get("model", {}).get("vocab_size") is None:
        settings = data.task.settings | {"seq_len": training["seq_len"]}
        args = replace(args, vocab_size=build_task(data.task.name, settings).vocab_size)
    return args


def data_fingerprint(values: Values) -> str | None:
    """Return the fingerprint of the shards that the plan names; None if they are not here."""
    data = build(Data, values.get("data", {}), "the plan", "data.")
    with suppress(UserError, OSError):
        if data.folders:
            with Mixture.open(data.folders, data.shares) as mixture:
                return mixture.fingerprint
    return None


# -- the run in a folder


@dataclass(frozen=True)
class Promises:
    """What a board says before its runs about the scores of a task: its first score and the claims.

    `score`: "" of text without a score, and of plans of earlier versions that set none. `diverged`:
    what a diverged run counts (boards/board.py).
    """

    score: str = ""
    claims: list[dict[str, Any]] = field(default_factory=list)
    diverged: str = "worst"

    def same(self, other: "Promises") -> bool:
        """Return whether both promise the same, in any order.

        `self` may be of an earlier version, which did not name the default score.
        """
        claims = sorted(map(repr, self.claims))
        other_claims = sorted(map(repr, other.claims))
        is_older_default = not self.score and other.score in OLDER_DEFAULTS
        has_same_score = self.score == other.score or is_older_default
        is_same_rule = self.diverged == other.diverged
        return has_same_score and claims == other_claims and is_same_rule


@dataclass(frozen=True)
class PlannedLaunch:
    """The content of RUN/planned.json: the plan under which the run in RUN has started."""

    name: str
    config: str
    """Hash of the config's values, as in sweep.json."""
    options: list[str]
    """--section.key value ..., without the run's folder."""
    promises: Promises = Promises()


def has_started(folder: Path) -> bool:
    """Return whether a run has begun to train in `folder`, or is about to."""
    run = RunFolder(folder)
    with suppress(OSError):
        if run.config_file.is_file() or run.log_file.is_file():
            return True
        return live_holder(run.lock_file) is not None
    return True  # unknown


def read_planned(folder: Path) -> PlannedLaunch | None:
    """Return under which plan the run in `folder` has started; None if that is not known."""
    return find_record(RunFolder(folder).planned_file, PlannedLaunch)


def record_launch(folder: Path, launch: PlannedLaunch) -> None:
    """Write RUN/planned.json unless the run has started before. Raises OSError."""
    if not has_started(folder) and read_planned(folder) != launch:
        # a job refuses a run that others may write (run/source.py)
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_json(RunFolder(folder).planned_file, asdict(launch))


def other_plan(
    folder: Path, launch: PlannedLaunch, identity: Mapping[str, Any] | None
) -> str | None:
    """Say how the run in `folder` differs from the planned one; None if it does not.

    `identity`: the planned one, None if it is not known. A run that has not started, or whose
    files are damaged, does not differ.
    """
    run = RunFolder(folder)
    if not run.config_file.is_file():
        return None

    # What was trained counts; with the same identity, the plan under which it started.
    faults = []
    if identity is not None:
        faults = _identity_faults(run, identity)
    planned = read_planned(folder)
    if planned is not None and not faults:
        if planned.name != launch.name:
            faults.append(f"it is a copy of {planned.name}")
        if planned.config != launch.config:
            faults.append("its config had other values")
        if planned.options != launch.options:
            faults.append(
                f"its options were {joined(planned.options)}, planned {joined(launch.options)}"
            )
    if not faults:
        return None

    text = "; ".join(faults[:SHOWN])
    if len(faults) > SHOWN:
        text = f"{text}; and {len(faults) - SHOWN} more"
    return f"{folder} holds a run of another plan: {text}. Move it away, or choose another folder"


def joined(options: Sequence[str]) -> str:
    """Return options as a command line has them, for a message."""
    return " ".join(options) or "none"


def _identity_faults(run: RunFolder, identity: Mapping[str, Any]) -> list[str]:
    """Say in which fields of both identities a run differs from the planned one."""
    try:
        trained = run.read_config().get("identity")
    except UserError:
        return []
    if not isinstance(trained, dict):
        return []
    # versions add fields to the identity: compare those that both have
    return [
        f"{name} = {old!r}, planned {new!r}"
        for name, (old, new) in differences(trained, identity).items()
        if name in trained and name in identity
    ]
