"""Boards with planted runs, as the trainer writes them."""

import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from canon_pretrain.cluster.planned import planned_identity
from canon_pretrain.cluster.sweep import PlannedRun, read_sweep
from canon_pretrain.run.config import read_experiment
from tests.report_runs import launch, plant_run, step
from tests.support import ROOT, canon_stage

main = canon_stage("playground")

COPY = ROOT / "train_configs" / "playground" / "tiny" / "copy.toml"
HEAD = f"""
seeds = [0, 1, 2]
[tasks.copy]
config = "{COPY}"
[tasks.copy.difficulties.n8]
"data.task.n" = 8
[tasks.copy.difficulties.n16]
"data.task.n" = 16
"""
ROPE = '[architectures.rope]\ncanon_set = ""\n'
CANON = '[architectures.rope_canon]\ncanon_set = "ABCD"\n'
NOPE = '[architectures.nope]\ncanon_set = ""\nposition = "nope"\n'
BOARD = HEAD + ROPE + CANON + NOPE
VOCABULARY = 70  # of the task
SCORE_STDERR = 0.06  # of each score that has a name


def plant_board(
    folder: Path,
    scores: Callable[[PlannedRun], Mapping[int, float | Mapping[str, float]] | None],
    text: str = BOARD,
) -> Path:
    """Plan a board in `folder`, plant DONE runs with those scores by step; return BOARD.toml.

    A run with None is not trained; NaN is a validation of a model that has diverged. A number is
    the score `exact`; several scores are by name.
    """
    path = folder / "board.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    main(["plan", str(path), "--out", str(folder)])
    configs = {each: read_experiment(Path(each)) for each in read_sweep(folder).configs}
    for run in read_sweep(folder).runs:
        if (found := scores(run)) is not None:
            plant_score_run(folder / run.name, run, configs[run.config], found)
    return path


def plant_score_run(
    folder: Path,
    run: PlannedRun,
    config: Mapping[str, Any],
    scores: Mapping[int, float | Mapping[str, float]],
) -> None:
    identity = planned_identity(dict(config)) | {"model.vocab_size": VOCABULARY}
    identity |= {"held_out_fingerprint": "0f" * 32, "model.init_seed": run.seed}
    identity |= {"optimizer.lr": run.learning_rate or config["optimizer"]["lr"]}
    identity |= {"data.data_seed": run.seed}
    events = [launch("start", 1, canon_pretrain="0.1.0", git_commit="5b" * 20, hosts=["laptop"])]
    about = f"{config['data']}{config['training']['seq_len']}{run.seed}".encode()
    first, logged = int(hashlib.sha256(about).hexdigest()[:15], 16), 0
    for at, value in scores.items():
        named = value if isinstance(value, Mapping) else {"exact": value, "first_1": 1.0}
        score = next(iter(named.values()))
        digests = [f"{first + number:016x}" for number in range(logged + 1, at + 1)]
        logged, loss = at, "NaN" if math.isnan(score) else 3.0 - score
        events.append(step(at, loss) | {"data_digests": digests})
        event = {"event": "validation", "step": at, "loss": loss}
        if not math.isnan(score):  # of a model that has diverged there are none
            event["scores"] = dict(named)
            if isinstance(value, Mapping):  # else as in logs of earlier versions
                event["score_stderrs"] = dict.fromkeys(named, SCORE_STDERR)
        events.append(event | {"time": events[-1]["time"]})
    plant_run(folder, events, done=True, **{k.replace(".", "__"): x for k, x in identity.items()})


def curve(level: float, seed: int, num_points: int = 10, last: int = 500) -> dict[int, float]:
    """Return a score that rises from 0 to about `level`, in multiples of 1/64."""
    rng = np.random.default_rng([seed, round(1000 * level)])
    at = np.linspace(0, 1, num_points + 1)[1:]
    rise = np.clip(level * at ** rng.uniform(0.5, 1.5) + rng.normal(0, 0.01, num_points), 0, 1)
    steps = (at * last).round().astype(int).tolist()
    return dict(zip(steps, (rise * 64).round() / 64, strict=True))


def large_board(num_tasks: int, num_seeds: int, rates: str) -> str:
    """Return a board of 5 architectures x tasks x seeds x learning rates."""
    kinds = ("rope", ""), ("rope", "ABCD"), ("nope", ""), ("nope", "ABCD"), ("rope", "B")
    text = f"seeds = {[*range(num_seeds)]}\n"
    for position, canon in kinds:
        text += f"[architectures.{position}{'_canon' * bool(canon)}{canon}]\n"
        text += f'position = "{position}"\ncanon_set = "{canon}"\n'
    for k in range(num_tasks):
        text += f'[tasks.t{k}]\nconfig = "{COPY}"\nlearning_rates = {rates}\n'
        text += f'set = {{ "data.task.n" = {8 + k} }}\n'
    return text
