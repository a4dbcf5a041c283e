"""RUN/README.md: what a run folder holds and what can be done with it, for who finds it later.

run/provenance.py writes it at each launch. Plain Markdown, read in a terminal as well.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

IS_OURS = "<!-- canon_pretrain writes this file at each launch; without this line it is yours -->"

ACT_ONCE = ("--run.stop_at", "--run.allow_changes", "--checkpoint.fresh", "--checkpoint.load_step")
"""What a launch that goes on does not repeat."""

PLACES = (
    ("config.json", "every setting of the run, and the facts that make it what it is"),
    ("run.json", "the run's id, and how many launches it has had"),
    ("launches/NNN/", "what launch NNN was: command, machine, packages, code, environment"),
    ("code/NNN/", "the source that Slurm jobs launch it from; the newest counts"),
    ("log.jsonl", "one line an event, the source of every curve; only ever appended to"),
    ("status.json", "where the run stands; rewritten every few seconds while it runs"),
    ("lock.json", "who writes this folder now; gone when nobody does"),
    ("checkpoint/step-N/", "weights and training state; manifest.json has every file's hash"),
    ("checkpoint/quarantine/", "damaged checkpoints, with the reason beside each"),
    ("evals/step-N/", "results of evaluations; holds/ names steps that one still waits for"),
    ("report/", "a page of curves and scores, by `python -m eval report`"),
    ("archive/", "what the run left behind: abandoned branches, the time before a fresh start"),
    ("comm_traces/", "where each rank stood when one hung"),
    (
        "profile_traces/",
        "traces of --profiling; `python -m canon_pretrain.run profile` reads them",
    ),
    ("memory_snapshot/", "what held the GPU's memory, where that was asked for"),
    ("wandb/, tb/", "copies of the log for wandb and TensorBoard, where they are on"),
    ("DONE", "written last: the run has reached its end"),
)


def command_again(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """The command that goes on with the run, for a shell; `arguments` without secrets."""
    program = "python -m canon_pretrain.train"
    ranks, here = environ.get("WORLD_SIZE", "1"), environ.get("LOCAL_WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in environ or ranks != "1":
        nodes = int(ranks) // max(int(here), 1)
        many = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT "
        per_node = f"--nproc-per-node {here}"
        program = f"torchrun {many if nodes > 1 else ''}{per_node} -m canon_pretrain.train"
    return f"{program} {shlex.join(_repeated(arguments))}".rstrip()


def _repeated(arguments: Sequence[str]) -> list[str]:
    """The arguments without ACT_ONCE and their values."""
    words: list[str] = []
    dropping = False
    for word in arguments:
        if word.startswith("--"):
            dropping = word.partition("=")[0].replace("-", "_").replace("__", "--", 1) in ACT_ONCE
        if not dropping:
            words.append(word)
    return words


def readme(run: Path, launch: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The text for the folder `run` (absolute); `launch` is launch.json, `config` the job."""
    job, training = config.get("job", {}), config.get("training", {})
    title = str(job.get("description") or run.name)
    folder = shlex.quote(str(run))
    step = training.get("steps", "N")
    again = launch["command"]
    places = "\n".join(f"| `{name}` | {what} |" for name, what in PLACES)
    return f"""\
{IS_OURS}

# {title}

Run `{launch["run_id"]}`, to step {step}. Begun {_minute(launch["created"])}.

Launch {launch["launch"]}, begun {_minute(launch["time"])}: {launch["world_size"]} rank(s), the
first on {launch["host"]}. {_code(launch)}

The commands below are for the folder that it was started in:

    cd {shlex.quote(again["folder"])}

## Look at it

    python -m canon_pretrain.run status {folder}
    python -m canon_pretrain.run plot {folder} --out plot.html
    python -m canon_pretrain.run diff {folder} ANOTHER_RUN
    python -m canon_pretrain.checkpoint list {folder}

## Go on with it, or stop it

    {again["again"]}

It takes up the newest checkpoint that is whole. `touch {folder}/STOP` saves and stops.

## Evaluate it

    python -m eval run --checkpoint {folder}/checkpoint/step-{step} --suite validation
    python -m eval report {folder}

`python -m canon_pretrain.checkpoint list` names the steps that are there.

## What lies where

| file or folder | what it is |
|---|---|
{places}
"""


def _minute(time: str) -> str:
    """2026-11-20T16:09:54.386+00:00 as 2026-11-20 16:09 UTC."""
    return f"{time[:16].replace('T', ' ')} UTC"


def _code(launch: Mapping[str, Any]) -> str:
    """A sentence on which code the launch ran."""
    git = launch["git"]
    if not git["commit"]:
        return "Its code is in no commit that git knows."
    commit = f"Its code is commit {git['commit'][:12]} of {git['origin'] or git['folder']}"
    if not git["dirty"]:
        return f"{commit}."
    return f"{commit}, with the changes in launches/{launch['launch']:03}/source.patch."
