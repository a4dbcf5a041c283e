"""Find the checkpoint of a command line argument, its run, and the recorded model. No torch."""

import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.checkpoint.manifest import HASH_WORKERS, DamagedCheckpoint, verify
from canon_pretrain.core.errors import UserError
from canon_pretrain.model.args import ModelArgs
from canon_pretrain.run.folder import RunFolder

LATEST = "latest"
_MAX_DEPTH = 4  # RUN/archive/K-LABEL/checkpoint/step-N

logger = logging.getLogger(__name__)


def find_checkpoint(given: Path) -> tuple[RunFolder, Path]:
    """Return the run and the step-N folder that a command's `given` path names.

    RUN and RUN/checkpoint/latest name the newest undamaged checkpoint, the folder of an import its
    only step; any other path is returned unchecked. Raises UserError if there is no checkpoint.
    """
    if RunFolder(given).has_config():
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
            logger.warning(f"{error}; using the checkpoint before it")
        except OSError as error:
            raise UserError("checkpoint.unreadable", f"{folder.step_path(step)}: {error}") from None
        else:
            return run, folder.step_path(step)
    which = "undamaged checkpoint" if steps else "checkpoint yet"
    raise UserError(
        "checkpoint.none",
        f"{run.path} has no {which}: expected {folder.path}/step-N",
        path=run.path,
        damaged=steps,
    )


def run_of_checkpoint(checkpoint: Path) -> RunFolder:
    """Return the nearest run folder above RUN/checkpoint/step-N, or a step in its archives."""
    # RUN/checkpoint may be a link to another disk
    paths = checkpoint.absolute(), checkpoint.resolve()
    above = [parent for path in paths for parent in path.parents[:_MAX_DEPTH]]
    runs = (RunFolder(folder) for folder in above if RunFolder(folder).has_config())
    return next(runs, RunFolder(checkpoint.resolve().parent.parent))


def model_args_of(folder: RunFolder) -> ModelArgs:
    """Return the model that a run's config.json records. Raises UserError for another version's."""
    return model_args(folder.read_config()["identity"], folder.config_file)


def model_args(identity: Mapping[str, Any], file: Path) -> ModelArgs:
    """Return the model of a run's identity, which is in `file`."""
    given = {}
    for f in fields(ModelArgs):
        # fields that an earlier version did not have are the default
        found = given[f.name] = identity.get(f"model.{f.name}", f.default)
        known = (int, float) if isinstance(f.default, float) else (type(f.default),)
        if type(found) not in known:
            raise UserError(
                "run.other_version",
                f"{file} of another version: model.{f.name} = {found!r}",
                name=f"model.{f.name}",
                given=found,
            )
    return ModelArgs(**given)
