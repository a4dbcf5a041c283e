"""Find the checkpoint of a command line argument, its run, and the recorded model. No torch."""

import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.checkpoint.manifest import HASH_WORKERS, DamagedCheckpoint, verify
from canon_pretrain.core.errors import UserError
from canon_pretrain.model.args import ModelArgs, with_mixers_in
from canon_pretrain.run.folder import MIXERS, RunFolder

LATEST = "latest"
JSON_TYPES = {"pattern": list, "layers": dict}
"""Types of the fields of ModelArgs that JSON has no type for."""
_MAX_DEPTH = 4  # RUN/archive/K-LABEL/checkpoint/step-N

logger = logging.getLogger(__name__)


def find_checkpoint(path: Path) -> tuple[Path, RunFolder]:
    """Return the step-N folder that a command's `path` names, and its run.

    RUN and RUN/checkpoint/latest name the newest undamaged checkpoint, the folder of an import its
    only step; any other path is returned unchecked. Raises UserError if there is no checkpoint.
    """
    run = RunFolder(path)
    if run.has_config():
        folder = CheckpointFolder.of_run(run)
        # an import's folder contains its only step itself, without checkpoint/
        import_folder = CheckpointFolder(path)
        if imported := import_folder.steps():
            return import_folder.step_path(imported[-1]), run
    elif path.name == LATEST:
        run = run_of_checkpoint(path)
        folder = CheckpointFolder(path.parent)
    else:
        return path, run_of_checkpoint(path)

    # The newest checkpoint that is not damaged.
    steps = folder.steps()
    for step in reversed(steps):
        checkpoint = folder.step_path(step)
        try:
            verify(checkpoint, workers=HASH_WORKERS)
        except DamagedCheckpoint as error:
            logger.warning(f"{error}; using the checkpoint before it")
        except OSError as error:
            raise UserError("checkpoint.unreadable", f"{checkpoint}: {error}") from None
        else:
            return checkpoint, run

    missing = "undamaged checkpoint" if steps else "checkpoint yet"
    raise UserError(
        "checkpoint.none",
        f"{run.path} has no {missing}: expected {folder.path}/step-N",
        path=run.path,
        damaged=steps,
    )


def run_of_checkpoint(checkpoint: Path) -> RunFolder:
    """Return the nearest run folder above RUN/checkpoint/step-N, or a step in its archives."""
    # RUN/checkpoint may be a link to another disk
    for path in (checkpoint.absolute(), checkpoint.resolve()):
        for parent in path.parents[:_MAX_DEPTH]:
            run = RunFolder(parent)
            if run.has_config():
                return run
    return RunFolder(checkpoint.resolve().parent.parent)


def model_args_of(folder: RunFolder) -> ModelArgs:
    """Return the model that a run's config.json records. Raises UserError for another version's."""
    return model_args(folder.read_config()["identity"], folder.config_file)


def model_args(identity: Mapping[str, Any], file: Path) -> ModelArgs:
    """Return the model of a run's identity, which is in `file`.

    The files of the user's own mixers are those that the run has copied.
    """
    values: dict[str, Any] = {}
    for f in fields(ModelArgs):
        # a field that an earlier version did not have is the default
        name = f"model.{f.name}"
        if name not in identity:
            continue
        value = identity[name]

        # not isinstance: a bool is no int; but JSON may hold 1 for 1.0
        default_type = JSON_TYPES.get(f.name, type(f.default))
        is_int_for_float = default_type is float and type(value) is int
        if type(value) is not default_type and not is_int_for_float:
            raise UserError(
                "run.other_version",
                f"{file} of another version: {name} = {value!r}",
                name=name,
                given=value,
            )
        values[f.name] = value
    return with_mixers_in(ModelArgs(**values), str(file.parent / MIXERS))
