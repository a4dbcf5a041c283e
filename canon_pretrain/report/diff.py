"""`canon run diff A B`: how two runs differ, and from which step on."""

import argparse
import json
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import read_bytes, read_json, sha256_file
from canon_pretrain.core.terminal import printable
from canon_pretrain.report.items import HELD_OUT
from canon_pretrain.report.record import Curve, RunRecord, collapse_repeats, flatten
from canon_pretrain.run.identity import PER_LAUNCH_KEYS
from canon_pretrain.run.launches import launch_numbers
from canon_pretrain.run.log import Event, json_value

RTOL = 1e-4  # rounding differences between losses of one experiment on two machines
DATA = ("data_fingerprint", HELD_OUT)  # identity fields that describe the data
PER_RUN_NAMES = {
    "config": ("job.dump_folder", "job.description", *PER_LAUNCH_KEYS),
    "environment": (
        "SLURM_",
        "MASTER_",
        "TORCHELASTIC_",
        "CUDA_VISIBLE_DEVICES",
        "HOSTNAME",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "GROUP_",
        "ROLE_",
        "NODE_RANK",
    ),
    "launch": ("",),
}
"""By section, prefixes of names whose values belong to one run or job."""

Values = dict[str, Any]


@dataclass
class Section:
    """The records of two runs: `own` differences are of a run or job, and ignored.

    Its fields are keys of `diff --json`.
    """

    differences: dict[str, list[Any]] = field(default_factory=dict)
    """Name -> the values of A and B."""
    own: dict[str, list[Any]] = field(default_factory=dict)
    compared: int = 0
    unknown: list[str] = field(default_factory=list)
    """The runs that have not recorded it."""


@dataclass(frozen=True)
class Digests:
    """The digests of the data of each step, at the steps that both runs logged."""

    logged: tuple[int, int]
    common: int
    different: int
    first_different: int | None
    last_common: int | None


@dataclass(frozen=True)
class Losses:
    """The losses of two runs at common steps; steps are None if there are none."""

    common: int
    rtol: float
    there: tuple[float, float] | None = None
    """The losses at `first_beyond`."""
    largest: float | None = None
    """The largest relative difference."""
    first_unequal: int | None = None
    first_beyond: int | None = None
    largest_step: int | None = None
    last_common: int | None = None


@dataclass(frozen=True)
class Comparison:
    """All differences of two runs; its fields are the keys of `diff --json`."""

    a: str
    b: str
    same: bool
    sections: dict[str, Section]
    data_digests: Digests
    losses: Losses
    scores: dict[str, Losses]


def compare(a: RunRecord, b: RunRecord, *, rtol: float) -> Comparison:
    """Return all differences of two runs; the newest launch of each is compared."""
    common_identity = a.identity.keys() & b.identity.keys()
    records_a = _recorded(a, common_identity)
    records_b = _recorded(b, common_identity)
    sections = {}
    for name, record_a in records_a.items():
        sections[name] = _section(name, record_a, records_b[name])

    digests = compare_digests(a.events, b.events)
    losses = compare_losses(a.curve("loss"), b.curve("loss"), rtol)
    scores = {
        name: compare_losses(a.scores[name], b.scores[name], rtol)
        for name in sorted(a.scores.keys() & b.scores.keys())
    }
    is_same = (
        digests.first_different is None
        and losses.first_beyond is None
        and not any(section.differences for section in sections.values())
    )
    return Comparison(
        a=str(a.folder.path),
        b=str(b.folder.path),
        same=is_same,
        sections=sections,
        data_digests=digests,
        losses=losses,
        scores=scores,
    )


