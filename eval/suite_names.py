"""The names and settings of suites; `eval tasks` lists the names.

A suite is `validation`, a task or group in eval/tasks, one of lm_eval's own, or a user's task file.
No torch and no lm_eval here.
"""

import argparse
import functools
import os
import re
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from canon_pretrain.core.errors import UserError, suggestion
from canon_pretrain.core.files import sha256_file
from canon_pretrain.run.results import SUITES, VALIDATION

ALL = "all"
# lower limits of the default --max-length, so that contexts of 4,096 tokens fit
MIN_MAX_LENGTHS = {"babilong": 8192, "birth_year": 8192}
# the suites' folders; the names of their task options begin with these
FOLDERS = ("discriminative", "jrt", "babilong", "birth_year", "playground")
TASKS = Path(__file__).resolve().parent / "tasks"

_NAME = re.compile(r"^[ {]*\"?(task|group)\"?:[ \t]+[\"']?([^\s\"',]+)", re.MULTILINE)
_CLASS = re.compile("^class:", re.MULTILINE)
_TAGS = re.compile(r"^\"?tag\"?:[ \t]*([^\n]*(?:\n[ \t]*-[^\n]*)*)", re.MULTILINE)


class HarnessName(NamedTuple):
    """A task, group or tag of the installed lm_eval, and the file that defines it."""

    kind: str
    path: Path


@functools.cache
def task_files() -> dict[str, Path]:
    """Return the file by task and group of eval/tasks; a group's members have the group's file."""
    found: dict[str, Path] = {}
    members: dict[str, Path] = {}
    for path in sorted(TASKS.rglob("*.yaml")):
        content = path.read_text()
        names = re.findall(r"^(?:task|group):[ \t]+(\S+)", content, re.MULTILINE)
        found |= dict.fromkeys(names[:1], path)
        members |= dict.fromkeys(re.findall(r"^ +- task:[ \t]+(\S+)", content, re.MULTILINE), path)
    return members | found


def harness_tasks() -> Path:
    """Return the folder of the installed lm_eval's tasks."""
    spec = find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise UserError("eval.no_lm_eval", "lm_eval is not installed: run pip install -e .")
    return Path(spec.origin).parent / "tasks"


@functools.cache
def harness_names() -> dict[str, HarnessName]:
    """Return all names of the installed lm_eval by a text scan, faster than its own index."""
    named: dict[str, HarnessName] = {}
    tags: dict[str, HarnessName] = {}
    # templates, which have no suffix, may define tags of the files that include them
    files = (path for path in harness_tasks().rglob("*") if path.suffix in ("", ".yaml"))
    for path in sorted(path for path in files if path.is_file()):
        text = path.read_text(errors="replace")
        if path.suffix:
            found = dict(reversed(_NAME.findall(text)))
            kind = "group" if "group" in found and not _CLASS.search(text) else "task"
            if kind in found:
                named.setdefault(found[kind], HarnessName(kind, path))
        for listed in _TAGS.findall(text):
            for word in re.findall(r"[^\s\"',\[\]-][^\s\"',\[\]]*", re.sub("#.*", "", listed)):
                tags.setdefault(word, HarnessName("tag", path))
    return tags | named


def is_task_file(given: str) -> bool:
    """Return whether a suite is given as the path of a YAML file."""
    return given.endswith((".yaml", ".yml"))


def split_suites(given: str, known: Collection[str] = ()) -> list[str]:
    """Return the suites of `a,b` or `all` with absolute paths; checks those not in `known`."""
    suites: list[str] = []
    for name in filter(None, given.split(",")):
        suite = os.path.abspath(name) if is_task_file(name) else name
        if name != ALL and suite not in known:
            find_suite(name)
        suites += SUITES if name == ALL else [suite]
    if not suites:
        raise UserError(
            "eval.unknown_suite",
            f"no suite in {given!r}: expected {ALL}, or names such as jrt,{VALIDATION}",
            given=given,
        )
    return list(dict.fromkeys(suites))


def suite_name(given: str) -> str:
    """Return the name of a suite and of its folder of results."""
    return Path(given).stem if is_task_file(given) else given


def find_suite(given: str) -> tuple[str, Path | None]:
    """Return the suite's name and its file, None for `validation`."""
    files = task_files()
    if given == VALIDATION:
        return given, None
    if given in files:
        return given, files[given]
    if is_task_file(given):
        path = Path(given)
        if not path.is_file():
            raise UserError("eval.unknown_suite", f"--suite {given}: no such file", given=given)
        if path.stem == VALIDATION or path.resolve() != files.get(path.stem, path).resolve():
            raise UserError(
                "eval.ambiguous_suite",
                f"{given}: '{path.stem}' is the name of another suite; rename the file",
            )
        return path.stem, path
    if given in harness_names():
        return given, harness_names()[given].path
    near = suggestion(given, [*SUITES, ALL, *files]) or suggestion(given, harness_names())
    raise UserError(
        "eval.unknown_suite",
        f"unknown suite '{given}'; expected {', '.join(SUITES)}, {ALL}, a name listed by "
        f"`canon eval tasks`, or a task's YAML.{near}",
        given=given,
    )


def task_folder(path: Path | None) -> str:
    """Return the name of a task file's folder in eval/tasks; empty for other files."""
    return path.parent.name if path and path.resolve().is_relative_to(TASKS) else ""


def suite_settings(name: str, how: argparse.Namespace, seq_len: int) -> dict[str, Any]:
    """Return the settings of a suite that the options determine; files count by content."""

    def content(value: Path | str) -> str:
        return f"file {sha256_file(Path(value))}" if is_file(value) else str(value)

    own = task_folder(task_files().get(name))
    length = how.max_length or max(seq_len, MIN_MAX_LENGTHS.get(own, 0))
    found: dict[str, Any] = {"max_length": length, "add_bos": how.add_bos}
    if name == VALIDATION:
        return found
    if own == "birth_year" and how.junk:
        found["junk"] = content(how.junk)
    others = tuple(f"{folder}_" for folder in FOLDERS if own and folder != own)
    options = {key: content(value) for key, value in how.option if not key.startswith(others)}
    return found | ({"options": options} if options else {})


def is_file(value: Path | str) -> bool:
    """Return whether the value of an --option is the path of a file."""
    return bool(Path(value).suffix) and Path(value).is_file()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `eval tasks`."""
    parser.add_argument("--grep", metavar="PATTERN", default="", help="only names that match")


def run(arguments: argparse.Namespace) -> None:
    """Print the names for `eval run --suite`, the kind and file of each."""
    try:
        pattern = re.compile(arguments.grep)
    except re.error as error:
        raise UserError(
            "eval.grep", f"--grep {arguments.grep!r}: no regular expression: {error}"
        ) from None
    ours = {VALIDATION: TASKS.with_name("validation.py")} | task_files()
    known = {name: HarnessName("suite", ours[name]) for name in SUITES}
    for name in sorted(ours):
        known.setdefault(name, HarnessName("ours", ours[name]))
    for name, theirs in sorted(harness_names().items()):
        known.setdefault(name, theirs)
    found = [name for name in known if pattern.search(name)]
    if not found:
        raise UserError(
            "eval.grep", f"none of {len(known):,} names matches --grep {arguments.grep!r}"
        )
    for name in found:
        print(f"{name:40} {known[name].kind:5} {known[name].path}")
