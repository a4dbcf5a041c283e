"""Read what the report shows of one run: its config, its log and its evaluations, checked.

The first half of `python -m eval report`; content.py turns these into numbers to show.
No torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.checkpoint.manifest import Manifest
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.text import printable
from canon_pretrain.run.folder import EVALS, RunFolder
from canon_pretrain.run.launches import read_run
from canon_pretrain.run.names import unique_labels
from canon_pretrain.run.results import RESULTS, SUITES, Results, read_results
from canon_pretrain.run.status import read_status


def suite_order(name: str) -> tuple[int, str]:
    """The sort key of a suite: held-out loss first, then the paper's order, then others."""
    return (SUITES.index(name) if name in SUITES else len(SUITES), name)


@dataclass(frozen=True)
class Run:
    """One run as it lies on disk; `label` is its name in this report, unlike any other's.

    `folders[k]` is where `evaluations[k]` lies, with its samples; `left_out` says which results in
    the folder are another run's. `failure`: the step at which the last launch failed and the
    reason, else None.
    """

    label: str
    folder: RunFolder
    config: dict[str, Any]
    events: list[dict[str, Any]]
    evaluations: list[Results]
    folders: list[Path]
    left_out: list[str] = field(default_factory=list)
    failure: tuple[int, str] | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """What makes the run what it is: see `run/folder.py`."""
        return self.config["identity"]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The `step` events, in order."""
        return [event for event in self.events if event["event"] == "step"]

    @property
    def launches(self) -> list[dict[str, Any]]:
        """The `start` and `resume` events, in order."""
        return [event for event in self.events if event["event"] in ("start", "resume")]


def is_outdated(folder: RunFolder, results: Results) -> bool:
    """Return whether the run's checkpoint of that step is there and is not the evaluated one."""
    evaluated = results.asked.get("content")
    try:
        checkpoint = CheckpointFolder.of_run(folder).step_path(results.asked["step"])
        return evaluated is not None and Manifest.read(checkpoint).content != evaluated
    except (UserError, OSError):
        return False


def text_of(results: Results) -> str:
    """The fingerprint of the text that a held-out loss is of; empty for another suite."""
    asked = results.asked
    return str(asked.get("held_out_fingerprint")) if asked["suite"] == "validation" else ""


def described(results: Results, task: str) -> dict[str, Any]:
    """What the task says of itself, as recorded: version, primary, chance ...; {} where unknown."""
    tasks = results.asked.get("tasks")
    found = tasks.get(task) if isinstance(tasks, dict) else None
    return found if isinstance(found, dict) else {}


def primary_metrics(results: Results, task: str) -> list[str]:
    """The metrics of `task` that a table of one line a task shows: as declared, else its first."""
    declared = described(results, task).get("primary") or []
    names = [declared] if isinstance(declared, str) else declared
    there = list(results.scores.get(task, {}))
    return [name for name in names if name in there] or there[:1]


def chance_of(results: Results, task: str, metric: str) -> float | None:
    """What guessing scores on `metric`, as the task or the part of it with that metric declares."""
    tasks = results.asked.get("tasks")
    for name in tasks if isinstance(tasks, dict) else ():
        recorded = described(results, name)
        metrics, chance = recorded.get("primary") or (), recorded.get("chance")
        ours = task in (name, recorded.get("part_of"))
        if ours and metric in metrics and isinstance(chance, int | float):
            return float(chance)
    return None


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read every run. Raises UserError for what is no run."""
    labels = unique_labels(paths)
    return [_read_run(path, label) for path, label in zip(paths, labels, strict=True)]


def _read_run(path: Path, label: str) -> Run:
    folder = RunFolder(path)
    config = folder.read_config()
    if not isinstance(config, dict) or not isinstance(config.get("identity"), dict):
        raise UserError(f"{folder.config_file} is damaged: it has no `identity`")
    found, left_out = _read_evaluations(folder, config)
    evaluations, folders = [results for results, _ in found], [place for _, place in found]
    return Run(
        label, folder, config, _read_events(folder), evaluations, folders, left_out,
        _read_failure(folder),
    )  # fmt: skip


def _read_failure(folder: RunFolder) -> tuple[int, str] | None:
    try:
        status = read_status(folder.status_file)
    except UserError:
        return None  # damaged: the log and the results are what is reported
    if status is None or status.state != "failed" or folder.done_file.exists():
        return None
    return status.step, printable(status.reason)


def _read_events(folder: RunFolder) -> list[dict[str, Any]]:
    events = folder.read_log()
    if any(event["event"] == "step" and "tokens" not in event for event in events):
        raise UserError(f"{folder.log_file} is damaged: it has a step without tokens")
    return events


def _read_evaluations(
    folder: RunFolder, config: dict[str, Any]
) -> tuple[list[tuple[Results, Path]], list[str]]:
    """All results of the run with their folders, and why others were left out, in sentences.

    By suite, cut short ones first, by step, and the newest last; but those of the checkpoint that
    the run has at that step after those of another, and losses of the run's own held-out text after
    those of another. Raises UserError for damaged ones.
    """
    found, left_out = [], []
    own_texts = str(config["identity"].get("held_out_fingerprint")).split("+")
    for path in sorted((folder.path / EVALS).glob(f"step-*/*/*/{RESULTS}")):
        results = read_results(path)
        if whose := _of_another_run(results.asked, folder, config):
            left_out.append(f"{path} is left out: it is of {whose}.")
            continue
        asked = results.asked
        is_own = not is_outdated(folder, results)
        written = (results.written, path.stat().st_mtime_ns)
        is_own_text = text_of(results) in own_texts
        order = (
            *(asked["suite"], asked["limit"] is None, asked["step"]),
            *(is_own, is_own_text, *written),
        )
        found.append((order, results, path.parent))
    found.sort(key=lambda entry: entry[0])
    return [(results, place) for _, results, place in found], left_out


def _of_another_run(asked: dict[str, Any], folder: RunFolder, config: dict[str, Any]) -> str | None:
    """Whose results these are, if not the run's: they belong to a run's id, wherever it is."""
    facts, run_id = read_run(folder), asked.get("run_id")
    if facts is not None and run_id not in (None, facts.run_id):
        return f"run {run_id} ({asked['checkpoint']}), and {folder.path} is run {facts.run_id}"
    data, trained_on = asked["train_fingerprint"], config["identity"].get("data_fingerprint")
    if data != trained_on:
        return f"a model trained on data {data}, and {folder.path} was trained on {trained_on}"
    return None