def _recorded(run: RunRecord, common_identity: Collection[str]) -> dict[str, Values | None]:
    """Return the records of a run by section; None for one that the run has not recorded.

    `common_identity`: the names in both identities, which are compared there and not in `config`.
    """
    # The newest launch wrote what it ran on; an older version may not have.
    folder = run.folder.launch_path(max(launch_numbers(run.folder), default=0))
    launch = _read_if_there(folder / "launch.json") or {}
    environment = _read_if_there(folder / "environment.json")
    if environment is not None:
        machine = {name: launch.get(name) for name in ("platform", "devices")}
        environment = flatten(machine) | environment

    # The commit, and changes that were not committed.
    code: Values | None = None
    git = launch.get("git") or {"problem": "unknown"}
    if not git.get("problem"):
        code = {name: git.get(name) for name in ("commit", "untracked")}
        patch = folder / "source.patch"
        if patch.exists():
            code["patch"] = sha256_file(patch)[:12]

    packages: Values | None = None
    packages_file = folder / "packages.txt"
    if packages_file.exists():
        packages = {"python": launch.get("python")}
        requirements = read_bytes(packages_file).decode(errors="replace")
        for requirement in requirements.split():
            name, separator, version = requirement.partition("==")
            if separator:
                packages[name] = version

    identity = dict(run.identity)
    config = flatten(run.config)
    for name in DATA:
        identity.pop(name, None)
    for name in common_identity:
        config.pop(name, None)
    launch_events = run.launch_events
    return {
        "identity": identity,
        "data": {name: run.identity[name] for name in DATA if name in common_identity},
        "config": config,
        "code": code,
        "packages": packages,
        "environment": environment,
        "launch": {
            "launches": len(launch_events),
            "world_sizes": collapse_repeats(event.get("world_size") for event in launch_events),
            "hosts": launch.get("hosts"),
            "canon_backend": launch.get("canon_backend"),
            "last_step": int(run.clock.steps[-1]),
        },
    }


def _read_if_there(path: Path) -> Values | None:
    return read_json(path, finite=False) if path.exists() else None


def _section(name: str, a: Values | None, b: Values | None) -> Section:
    unknown = []
    if a is None:
        unknown.append("A")
    if b is None:
        unknown.append("B")
    if a is None or b is None:
        return Section(unknown=unknown)

    own_prefixes = PER_RUN_NAMES.get(name, ())
    keys = sorted(a.keys() | b.keys())
    section = Section(compared=len(keys))
    for key in keys:
        values = [a.get(key), b.get(key)]
        if values[0] == values[1]:
            continue
        if key.startswith(own_prefixes):
            section.own[key] = values
        else:
            section.differences[key] = values
    return section


def digests_by_step(events: Iterable[Event]) -> dict[int, str]:
    """Return the digest of each step's token ids; an event lists those since the previous one."""
    digests: dict[int, str] = {}
    for event in events:
        if event.kind == "step":
            new_digests = event.get("data_digests") or []
            for steps_ago, digest in enumerate(reversed(new_digests)):
                digests[event.step - steps_ago] = digest
    return digests


def compare_digests(a: Iterable[Event], b: Iterable[Event]) -> Digests:
    """Find the first step with different data, among those that both runs logged."""
    digests_a = digests_by_step(a)
    digests_b = digests_by_step(b)
    common = sorted(digests_a.keys() & digests_b.keys())
    different = [step for step in common if digests_a[step] != digests_b[step]]
    return Digests(
        logged=(len(digests_a), len(digests_b)),
        common=len(common),
        different=len(different),
        first_different=min(different, default=None),
        last_common=max(common, default=None),
    )


def compare_losses(a: Curve | None, b: Curve | None, rtol: float) -> Losses:
    """Find the first steps at which losses differ at all, and by more than `rtol` of the larger.

    NaN equals NaN; a value that is finite in one run only is beyond any tolerance.
    """
    if a is None or b is None:
        return Losses(common=0, rtol=rtol)
    steps, indices_a, indices_b = np.intersect1d(
        a.steps,
        b.steps,
        assume_unique=True,
        return_indices=True,
    )
    if not len(steps):
        return Losses(common=0, rtol=rtol)

    # The relative difference at each common step: 0 for equal values, infinite if only one of
    # them is finite.
    losses_a = a.values[indices_a]
    losses_b = b.values[indices_b]
    with np.errstate(all="ignore"):
        larger = np.maximum(np.abs(losses_a), np.abs(losses_b))
        relative = np.abs(losses_a - losses_b) / larger
    relative[~np.isfinite(relative)] = math.inf
    both_nan = np.isnan(losses_a) & np.isnan(losses_b)
    relative[both_nan | (losses_a == losses_b)] = 0.0

    # The first step beyond the tolerance, with its losses, and the first with any difference.
    largest_index = int(relative.argmax())
    largest = float(relative[largest_index])
    first_beyond = None
    there = None
    if largest > rtol:
        index = int((relative > rtol).argmax())
        first_beyond = int(steps[index])
        there = float(losses_a[index]), float(losses_b[index])
    first_unequal = None
    if largest > 0:
        index = int((relative > 0).argmax())
        first_unequal = int(steps[index])
    return Losses(
        common=len(steps),
        rtol=rtol,
        there=there,
        largest=largest,
        first_unequal=first_unequal,
        first_beyond=first_beyond,
        largest_step=int(steps[largest_index]),
        last_common=int(steps[-1]),
    )


