"""`canon run diff A B`: how two runs differ, and from which step on."""

import argparse
import json
import math
from collections.abc import Iterable, Iterator
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
from canon_pretrain.run.log import json_value, number

RTOL = 1e-4  # rounding differences between losses of one experiment on two machines
DATA = ("data_fingerprint", HELD_OUT)  # identity fields that describe the data
PER_RUN_NAMES = {
    "config": ("job.dump_folder", "job.description", *PER_LAUNCH_KEYS),
    "environment": (
        *("SLURM_", "MASTER_", "TORCHELASTIC_", "CUDA_VISIBLE_DEVICES", "HOSTNAME", "RANK"),
        *("WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "NODE_RANK"),
    ),
    "launch": ("",),
}
"""By section, prefixes of names whose values belong to one run or job."""

Facts = dict[str, Any]


def compare(a: RunRecord, b: RunRecord, *, rtol: float) -> Facts:
    """Return all differences of two runs; the newest launch of each is compared.

    Each section has `differences` (name -> [a, b]), `own` differences of a run or job, which are
    ignored, and `unknown`: the runs that have not recorded it.
    """
    shared = a.identity.keys() & b.identity.keys()
    ours, theirs = (_recorded(run, shared) for run in (a, b))
    sections = {name: _section(name, ours[name], theirs[name]) for name in ours}
    digests = compare_digests(a.events, b.events)
    losses = compare_losses(a.curve("loss"), b.curve("loss"), rtol)
    names = sorted(a.scores.keys() & b.scores.keys())
    scores = {name: compare_losses(a.scores[name], b.scores[name], rtol) for name in names}
    parts = [digests["first_different"], losses["first_beyond"]]
    is_same = not any(section["differences"] for section in sections.values())
    return {
        "a": str(a.folder.path),
        "b": str(b.folder.path),
        "same": is_same and parts == [None, None],
        "sections": sections,
        "data_digests": digests,
        "losses": losses,
        "scores": scores,
    }


def _recorded(run: RunRecord, shared: Iterable[str]) -> dict[str, Any]:
    """Return the records of a run by section; `shared`: the names in both identities."""
    at = run.folder.launch_path(max(launch_numbers(run.folder), default=0))
    facts, around = (
        read_json(at / name, finite=False) if (at / name).exists() else None
        for name in ("launch.json", "environment.json")
    )
    facts = facts or {}
    git = facts.get("git") or {"problem": "unknown"}
    code: Facts = {name: git.get(name) for name in ("commit", "untracked")}
    packages: Facts | None = None
    if (at / "source.patch").exists():
        code["patch"] = sha256_file(at / "source.patch")[:12]
    if (at / "packages.txt").exists():
        lines = read_bytes(at / "packages.txt").decode(errors="replace").split()
        versions = dict(line.split("==", 1) for line in lines if "==" in line)
        packages = {"python": facts.get("python"), **versions}
    if around is not None:
        around = flatten({name: facts.get(name) for name in ("platform", "devices")}) | around
    return {
        "identity": {name: value for name, value in run.identity.items() if name not in DATA},
        "data": {name: run.identity[name] for name in DATA if name in shared},
        "config": {k: value for k, value in flatten(run.config).items() if k not in shared},
        "code": None if git.get("problem") else code,
        "packages": packages,
        "environment": around,
        "launch": {
            "launches": len(run.launch_events),
            "world_sizes": collapse_repeats(head.get("world_size") for head in run.launch_events),
            "hosts": facts.get("hosts"),
            "canon_backend": facts.get("canon_backend"),
            "last_step": int(run.clock.steps[-1]),
        },
    }


def _section(section: str, a: Facts | None, b: Facts | None) -> Facts:
    unknown = [name for name, side in (("A", a), ("B", b)) if side is None]
    found: Facts = {"differences": {}, "own": {}, "compared": 0, "unknown": unknown}
    if a is None or b is None:
        return found
    names = sorted(a.keys() | b.keys())
    for name in names:
        if a.get(name) != b.get(name):
            kind = "own" if name.startswith(PER_RUN_NAMES.get(section, ())) else "differences"
            found[kind][name] = [a.get(name), b.get(name)]
    return found | {"compared": len(names)}


def digests_by_step(events: Iterable[Facts]) -> dict[int, str]:
    """Return the digest of each step's token ids; an event lists those since the previous one."""
    digests: dict[int, str] = {}
    for event in events:
        listed = event.get("data_digests") if event["event"] == "step" else None
        for back, digest in enumerate(reversed(listed or [])):
            digests[event["step"] - back] = digest
    return digests


def compare_digests(a: Iterable[Facts], b: Iterable[Facts]) -> Facts:
    """Find the first step with different data, among those that both runs logged."""
    ours, theirs = digests_by_step(a), digests_by_step(b)
    common = sorted(ours.keys() & theirs.keys())
    different = [step for step in common if ours[step] != theirs[step]]
    return {
        "logged": [len(ours), len(theirs)],
        "common": len(common),
        "different": len(different),
        "first_different": different[0] if different else None,
        "last_common": common[-1] if common else None,
    }


def compare_losses(a: Curve | None, b: Curve | None, rtol: float) -> Facts:
    """Find the first steps at which losses differ at all, and by more than `rtol` of the larger.

    NaN equals NaN; a value that is finite in one run only is beyond any tolerance.
    """
    ours, theirs = (curve or Curve(np.empty(0, np.int64), np.empty(0)) for curve in (a, b))
    steps, i, j = np.intersect1d(ours.steps, theirs.steps, assume_unique=True, return_indices=True)
    one, other = ours.values[i], theirs.values[j]
    with np.errstate(all="ignore"):
        apart = np.abs(one - other) / np.maximum(np.abs(one), np.abs(other))
    apart[~np.isfinite(apart)] = math.inf
    apart[(one == other) | (np.isnan(one) & np.isnan(other))] = 0.0
    unequal, beyond = (np.flatnonzero(apart > most).tolist() for most in (0, rtol))
    largest = [int(apart.argmax())] if len(steps) else []

    def first(places: list[int], values: np.ndarray) -> Any:
        return json_value(values[places[0]].item()) if places else None

    return {
        "common": len(steps),
        "rtol": rtol,
        "there": [first(beyond, one), first(beyond, other)] if beyond else None,
        "largest": first(largest, apart),
        "first_unequal": first(unequal, steps),
        "first_beyond": first(beyond, steps),
        "largest_step": first(largest, steps),
        "last_common": int(steps[-1]) if len(steps) else None,
    }


def describe(found: Facts, *, with_own: bool) -> Iterator[str]:
    """Yield the lines that describe a comparison; `with_own`: also ignored differences."""
    yield f"A  {found['a']}"
    yield f"B  {found['b']}"
    for name, section in found["sections"].items():
        if section["unknown"]:
            yield f"{name}: not compared: not recorded in {' and '.join(section['unknown'])}"
            continue
        differences, own = section["differences"], section["own"]
        count = f"{len(differences)} of {section['compared']} differ" if differences else "same"
        if own and not with_own:
            count += f", {len(own)} ignored (--all)"
        yield f"{name}: {count}"
        for key, values in (differences | (own if with_own else {})).items():
            ignored = " (ignored)" if key in own else ""
            yield f"  {key}{ignored}: {' -> '.join(map(_format, values))}"
    yield f"data digests: {_describe_digests(found['data_digests'])}"
    yield f"losses: {_describe_losses(found['losses'])}"
    for name, curves in found["scores"].items():
        yield f"validation {name}: {_describe_losses(curves)}"
    yield "same" if found["same"] else "different"


def _format(value: Any) -> str:
    """Return a value on one line; – for None."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _describe_digests(found: Facts) -> str:
    common, first = found["common"], found["first_different"]
    if not common:
        return f"none in common (A has {found['logged'][0]:,}, B {found['logged'][1]:,})"
    if first is None:
        return f"equal in all {common:,} common steps, to step {found['last_common']:,}"
    return f"differ from step {first:,} on ({found['different']:,} of {common:,} common steps)"


def _describe_losses(found: Facts) -> str:
    if not found["common"]:
        return "no logged step in common"
    lines = f"{found['common']:,} common lines, to step {found['last_common']:,}"
    if found["first_unequal"] is None:
        return f"equal bit for bit in all {lines}"
    largest = f"{number(found['largest']):.1e} at step {found['largest_step']:,}"
    first = f"first difference at step {found['first_unequal']:,}; largest relative one {largest}"
    if found["first_beyond"] is None:
        return f"equal to {found['rtol']:g} in all {lines}; {first}"
    a, b = (f"{number(loss):.7g}" for loss in found["there"])
    at = f"{found['first_beyond']:,} ({a} -> {b})"
    return f"differ by more than {found['rtol']:g} from step {at} on; {first}; {lines}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `canon run diff`."""
    parser.description = (
        "Compare two run folders: identity, data, config, code, packages, environment, "
        "and the first steps at which their data and losses differ. Values of one run or job (its "
        "folder, job ids, world size) are ignored. Exit code 0: same; 1: different; 2: error."
    )
    for name in ("a", "b"):
        parser.add_argument(name, type=Path, metavar=name.upper(), help="a run folder")
    about = "relative tolerance of losses (default: %(default)s)"
    parser.add_argument("--rtol", type=float, default=RTOL, help=about)
    parser.add_argument("--all", action="store_true", help="also show ignored differences")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Compare two runs; returns the exit code. Raises UserError."""
    if not 0 <= arguments.rtol < 1:
        message = f"--rtol {arguments.rtol}: expected at least 0 and less than 1"
        raise UserError("diff.rtol", message, given=arguments.rtol)
    found = compare(RunRecord(arguments.a), RunRecord(arguments.b), rtol=arguments.rtol)
    if arguments.json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        print(printable("\n".join(describe(found, with_own=arguments.all)), keep="\n"))
    return 0 if found["same"] else 1
