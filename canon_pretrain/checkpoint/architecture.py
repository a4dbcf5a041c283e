"""Which checkpoint a command means, its run, and the architecture it records. No torch here."""

import logging
from dataclasses import fields
from pathlib import Path

from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.checkpoint.manifest import HASH_WORKERS, DamagedCheckpoint, verify
from canon_pretrain.core.errors import UserError
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.run.folder import RunFolder

LATEST = "latest"
_FLOORS = 4  # RUN/archive/K-LABEL/checkpoint/step-N

logger = logging.getLogger(__name__)


def find_checkpoint(given: Path) -> tuple[RunFolder, Path]:
    """Return the run and the step-N folder that a command's `given` path names.

    RUN and RUN/checkpoint/latest name the newest undamaged checkpoint, an import's folder its one
    step; any other path is returned unchecked. Raises UserError if the run has no checkpoint.
    """
    if _holds_a_run(RunFolder(given)):
        run = RunFolder(given)
        folder = CheckpointFolder.of_run(run)
        if imported := CheckpointFolder(run.path).steps():
            return run, CheckpointFolder(run.path).step_path(imported[-1])
    elif given.name == LATEST:
        run, folder = run_of_checkpoint(given), CheckpointFolder(given.parent)
    else:
        return run_of_checkpoint(given), given
    steps = folder.steps()
    for step in reversed(steps):
        try:
            verify(folder.step_path(step), workers=HASH_WORKERS)
        except DamagedCheckpoint as error:
            logger.warning(f"{error}; the newest checkpoint before it is meant")
        except OSError as error:
            raise UserError(
                "todo.architecture", f"{folder.step_path(step)} cannot be read: {error}"
            ) from None
        else:
            return run, folder.step_path(step)
    which = "undamaged checkpoint" if steps else "checkpoint yet"
    raise UserError(
        "todo.architecture", f"{run.path} has no {which}: expected {folder.path}/step-N"
    )


def run_of_checkpoint(checkpoint: Path) -> RunFolder:
    """Return the nearest run folder above RUN/checkpoint/step-N, or a step in its archives."""
    # RUN/checkpoint may be a link to another disk
    above = [*checkpoint.absolute().parents[:_FLOORS], *checkpoint.resolve().parents[:_FLOORS]]
    runs = (RunFolder(folder) for folder in above if _holds_a_run(RunFolder(folder)))
    return next(runs, RunFolder(checkpoint.resolve().parent.parent))


def _holds_a_run(folder: RunFolder) -> bool:
    """Whether there is a run's config.json: other programs write files of that name too."""
    return folder.config_file.is_file() and "identity" in folder.read_config()


def model_args_of(folder: RunFolder) -> ModelArgs:
    """Return the architecture that a run's config.json records; UserError if it is not ours."""
    identity = folder.read_config()["identity"]
    given = {}
    for f in fields(ModelArgs):
        # what an earlier version had no name for is the default
        found = given[f.name] = identity.get(f"model.{f.name}", f.default)
        known = (int, float) if isinstance(f.default, float) else (type(f.default),)
        if type(found) not in known:
            raise UserError(
                "todo.architecture",
                f"{folder.config_file} gives model.{f.name} as {found!r}, expected a value like "
                f"{f.default!r}: another version of this program wrote it; use that one",
            )
    return ModelArgs(**given)
