"""What was asked for of a run: which suites of which steps, and how; read by every `eval submit`.

    RUN/evals/schedule.json    made by the first one

schedule.py says how far that is. No torch here.
"""

import argparse
import dataclasses
import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from canon_pretrain.checkpoint.folder import EVALS
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, fsync_folder, parsing, read_json
from canon_pretrain.core.holder import link, remove
from canon_pretrain.data.held_out import open_apart
from canon_pretrain.run.folder import RunFolder
from eval.run_command import add_how
from eval.suite_names import SUITES, asked_how, is_file, suite_name

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


def answers(asked: dict[str, Any], suite: str, how: Sequence[str], seq_len: int) -> bool:
    """Whether results that were asked like this are what `eval run` finds for `suite` and `how`."""
    options = _parse_how(how)
    wanted = {"options": None, "junk": None, **asked_how(suite_name(suite), options, seq_len)}
    if options.held_out is not None and suite == "validation":
        wanted["held_out_fingerprint"] = open_apart(options.held_out).fingerprint
    return options.dtype in ("auto", asked.get("dtype")) and all(
        asked.get(name) == value for name, value in wanted.items()
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
            for key, text in value:
                words += [f"--{name}", f"{key}={os.path.abspath(text) if is_file(text) else text}"]
        else:
            words.append(f"--{name}")
            words.append(os.path.abspath(value) if isinstance(value, Path) else str(value))
    return words


def settle(run: Path, given: dict[str, Any], *, change: bool = False, keep: bool = True) -> Request:
    """The request of schedule.json, which the first call makes; `given` are fields of Request.

    One that says something else is refused (UserError), unless it is a `change`: two watchers
    with two minds would hold and release the same checkpoints in turns. With `keep` False nothing
    is written.
    """
    path = run / EVALS / SCHEDULE
    RunFolder(run).read_config()
    for _ in range(3):
        known = _read_request(path, replaces=change)
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
            if known is not None or (change and path.exists()):
                os.replace(temporary, path)
                return asked
            if link(temporary, path):
                fsync_folder(path.parent)
                return asked
        finally:
            remove(temporary)
    raise UserError(f"{path} comes and goes: look who writes it")


def known_suites(run: Path, *, change: bool = False) -> list[str]:
    """The suites of schedule.json if there is one; a `change` passes over a damaged one.

    Raises UserError for what is no run.
    """
    RunFolder(run).read_config()
    request = _read_request(run / EVALS / SCHEDULE, replaces=change)
    return [] if request is None else request.suites


def _read_request(path: Path, *, replaces: bool) -> Request | None:
    try:
        record = read_json(path)
        with parsing(path):
            return Request(**record)
    except UnreadableFile as error:
        if error.is_missing or replaces:
            return None
        raise UserError(f"{error}: --change writes it anew, with the options given") from None
