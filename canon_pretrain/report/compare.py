"""How two runs differ, as JSON values: what they are, what they ran with, what they saw and gave.

Reads config.json, the newest of launches/, and the log; `diff.py` shows it. Runs without launches/
(older ones) are compared in what they have. No torch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, read_bytes, read_json, sha256_file
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.launches import OWN_TO_A_LAUNCH, launch_numbers
from canon_pretrain.run.log import json_value, number

OWN_CONFIG = ("job.dump_folder", "job.description", *OWN_TO_A_LAUNCH)
"""Keys that name a run or belong to one launch, or follow from its world size."""

OWN_ENVIRONMENT = (
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
)
"""Variables, by their beginnings, that each job is given its own values of."""

LOGGED_VERSIONS = ("torch", "torchtitan", "canon_pretrain", "python")
"""What a `start` or `resume` event may name."""

DATA = ("data_fingerprint", "held_out_fingerprint")
"""What of the identity is about the data."""

SECTIONS = ("identity", "data", "config", "code", "packages", "environment", "launch")


@dataclass(frozen=True)
class Recorded:
    """One run folder. What an older run has not recorded is None."""

    folder: RunFolder
    identity: dict[str, Any]
    config: dict[str, Any]
    launch: dict[str, Any] | None
    """The newest launches/NNN/launch.json."""
    packages: dict[str, str] | None
    environment: dict[str, str] | None
    codes: list[tuple[str, ...]]
    """Of each launch that is recorded: commit, and hash of the patch."""
    events: list[dict[str, Any]]


def read_recorded(path: Path) -> Recorded:
    """Read a run folder. Raises UserError for what is none, has no log, or is damaged."""
    folder = RunFolder(path)
    stored = folder.read_config()
    identity, config = stored.get("identity"), stored.get("config")
    if not isinstance(identity, dict) or not isinstance(config, dict):
        raise UserError(f"{folder.config_file} is damaged: it has no `identity` or no `config`")
    launches = [folder.launch_path(number) for number in launch_numbers(folder)]
    newest = launches[-1] if launches else None
    return Recorded(
        folder=folder,
        identity=identity,
        config=flat(config),
        launch=None if newest is None else _json(newest / "launch.json"),
        packages=None if newest is None else _packages(newest / "packages.txt"),
        environment=None if newest is None else _json(newest / "environment.json"),
        codes=[_code(launch) for launch in launches],
        events=folder.read_log(),
    )


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested objects by dotted names; a list is a leaf."""
    leaves: dict[str, Any] = {}
    for name, inner in value.items():
        if isinstance(inner, dict) and inner:
            leaves |= flat(inner, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = inner
    return leaves


def _json(path: Path) -> dict[str, Any] | None:
    """Return the object in a file; None if there is no such file."""
    try:
        return read_json(path, finite=False)
    except UnreadableFile as error:
        if error.is_missing:
            return None
        raise UserError(f"{error}; without it the rest can be read") from None


def _packages(path: Path) -> dict[str, str] | None:
    """`name==version` lines."""
    try:
        lines = read_bytes(path).decode(errors="replace").split()
    except UnreadableFile as error:
        if error.is_missing:
            return None
        raise UserError(f"{error}; without it the rest can be read") from None
    return dict(line.split("==", 1) for line in lines if "==" in line)


def _code(launch: Path) -> tuple[str, ...]:
    git = (_json(launch / "launch.json") or {}).get("git") or {}
    return (str(git.get("commit")), _patch_hash(launch))


def _patch_hash(launch: Path) -> str:
    """A short hash of source.patch; empty where the tree had no changes."""
    try:
        return sha256_file(launch / "source.patch")[:12]
    except OSError:
        return ""


# ---- sections


def compare(a: Recorded, b: Recorded, *, rtol: float) -> dict[str, Any]:
    """All differences of two runs; `rtol` is how far losses may be apart by rounding.

    Each section has `differences` (name -> [a, b]), those that are `own` to a run or a job and
    count for nothing, and `unknown` where a run has not recorded it. `same` is whether nothing
    that counts differs.
    """
    sections = {
        "identity": _section(_computed(a), _computed(b)),
        "data": _section(_data(a, b), _data(b, a)),
        "config": _section(_settings(a, b), _settings(b, a), own=lambda name: name in OWN_CONFIG),
        "code": _section(_source(a), _source(b)),
        "packages": _section(*_installed(a, b)),
        "environment": _section(
            _around(a), _around(b), own=lambda name: name.startswith(OWN_ENVIRONMENT)
        ),
        "launch": _section(_launched(a), _launched(b), own=lambda name: True),
    }
    digests, losses = compare_digests(a.events, b.events), compare_losses(a.events, b.events, rtol)
    same = not any(section["differences"] for section in sections.values())
    return {
        "a": str(a.folder.path),
        "b": str(b.folder.path),
        "same": same and digests["first_different"] is None and losses["first_beyond"] is None,
        "sections": sections,
        "data_digests": digests,
        "losses": losses,
        "notes": _notes("A", a) + _notes("B", b),
    }


def _section(
    a: dict[str, Any] | None,
    b: dict[str, Any] | None,
    own: Callable[[str], bool] = lambda name: False,
) -> dict[str, Any]:
    """The names whose values differ; a name that only one has is None on the other side."""
    unknown = [name for name, side in (("A", a), ("B", b)) if side is None]
    if a is None or b is None:
        return {"differences": {}, "own": {}, "compared": 0, "unknown": unknown}
    names = sorted(a.keys() | b.keys())
    pairs = {name: [a.get(name), b.get(name)] for name in names if a.get(name) != b.get(name)}
    return {
        "differences": {name: pair for name, pair in pairs.items() if not own(name)},
        "own": {name: pair for name, pair in pairs.items() if own(name)},
        "compared": len(names),
        "unknown": [],
    }


def _computed(run: Recorded) -> dict[str, Any]:
    return {name: value for name, value in run.identity.items() if name not in DATA}


def _data(run: Recorded, other: Recorded) -> dict[str, Any]:
    """What both have recorded of their data."""
    return {
        name: run.identity[name]
        for name in DATA
        if {name} <= run.identity.keys() & other.identity.keys()
    }


def _settings(run: Recorded, other: Recorded) -> dict[str, Any]:
    """The config without what is a part of both identities, and so is compared there."""
    shared = run.identity.keys() & other.identity.keys()
    return {name: value for name, value in run.config.items() if name not in shared}


def _source(run: Recorded) -> dict[str, Any] | None:
    git = (run.launch or {}).get("git")
    if not isinstance(git, dict) or git.get("problem"):
        return None
    return {
        "commit": git.get("commit"),
        "patch": run.codes[-1][1] or None,
        "untracked": git.get("untracked") or [],
    }


def _installed(a: Recorded, b: Recorded) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """All packages of both; where one has no list, what both logs name."""
    if a.packages is not None and b.packages is not None:
        return _with_python(a), _with_python(b)
    ours, theirs = _logged_versions(a.events), _logged_versions(b.events)
    common = ours.keys() & theirs.keys()
    return (
        {name: ours[name] for name in common} if ours else None,
        {name: theirs[name] for name in common} if theirs else None,
    )


def _with_python(run: Recorded) -> dict[str, Any]:
    return {"python": (run.launch or {}).get("python")} | (run.packages or {})


def _logged_versions(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The versions in the newest `start` or `resume` that has some."""
    for event in reversed(events):
        if event["event"] in ("start", "resume"):
            found = {name: event[name] for name in LOGGED_VERSIONS if event.get(name)}
            if found:
                return found
    return {}


def _around(run: Recorded) -> dict[str, Any] | None:
    if run.environment is None or run.launch is None:
        return None
    devices = flat({"devices": run.launch.get("devices")})
    return run.environment | devices | {"platform": run.launch.get("platform")}


def _launched(run: Recorded) -> dict[str, Any]:
    """Facts that are each launch's own, and change what is computed by rounding at most."""
    launches = [e for e in run.events if e["event"] in ("start", "resume")]
    steps = [event["step"] for event in run.events if event["event"] == "step"]
    sizes = [event.get("world_size") for event in launches]
    return {
        "launches": len(launches),
        "world_sizes": [s for k, s in enumerate(sizes) if k == 0 or s != sizes[k - 1]],
        "hosts": (run.launch or {}).get("hosts"),
        "canon_backend": (run.launch or {}).get("canon_backend"),
        "command": ((run.launch or {}).get("command") or {}).get("again"),
        "data_folders": ((run.launch or {}).get("data") or {}).get("folders"),
        "last_step": max(steps, default=0),
    }


def _notes(name: str, run: Recorded) -> list[str]:
    changes = sum(one != other for one, other in zip(run.codes, run.codes[1:], strict=False))
    if not changes:
        return []
    return [
        f"{name} changed its code {changes} time(s) between its {len(run.codes)} launches; the "
        "newest is compared"
    ]


# ---- what they saw, and what came out


def digests_by_step(events: Sequence[dict[str, Any]]) -> dict[int, str]:
    """The digest of each step's token ids: a line has those since the line before, its own last."""
    digests: dict[int, str] = {}
    for event in events:
        listed = event.get("data_digests") if event["event"] == "step" else None
        for back, digest in enumerate(reversed(listed or [])):
            digests[event["step"] - back] = digest
    return digests


def compare_digests(a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """From which step on the runs saw other data; steps that only one has logged do not count."""
    ours, theirs = digests_by_step(a), digests_by_step(b)
    common = sorted(ours.keys() & theirs.keys())
    parted = [step for step in common if ours[step] != theirs[step]]
    return {
        "logged": [len(ours), len(theirs)],
        "common": len(common),
        "different": len(parted),
        "first_different": parted[0] if parted else None,
        "last_common": common[-1] if common else None,
    }


def compare_losses(
    a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]], rtol: float
) -> dict[str, Any]:
    """From which step on losses differ at all, and by more than `rtol` of the larger one.

    NaN equals NaN; a value that is finite in one run alone is beyond any rounding.
    """
    ours, theirs = _losses(a), _losses(b)
    common = sorted(ours.keys() & theirs.keys())
    one = np.array([ours[step] for step in common], dtype=np.float64)
    other = np.array([theirs[step] for step in common], dtype=np.float64)
    equal = (one == other) | (np.isnan(one) & np.isnan(other))
    finite = np.isfinite(one) & np.isfinite(other)
    apart = np.zeros(len(common))
    x, y = one[finite], other[finite]
    larger = np.maximum(np.maximum(np.abs(x), np.abs(y)), np.finfo(np.float64).tiny)
    apart[finite] = np.abs(x - y) / larger
    apart[~finite & ~equal] = math.inf
    first, beyond = np.flatnonzero(~equal), np.flatnonzero(apart > rtol)
    largest = int(apart.argmax()) if len(common) else None
    at = common[beyond[0]] if len(beyond) else None
    return {
        "common": len(common),
        "rtol": rtol,
        "first_unequal": common[first[0]] if len(first) else None,
        "first_beyond": at,
        "there": None if at is None else [json_value(ours[at]), json_value(theirs[at])],
        "largest": None if largest is None else json_value(float(apart[largest])),
        "largest_step": None if largest is None else common[largest],
        "last_common": common[-1] if common else None,
    }


def _losses(events: Sequence[dict[str, Any]]) -> dict[int, float]:
    return {
        event["step"]: number(event["loss"])
        for event in events
        if event["event"] == "step" and event.get("loss") is not None
    }
