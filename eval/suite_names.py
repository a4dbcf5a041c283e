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
_TAG = re.compile(r"[^\s\"',\[\]-][^\s\"',\[\]]*")


class HarnessName(NamedTuple):
    """A task, group or tag, and the file that defines it."""

    kind: str
    path: Path


@functools.cache
def task_files() -> dict[str, Path]:
    """Return the file by task and group of eval/tasks; a group's members have the group's file."""
    top_level: dict[str, Path] = {}
    members: dict[str, Path] = {}
    for path in sorted(TASKS.rglob("*.yaml")):
        content = path.read_text()
        names = re.findall(r"^(?:task|group):[ \t]+(\S+)", content, re.MULTILINE)
        top_level |= dict.fromkeys(names[:1], path)
        members |= dict.fromkeys(re.findall(r"^ +- task:[ \t]+(\S+)", content, re.MULTILINE), path)
    return members | top_level


def harness_tasks() -> Path:
    """Return the folder of the installed lm_eval's tasks."""
    spec = find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise UserError("eval.no_lm_eval", "lm_eval is not installed: run pip install -e .")
    return Path(spec.origin).parent / "tasks"


@functools.cache
def harness_names() -> dict[str, HarnessName]:
    """Return all names of the installed lm_eval by a text scan, faster than its own index."""
    names: dict[str, HarnessName] = {}
    tags: dict[str, HarnessName] = {}
    # templates, which have no suffix, may define tags of the files that include them
    for path in sorted(harness_tasks().rglob("*")):
        if path.suffix not in ("", ".yaml") or not path.is_file():
            continue
        text = path.read_text(errors="replace")

        # A file with a suffix defines a group, or a task.
        if path.suffix:
            # by key, `task` or `group`, the first name of the file
            name_by_key = dict(reversed(_NAME.findall(text)))
            is_group = "group" in name_by_key and not _CLASS.search(text)
            kind = "group" if is_group else "task"
            if kind in name_by_key:
                names.setdefault(name_by_key[kind], HarnessName(kind, path))

        for tag_value in _TAGS.findall(text):
            without_comments = re.sub("#.*", "", tag_value)
            for tag in _TAG.findall(without_comments):
                tags.setdefault(tag, HarnessName("tag", path))
    return tags | names


def is_task_file(suite: str) -> bool:
    """Return whether a suite is specified as the path of a YAML file."""
    return suite.endswith((".yaml", ".yml"))


def split_suites(text: str, stored: Collection[str] = ()) -> list[str]:
    """Return the suites of `a,b` or `all` with absolute paths; checks those not in `stored`."""
    suites: list[str] = []
    for name in filter(None, text.split(",")):
        if name == ALL:
            suites += SUITES
            continue

        suite = os.path.abspath(name) if is_task_file(name) else name
        if suite not in stored:
            find_suite(name)  # raises if there is none
        suites.append(suite)

    if not suites:
        raise UserError(
            "eval.unknown_suite",
            f"no suite in {text!r}: expected {ALL}, or names such as jrt,{VALIDATION}",
            given=text,
        )
    return list(dict.fromkeys(suites))


def suite_name(suite: str) -> str:
    """Return the name of a suite and of its folder of results."""
    return Path(suite).stem if is_task_file(suite) else suite


def find_suite(suite: str) -> tuple[str, Path | None]:
    """Return the suite's name and its file, None for `validation`."""
    files = task_files()
    if suite == VALIDATION:
        return suite, None
    if suite in files:
        return suite, files[suite]

    # A user's file, whose name is that of the suite's results.
    if is_task_file(suite):
        path = Path(suite)
        if not path.is_file():
            raise UserError("eval.unknown_suite", f"--suite {suite}: no such file", given=suite)
        is_other_suite = path.stem in files and not path.samefile(files[path.stem])
        if path.stem == VALIDATION or is_other_suite:
            raise UserError(
                "eval.ambiguous_suite",
                f"{suite}: '{path.stem}' is the name of another suite; rename the file",
            )
        return path.stem, path

    # The names of lm_eval come last: reading them takes time.
    if suite in harness_names():
        return suite, harness_names()[suite].path
    our_names = [*SUITES, ALL, *files]
    similar = suggestion(suite, our_names) or suggestion(suite, harness_names())
    raise UserError(
        "eval.unknown_suite",
        f"unknown suite '{suite}'; expected {', '.join(SUITES)}, {ALL}, a name listed by "
        f"`canon eval tasks`, or a task's YAML.{similar}",
        given=suite,
    )


def task_folder(path: Path | None) -> str:
    """Return the name of a task file's folder in eval/tasks; empty for other files."""
    return path.parent.name if path and path.resolve().is_relative_to(TASKS) else ""


def suite_settings(name: str, options: argparse.Namespace, seq_len: int) -> dict[str, Any]:
    """Return the settings of a suite that the options determine; files count by content."""

    def content(value: Path | str) -> str:
        if is_file(value):
            return f"file {sha256_file(Path(value))}"
        return str(value)

    folder = task_folder(task_files().get(name))
    max_length = options.max_length or max(seq_len, MIN_MAX_LENGTHS.get(folder, 0))
    settings: dict[str, Any] = {"max_length": max_length, "add_bos": options.add_bos}

    if name == VALIDATION:
        return settings
    if folder == "birth_year" and options.junk:
        settings["junk"] = content(options.junk)

    # a suite of ours ignores the options of the others; a user's task may use any
    ignored_prefixes = tuple(f"{other}_" for other in FOLDERS if folder and other != folder)
    task_options = {
        key: content(value) for key, value in options.option if not key.startswith(ignored_prefixes)
    }
    if task_options:
        settings["options"] = task_options
    return settings


def is_file(value: Path | str) -> bool:
    """Return whether the value of an --option is the path of a file."""
    return bool(Path(value).suffix) and Path(value).is_file()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--grep", metavar="PATTERN", default="", help="only names that match")


def run(arguments: argparse.Namespace) -> None:
    """Print the names for `eval run --suite`, the kind and file of each."""
    try:
        pattern = re.compile(arguments.grep)
    except re.error as error:
        raise UserError(
            "eval.grep",
            f"--grep {arguments.grep!r}: no regular expression: {error}",
        ) from None

    # the suites, then our other names, then those of lm_eval
    our_files = {VALIDATION: TASKS.with_name("validation.py")} | task_files()
    names = {name: HarnessName("suite", our_files[name]) for name in SUITES}
    for name in sorted(our_files):
        names.setdefault(name, HarnessName("ours", our_files[name]))
    for name, harness_name in sorted(harness_names().items()):
        names.setdefault(name, harness_name)

    matching = [name for name in names if pattern.search(name)]
    if not matching:
        raise UserError(
            "eval.grep",
            f"none of {len(names):,} names matches --grep {arguments.grep!r}",
        )
    for name in matching:
        harness_name = names[name]
        print(f"{name:40} {harness_name.kind:5} {harness_name.path}")
