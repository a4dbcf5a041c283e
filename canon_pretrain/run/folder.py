"""What lies in a run folder, and the rule that one folder holds one run.

    config.json     the resolved job, the facts that make the run what it is (`identity`), and the
                    hash of each source file that the last launch used (`code`)
    run.json        the run's id, and how many launches it has had (run/launches.py)
    log.jsonl       one line an event (run/log.py)
    launches/NNN/   what each launch was: launch.json, config.json, packages.txt, environment.json,
                    and source.patch where the code was not that of a commit (run/provenance.py)
    code/NNN/       the source that job scripts launch the run from (run/snapshot.py)
    README.md       the same in plain words, and the commands that go on, show and evaluate
    status.json     where the run stands and whether it lives (run/status.py)
    lock.json       the launch that writes the folder, while there is one (run/lock.py)
    obeyed.json     options that act once in a job, and the job that obeyed them (run/once.py)
    STOP            made by a person or a script: save, and end
    checkpoint/     step-N/, written by the trainer
    evals/          results, written by `python -m eval`
    archive/        abandoned branches, and what stood there before --checkpoint.fresh
    comm_traces/    stacks and communication traces of ranks that hung
    profile_traces/, memory_snapshot/    where --profiling.* is on
    wandb/, tb/     copies of the log for wandb and TensorBoard, where they are on
    slurm.log       what the launches of Slurm jobs have printed (slurm/pretrain_1b3.sh)
    restarts.json   how often such a job failed without a new checkpoint (cluster/chain.py)
    restarts.toml   the config that it began with, for its restarts
    preflight/      what its nodes reported before each launch
    DONE            written last, when training.steps is reached

The trainer writes it, eval and the report read it. No torch here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import UnreadableFile, read_json, write_atomic, write_json
from canon_pretrain.run.log import read_log

CHECKPOINTS = "checkpoint"
EVALS = "evals"


def config_record(
    config: dict[str, Any], identity: dict[str, Any], code: Mapping[str, str] | None
) -> dict[str, Any]:
    """Return the content of config.json; without `code`, that is not known."""
    return {"identity": identity, "config": config} | ({"code": dict(code)} if code else {})


@dataclass(frozen=True)
class RunFolder:
    """Paths in one run folder and the few files that are not the log or a checkpoint."""

    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def run_file(self) -> Path:
        return self.path / "run.json"

    @property
    def readme_file(self) -> Path:
        return self.path / "README.md"

    @property
    def launches(self) -> Path:
        return self.path / "launches"

    def launch_path(self, number: int) -> Path:
        """Where the record of the run's launch `number`, from 1, lies."""
        return self.launches / f"{number:03}"

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def log_file(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def status_file(self) -> Path:
        return self.path / "status.json"

    @property
    def lock_file(self) -> Path:
        return self.path / "lock.json"

    @property
    def stop_file(self) -> Path:
        return self.path / "STOP"

    @property
    def done_file(self) -> Path:
        return self.path / "DONE"

    @property
    def obeyed_file(self) -> Path:
        return self.path / "obeyed.json"

    @classmethod
    def of_checkpoint(cls, checkpoint: Path) -> "RunFolder":
        """The run that a RUN/checkpoint/step-N folder belongs to."""
        return cls(checkpoint.resolve().parent.parent)

    def read_config(self) -> dict[str, Any]:
        """Return the content of config.json. Raises UserError if it is missing or damaged."""
        try:
            return read_json(self.config_file, finite=False)
        except UnreadableFile as error:
            if not error.is_missing:
                raise
            raise UserError(
                f"{self.path} is not a run folder: it has no {self.config_file.name}. Expected a "
                "folder that canon_pretrain.train wrote (job.dump_folder)"
            ) from None

    def read_log(self) -> list[dict[str, Any]]:
        """`read_log` of log.jsonl. Raises UserError where there is none that can be read."""
        try:
            return read_log(self.log_file)
        except UnreadableFile as error:
            if not error.is_missing:
                raise
            raise UserError(
                f"{self.path} has no log: {self.log_file.name} is missing. The trainer writes it "
                "at its first launch"
            ) from None

    def write_config(
        self,
        config: dict[str, Any],
        identity: dict[str, Any],
        code: Mapping[str, str] | None = None,
    ) -> None:
        """Record the resolved job, and the hashes of the code; the folder is made if need be."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.config_file, config_record(config, identity, code))

    def write_done(self, step: int) -> None:
        """Mark the run finished; written after its last checkpoint."""
        write_atomic(self.done_file, f"{step}\n".encode())
