"""The windows of a step of a run, with documents and texts: from its config and its shards alone.

The sampler is a function of (seed, step), so the world size does not matter. Shards are checked at
every read; the log, where it has the step, must have the digest of its windows. No torch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import parsing
from canon_pretrain.data.loader import samples_digest
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.data.sampler import Order
from canon_pretrain.data.tokenizer import Tokenizer
from canon_pretrain.report.diff import digests_by_step
from canon_pretrain.report.record import RunRecord
from canon_pretrain.run.folder import RunFolder
from canon_pretrain.run.log import Event

ANCHOR = "a"
"""A text before tokens that begin inside a document: a decoder drops the first space of a text."""


class Part(NamedTuple):
    """A document's tokens in a window: from `start` on, of the document's `document_tokens`.

    `first`: the place of the first of them in the window.
    """

    source: str
    fingerprint: str
    document: int
    document_tokens: int
    start: int
    first: int
    ids: list[int]
    text: str


class Window(NamedTuple):
    """A window of the step: its sample number, token ids int64 [n] without padding, its parts."""

    sample: int
    ids: np.ndarray
    parts: list[Part]


class Launch(NamedTuple):
    """What determined the windows of a launch, which began after `from_step`."""

    from_step: int
    fingerprint: str | None
    folders: list[Path]
    weights: list[float]
    order: Order
    data_seed: int
    seq_len: int
    batch_size: int
    exclude: str

    @classmethod
    def of(cls, from_step: int, fingerprint: str | None, folder: RunFolder) -> Self:
        """Read the config.json of a run or a launch. Raises UserError, also of a task's run."""
        config = folder.read_config()
        with parsing(folder.config_file):
            data = config["config"]["data"]
            training = config["config"]["training"]
            if data.get("task", {}).get("name"):
                raise UserError(
                    "explain.task",
                    f"{folder.path} was trained on a synthetic task, which has no documents: "
                    "`canon synthetic show` prints its windows",
                )
            folders = [Path(path) for path in data.get("paths") or [data["path"]]]
            return cls(
                from_step=from_step,
                fingerprint=fingerprint,
                folders=folders,
                weights=data.get("weights") or [1.0] * len(folders),
                order=data.get("order", "random"),
                data_seed=int(data["data_seed"]),
                seq_len=int(training["seq_len"]),
                batch_size=int(training["global_batch_size"]),
                exclude=data.get("exclude", ""),
            )


class StepReader:
    """Reads the windows of a run's steps."""

    def __init__(self, run: RunRecord, folders: Sequence[Path] = ()) -> None:
        """Read the run's launches; `folders` replace those of its data, which may have moved.

        Raises UserError, also for a run on a synthetic task.
        """
        self.run = run
        self._folders = folders
        self._mixtures: dict[str, Mixture] = {}

        # Without a log, all steps are those of config.json.
        own = Launch.of(0, run.identity.get("data_fingerprint"), run.folder)
        self._launches: list[Launch] = []
        self._digests: dict[int, str] = {}
        if run.folder.log_file.exists():
            self._digests = digests_by_step(run.events)
            for event in run.launch_events:
                launch = self._launch(event, own)
                # a launch that went back replaces those that began after its step
                earlier = [x for x in self._launches if x.from_step < launch.from_step]
                self._launches = [*earlier, launch]
        if not self._launches or self._launches[0].from_step > 0:
            self._launches = [own, *self._launches]

    def _launch(self, event: Event, own: Launch) -> Launch:
        """Return the launch of a `start` or `resume` event; one without a record had `own`."""
        fingerprint = event.get("data_fingerprint", own.fingerprint)
        folder = RunFolder(self.run.folder.launch_path(event.get("segment", 0)))
        if folder.config_file.exists():
            return Launch.of(event.from_step, fingerprint, folder)
        return own._replace(from_step=event.from_step, fingerprint=fingerprint)

    def read(self, step: int, tokenizer: Tokenizer) -> list[Window]:
        """Return the windows of a step, from 1. Raises UserError if the log has others."""
        launch, samples = self._samples(step)
        mixture = self._mixture(launch)
        batch, _ = mixture.read(
            launch.data_seed, samples, slice(None), launch.order, launch.seq_len
        )
        digest = f"{samples_digest(batch):016x}"
        if self._digests.get(step, digest) != digest:
            raise UserError(
                "explain.other_windows",
                f"step {step} of {self.run.folder.path} had other windows: their digest in the log "
                f"is {self._digests[step]}, not {digest}. Pass a step that this version trained",
                step=step,
            )

        places, _ = mixture.places(
            launch.data_seed, samples, slice(None), launch.order, launch.seq_len
        )
        windows = []
        for sample, place, row in zip(samples, places, batch, strict=True):
            ids = row[: place.stop - place.start]
            parts = self._parts(mixture, place.source, place.start, ids, tokenizer)
            windows.append(Window(sample, ids, parts))
        return windows

    def _samples(self, step: int) -> tuple[Launch, range]:
        """Return the launch of a step and its samples: batch sizes may differ between launches."""
        launches = [launch for launch in self._launches if launch.from_step < step]
        ends = [launch.from_step for launch in launches[1:]] + [step - 1]
        first = 0
        for launch, end in zip(launches, ends, strict=True):
            first += (end - launch.from_step) * launch.batch_size
        return launches[-1], range(first, first + launches[-1].batch_size)

    def _mixture(self, launch: Launch) -> Mixture:
        """Open the data of a launch, once. Raises UserError if they are not those it had."""
        key = repr((launch.folders, launch.weights, launch.exclude))
        folders = self._folders or launch.folders
        if key not in self._mixtures:
            mixture = Mixture.open(folders, launch.weights, launch.exclude)
            if launch.fingerprint not in (None, mixture.fingerprint):
                names = ", ".join(map(str, folders))
                raise UserError(
                    "explain.other_data",
                    f"{names} has the fingerprint {mixture.fingerprint[:16]}, the run's data "
                    f"{str(launch.fingerprint)[:16]}: pass the folders of its data with --data",
                    given=mixture.fingerprint,
                    expected=launch.fingerprint,
                )
            self._mixtures[key] = mixture
        return self._mixtures[key]

    @staticmethod
    def _parts(
        mixture: Mixture, source: int, start: int, ids: np.ndarray, tokenizer: Tokenizer
    ) -> list[Part]:
        """Return the documents of a window that begins at token `start` of a source."""
        shards = mixture.sources[source]
        stop = start + len(ids)
        parts = []
        for document in shards.documents_in(start, stop):
            begin = max(start, document.start)
            part_ids = ids[begin - start : min(stop, document.end) - start].tolist()
            parts.append(
                Part(
                    source=mixture.names[source],
                    fingerprint=shards.fingerprint,
                    document=document.number,
                    document_tokens=document.end - document.start,
                    start=begin - document.start,
                    first=begin - start,
                    ids=part_ids,
                    text=text_of(tokenizer, part_ids, is_inside=begin > document.start),
                )
            )
        return parts

    def close(self) -> None:
        for mixture in self._mixtures.values():
            mixture.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def text_of(tokenizer: Tokenizer, ids: Sequence[int], *, is_inside: bool) -> str:
    """Return the text of tokens, with the first space if they begin inside a document."""
    if not is_inside:
        return tokenizer.decode(list(ids))
    anchor_ids = tokenizer.encode(ANCHOR).tolist()
    return tokenizer.decode([*anchor_ids, *ids]).removeprefix(ANCHOR)
