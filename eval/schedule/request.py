"""What was asked for of a run: which suites of which steps, and how; read by every `eval submit`.

    RUN/evals/schedule.json    made by the first one

schedule.py says how far that is. No torch here.
"""

import argparse
import dataclasses
import json
import os
import uuid
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from canon_pretrain.checkpoint.folder import EVALS
from canon_pretrain.errors import UserError
from canon_pretrain.files import UnreadableFile, fsync_folder, parsing, read_json
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.lock_files import link, remove
from eval.report.runs import SUITES
from eval.run_command import add_how
from eval.schedule.leases import suite_name

ALL = "all"
SCHEDULE = "schedule.json"
RETRIES = 2


@dataclass(frozen=True)
class Request:
    """The content of schedule.json. `every`: steps; None: each checkpoint on the run's schedule.

    `how` are `eval run`'s options, `sbatch` flags for each job; `retries` of a job that failed.
    """

    suites: list[str]
    every: int | None = None
    how: list[str] = dataclasses.field(default_factory=list)
    sbatch: list[str] = dataclasses.field(default_factory=list)
    retries: int = RETRIES


def _parse_how(how: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_how(parser)
    return parser.parse_args(list(how))


def answers(asked: dict[str, Any], how: Sequence[str]) -> bool:
    """Whether results that were asked like this have the options of `how`."""
    wanted = _parse_how(how)
    return (
        asked.get("add_bos", False) == wanted.add_bos
        and asked.get("options", {}) == dict(wanted.option)
        and wanted.max_length in (None, asked.get("max_length"))
        and wanted.dtype in ("auto", asked.get("dtype"))
    )


def words_for(how: Sequence[str], suite: str) -> list[str]:
    """`eval run`'s options for one suite: junk is for the birth-year probes alone."""
    given = vars(_parse_how(how))
    if suite_name(suite) != "birth-year" and "-hop-" not in suite:
        given["junk"] = None
    return to_words(given)


def to_words(given: dict[str, Any]) -> list[str]:
    """Options of `add_how` as words of a command line, paths absolute; defaults are left out."""
    plain = vars(_parse_how([]))
    words: list[str] = []
    for name in plain:
        value = given[name]
        if value == plain[name]:
            continue
        if value is True:
            words.append(f"--{name}")
        elif isinstance(value, list):
            words += [word for key, text in value for word in (f"--{name}", f"{key}={text}")]
        else:
            words.append(f"--{name}")
            words.append(os.path.abspath(value) if isinstance(value, Path) else str(value))
    return words


def split_suites(given: str, known: Collection[str] = ()) -> list[str]:
    """The suites of `--suites a,b`, of `all` the paper's. Raises UserError for an unknown one.

    `known` were found good before.
    """
    names: list[str] = []
    for name in filter(None, given.split(",")):
        path = os.path.abspath(name) if name.endswith((".yaml", ".yml")) else name
        if name != ALL and path not in (*SUITES, *known):
            from eval.suites import find_suite  # imports lm_eval: seconds

            find_suite(name)
        name = path
        names += SUITES if name == ALL else [name]
    if not names:
        raise UserError(f"--suites {given!r}: expected {ALL}, or names such as {SUITES[0]},jrt")
    return list(dict.fromkeys(names))


def settle(run: Path, given: dict[str, Any], *, change: bool = False, keep: bool = True) -> Request:
    """The request of schedule.json, which the first call makes; `given` are fields of Request.

    One that says something else is refused (UserError), unless it is a `change`: two watchers
    with two minds would hold and release the same checkpoints in turns. With `keep` False nothing
    is written.
    """
    path = run / EVALS / SCHEDULE
    RunFolder(run).read_config()
    for _ in range(3):
        known = _read_request(path)
        if known is not None:
            asked = dataclasses.replace(known, **given)
            if asked == known:
                return known
            if not change:
                names = [name for name in given if getattr(known, name) != given[name]]
                differs = "; ".join(
                    f"{name} {getattr(known, name)!r}, given {given[name]!r}" for name in names
                )
                raise UserError(
                    f"{path} says otherwise: {differs}. Leave the options out to go on as it "
                    "says, or give --change to replace it"
                )
        else:
            asked = Request(**({"suites": list(SUITES)} | given))
        if not keep:
            return asked
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
        try:
            temporary.write_text(json.dumps(asdict(asked), indent=2) + "\n")
            if known is not None:
                os.replace(temporary, path)
                return asked
            if link(temporary, path):
                fsync_folder(path.parent)
                return asked
        finally:
            remove(temporary)
    raise UserError(f"{path} comes and goes: look who writes it")


def known_suites(run: Path) -> list[str]:
    """The suites of schedule.json, where there is one. Raises UserError for what is no run."""
    RunFolder(run).read_config()
    request = _read_request(run / EVALS / SCHEDULE)
    return [] if request is None else request.suites


def _read_request(path: Path) -> Request | None:
    try:
        record = read_json(path)
        with parsing(path):
            return Request(**record)
    except UnreadableFile as error:
        if error.is_missing:
            return None
        raise UserError(f"{error}: delete it, and submit again") from None