def describe(comparison: Comparison, *, with_own: bool) -> Iterator[str]:
    """Yield the lines that describe a comparison; `with_own`: also ignored differences."""
    yield f"A  {comparison.a}"
    yield f"B  {comparison.b}"

    for name, section in comparison.sections.items():
        if section.unknown:
            yield f"{name}: not compared: not recorded in {' and '.join(section.unknown)}"
            continue

        # A summary of the section, then its differences.
        summary = "same"
        if section.differences:
            summary = f"{len(section.differences)} of {section.compared} differ"
        if section.own and not with_own:
            summary = f"{summary}, {len(section.own)} ignored (--all)"
        yield f"{name}: {summary}"
        for key, values in section.differences.items():
            yield f"  {key}: {_change(values)}"
        if with_own:
            for key, values in section.own.items():
                yield f"  {key} (ignored): {_change(values)}"

    yield f"data digests: {_describe_digests(comparison.data_digests)}"
    yield f"losses: {_describe_losses(comparison.losses)}"
    for name, losses in comparison.scores.items():
        yield f"validation {name}: {_describe_losses(losses)}"
    yield "same" if comparison.same else "different"


def _change(values: Sequence[Any]) -> str:
    """Return the values of A and B on one line; – for None."""
    texts = []
    for value in values:
        text = value
        if value is None:
            text = "–"
        elif not isinstance(value, str):
            text = json.dumps(value, ensure_ascii=False)
        texts.append(text)
    return " -> ".join(texts)


def _describe_digests(digests: Digests) -> str:
    if not digests.common:
        return "none in common (A has {:,}, B {:,})".format(*digests.logged)
    common = f"{digests.common:,}"
    if digests.first_different is None:
        return f"equal in all {common} common steps, to step {digests.last_common:,}"
    different = f"{digests.different:,} of {common} common steps"
    return f"differ from step {digests.first_different:,} on ({different})"


def _describe_losses(losses: Losses) -> str:
    if not losses.common:
        return "no logged step in common"
    lines = f"{losses.common:,} common lines, to step {losses.last_common:,}"
    if losses.first_unequal is None:
        return f"equal bit for bit in all {lines}"
    largest = f"{losses.largest:.1e} at step {losses.largest_step:,}"
    first = f"first difference at step {losses.first_unequal:,}; largest relative one {largest}"
    if losses.there is None:
        return f"equal to {losses.rtol:g} in all {lines}; {first}"
    change = " -> ".join(f"{loss:.7g}" for loss in losses.there)
    return (
        f"differ by more than {losses.rtol:g} from step {losses.first_beyond:,} ({change}) on; "
        f"{first}; {lines}"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare two run folders: identity, data, config, code, packages, environment, "
        "and the first steps at which their data and losses differ. Values of one run or job (its "
        "folder, job ids, world size) are ignored. Exit code 0: same; 1: different; 2: error."
    )
    parser.add_argument("a", type=Path, metavar="A", help="a run folder")
    parser.add_argument("b", type=Path, metavar="B", help="a run folder")
    parser.add_argument(
        "--rtol",
        type=float,
        default=RTOL,
        help="relative tolerance of losses (default: %(default)s)",
    )
    parser.add_argument("--all", action="store_true", help="also show ignored differences")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Compare two runs; returns the exit code. Raises UserError."""
    if not 0 <= arguments.rtol < 1:
        raise UserError(
            "diff.rtol",
            f"--rtol {arguments.rtol}: expected at least 0 and less than 1",
            given=arguments.rtol,
        )
    a = RunRecord(arguments.a)
    b = RunRecord(arguments.b)
    comparison = compare(a, b, rtol=arguments.rtol)
    if arguments.json:
        text = json.dumps(json_value(comparison), indent=2, ensure_ascii=False)
    else:
        lines = describe(comparison, with_own=arguments.all)
        text = printable("\n".join(lines), keep="\n")
    print(text)
    return 0 if comparison.same else 1
