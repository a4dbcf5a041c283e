"""Read what the report shows of one run: its config, its log and its evaluations, checked.

The first half of `python -m eval report`; content.py turns these into numbers to show.
No torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canon_pretrain.errors import UserError
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.names import unique_labels
from eval.results import RESULTS, Results, read_results

SUITES = ("discriminative", "jrt", "babilong", "birth-year", "validation")


def suite_order(name: str) -> tuple[int, str]:
    """The sort key of a suite: the paper's order, and what it does not have after that."""
    return (SUITES.index(name) if name in SUITES else len(SUITES), name)


@dataclass(frozen=True)
class Run:
    """One run as it lies on disk; `label` is its name in this report, unlike any other's.

    `folders[k]` is where `evaluations[k]` lies, with its samples.
    """

    label: str
    folder: RunFolder
    config: dict[str, Any]
    events: list[dict[str, Any]]
    evaluations: list[Results]
    folders: list[Path]

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
    """Read every run. Raises UserError for what is no run, or holds another run's results."""
    labels = unique_labels(paths)
    return [_read_run(path, label) for path, label in zip(paths, labels, strict=True)]


def _read_run(path: Path, label: str) -> Run:
    folder = RunFolder(path)
    config = folder.read_config()
    if not isinstance(config, dict) or not isinstance(config.get("identity"), dict):
        raise UserError(f"{folder.config_file} is damaged: it has no `identity`")
    found = _read_evaluations(folder, config)
    evaluations, folders = [results for results, _ in found], [place for _, place in found]
    return Run(label, folder, config, _read_events(folder), evaluations, folders)


def _read_events(folder: RunFolder) -> list[dict[str, Any]]:
    """The log's events, each with the fields that the report counts on."""
    events = folder.read_log()
    try:
        for event in events:
            needed = {"step": ("step", "tokens"), "resume": ("from_step",)}
            for field in needed.get(event["event"], ()):
                if not isinstance(event[field], int):
                    raise TypeError(f"{field} is {event[field]!r}")
    except (KeyError, TypeError) as error:
        raise UserError(f"{folder.log_file} is damaged: {error!r}") from None
    return events


def _read_evaluations(folder: RunFolder, config: dict[str, Any]) -> list[tuple[Results, Path]]:
    """All results in the run folder and where; by suite, cut short ones first, by step and time.

    Raises UserError for results of another run, checkpoint or suite than their place says.
    """
    found = []
    for path in sorted((folder.path / "evals").glob(f"step-*/*/*/{RESULTS}")):
        results = read_results(path)
        _check_place(path, results, folder, config)
        asked = results.asked
        # the last of a suite is shown first: a whole result before a trial, then the newest
        order = (asked["suite"], asked["limit"] is None, asked["step"], path.stat().st_mtime_ns)
        found.append((order, results, path.parent))
    return [(results, place) for _, results, place in sorted(found, key=lambda entry: entry[0])]


def _check_place(path: Path, results: Results, folder: RunFolder, config: dict[str, Any]) -> None:
    """Raise UserError unless `results` are of this run and lie where their step and suite say."""
    asked = results.asked
    scores = [score for metrics in results.scores.values() for score in metrics.values()]
    for score in scores:
        if not isinstance(score.value, int | float):
            raise UserError(f"{path}: damaged (a score is {score.value!r}); evaluate again")
    again = "delete it and evaluate this run's checkpoint"
    if not _is_checkpoint_of(folder.path, Path(asked["checkpoint"])):
        raise UserError(
            f"{path} holds results of {asked['checkpoint']}, which is no checkpoint of "
            f"{folder.path}: {again}"
        )
    trained_on = config["identity"].get("data_fingerprint")
    if asked["train_fingerprint"] != trained_on:
        raise UserError(
            f"{path} holds results of a model trained on data {asked['train_fingerprint']}, but "
            f"{folder.path} was trained on {trained_on}: {again}"
        )
    place = (f"step-{asked['step']}", asked["suite"])
    if place != (path.parents[2].name, path.parents[1].name):
        raise UserError(f"{path} holds results of {'/'.join(place)}: {again}")


def _is_checkpoint_of(run: Path, checkpoint: Path) -> bool:
    """Whether `checkpoint`, as `eval run` was given it, lies in the folder `run`.

    A path that does not exist here was relative to another working directory, or the run was
    moved since: then the run folder's name must be the same.
    """
    if checkpoint.resolve().is_relative_to(run.resolve()):
        return True
    return not checkpoint.exists() and checkpoint.parent.parent.name == run.resolve().name
