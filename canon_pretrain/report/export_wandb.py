"""A run's log as a run of wandb; a target of export.py, which says when and why.

    offline    DIR/wandb/offline-run-TIME-ID, for `wandb sync`: one folder a run, since syncing the
               folder of a second launch would replace what the first one's had brought
    online     the run with the log's run_id. A copy of the whole replaces it; a live one goes on
               where wandb says it stands, so what a dead network has swallowed is made up for

Console output, source code and git are not collected: what they hold is nobody's business there.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from canon_pretrain.core.errors import UserError
from canon_pretrain.report.export import MODES
from canon_pretrain.report.export_rows import About, Row
from canon_pretrain.run.provenance import allowed_environment

INIT_S = 60.0
FINISH_S = 40.0
"""Less than a live copy has in all, so that wandb itself says what it could not send."""


@dataclass(frozen=True)
class WandbSettings:
    """How a run is shown; an empty text leaves the choice to the run, or to the account."""

    mode: str
    project: str
    entity: str
    name: str
    tags: tuple[str, ...]
    live: bool


def settings_of(arguments: argparse.Namespace, environ: Mapping[str, str]) -> WandbSettings:
    """The command line's settings; what it does not say, wandb's variables do, or torchtitan's."""
    mode = arguments.mode or environ.get("WANDB_MODE") or "offline"
    if mode not in MODES:
        raise UserError(f"WANDB_MODE = {mode!r}: expected one of {', '.join(MODES)}")
    return WandbSettings(
        mode=mode,
        project=arguments.project or environ.get("WANDB_PROJECT") or "canon_pretrain",
        entity=arguments.entity or environ.get("WANDB_ENTITY") or environ.get("WANDB_TEAM") or "",
        name=arguments.name or environ.get("WANDB_NAME") or environ.get("WANDB_RUN_NAME") or "",
        tags=tuple(arguments.tags),
        live=arguments.follow,
    )


def _keep_to_the_allow_list(environ: MutableMapping[str, str], argv: list[str]) -> None:
    """Remove this process's arguments and its SLURM_ variables beyond the allow-list, in place: a
    live wandb sends all of both, and a job's comment may hold anything."""
    del argv[1:]
    allowed = allowed_environment(environ)
    for name in [name for name in environ if name.startswith("SLURM") and name not in allowed]:
        del environ[name]


class WandbTarget:
    """Rows go to a wandb run, drawn over tokens. Raises UserError where wandb will not begin."""

    def __init__(self, folder: Path, facts: About, settings: WandbSettings) -> None:
        if settings.mode != "online":
            os.environ["WANDB_ERROR_REPORTING"] = "false"  # else it tells its makers, offline too
        try:
            import wandb
        except ImportError:
            raise UserError("wandb is not installed: pip install wandb") from None
        self._facts, self._settings = facts, settings
        _keep_to_the_allow_list(os.environ, sys.argv)
        self._folder = folder / "wandb"
        self._before = self._offline_folders()
        is_online = settings.mode == "online"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                mode=settings.mode,  # type: ignore[arg-type]  # one of MODES
                dir=folder,
                id=facts.run_id,
                # a whole copy replaces what is there; offline, wandb cannot look
                resume="allow" if is_online and settings.live else None,
                project=settings.project,
                entity=settings.entity or None,
                name=settings.name or facts.name,
                group=facts.group,
                tags=[tag[:64] for tag in dict.fromkeys((*facts.tags, *settings.tags))],
                config=dict(facts.config),
                settings=wandb.Settings(
                    console="off",
                    disable_code=True,
                    disable_git=True,
                    save_code=False,
                    symlink=False,
                    silent=settings.live or not is_online,
                    # a copy that is made later would show the machine that makes it
                    x_disable_stats=not settings.live,
                    x_disable_meta=not settings.live,
                    init_timeout=INIT_S,
                    finish_timeout=FINISH_S if settings.live else 0.0,
                ),
            )
        except (wandb.Error, ValueError, OSError) as error:  # ValueError: its variables
            raise UserError(f"wandb does not begin: {error}") from None
        self._run.define_metric("tokens")
        self._run.define_metric("*", step_metric="tokens")
        self._next = self._run.starting_step

    def write(self, row: Row) -> None:
        """Log a row; one of a step that wandb has passed is left out, since it takes none back."""
        if row.step < self._next:
            return
        self._next = row.step
        values = {"step": row.step, "tokens": row.tokens, "time": row.time, **row.values}
        self._run.log(values, step=row.step)

    def restart(self, step: int) -> None:
        """Nothing: a launch that goes back takes the same steps again, and wandb keeps the first.

        Where it does not (another branch), a whole copy puts that right.
        """

    def flush(self) -> None:
        """All that was there is in the new folder now: those of earlier launches may go."""
        while self._before:
            shutil.rmtree(self._before.pop(), ignore_errors=True)

    def finish(self) -> str:
        self._run.finish()
        self.flush()
        if self._settings.mode == "disabled":
            return "wandb is disabled, nothing was written"
        if self._settings.mode == "online":
            return f"{self._run.url or 'wandb'}"
        # the time of the run, not of this copy: every copy has the same name
        began = datetime.fromtimestamp(self._facts.began, UTC)
        final = self._folder / f"offline-run-{began:%Y%m%d_%H%M%S}-{self._facts.run_id}"
        (made,) = self._offline_folders()
        made.rename(final)
        return f"{final}; `wandb sync {final}` uploads it"

    def _offline_folders(self) -> list[Path]:
        """What earlier copies of this run have left here."""
        return sorted(self._folder.glob(f"offline-run-*-{self._facts.run_id}"))
