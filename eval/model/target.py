"""The model to evaluate: a run's checkpoint, or an exported folder.

An export has no run: results need --out, and what reads shards needs --data.
"""

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from canon_pretrain.checkpoint.folder import CheckpointFolder
from canon_pretrain.checkpoint.manifest import Manifest
from canon_pretrain.checkpoint.weights import check_checkpoint, checkpoint_step
from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import read_json, sha256_file
from canon_pretrain.data.held_out import open_held_out, open_validation
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.data.tokenizer import Tokenizer
from canon_pretrain.hf.export import RECORD
from canon_pretrain.hf.loading import find_tokenizer, load_model, locate
from canon_pretrain.hf.reading import CONFIG, folder_args
from canon_pretrain.model.transformer import Transformer
from canon_pretrain.run.folder import EVALS, RunFolder
from canon_pretrain.run.launches import read_run
from canon_pretrain.synthetic.evaluation import task_of_run
from canon_pretrain.synthetic.task import Task

WEIGHTS = (".safetensors", ".bin", ".pth")


@dataclass(frozen=True)
class EvalTarget:
    """A checkpoint of the run `folder`, or an export (`folder` is None), with its shards."""

    checkpoint: Path
    folder: RunFolder | None
    step: int | None
    seq_len: int  # of training; of an export its max_seq_len
    data: Path | None
    train: TokenShards | None
    held_out: TokenShards | None
    recorded_held_out: str | None = None
    trained_on: dict[str, Any] = field(default_factory=dict)  # the run's identity

    @classmethod
    def open(
        cls,
        given: Path,
        data: Path | None = None,
        run: RunFolder | None = None,
        held_out: Path | None = None,
    ) -> "EvalTarget":
        """Open a checkpoint of `run`, or `locate(given)`; `held_out` replaces the run's text."""
        checkpoint, run = (given, run) if run else locate(given)
        if run is None:
            return _open_export(checkpoint, data, held_out)
        return _open_checkpoint(checkpoint, run, data, held_out)

    @property
    def evals(self) -> Path | None:
        """The folder of the run's results; None for an export or an abandoned branch."""
        if self.folder is None:
            return None
        own = CheckpointFolder.of_run(self.folder).path.resolve() == self.checkpoint.parent
        return self.folder.path / EVALS if own else None

    @cached_property
    def task(self) -> Task | None:
        """The synthetic task of training; None if it was on shards or is unknown."""
        return task_of_run(self.trained_on)

    @property
    def train_shards(self) -> TokenShards:
        """The training shards; raises UserError for an export without --data."""
        if self.task is not None:
            message = f"{self.checkpoint} was trained on the task {self.task.name}, without shards:"
            raise UserError("eval.no_data", f"{message} use --suite playground")
        if self.train is None:
            raise UserError(
                "eval.no_data", f"{self.checkpoint} is an export, which names no data: give --data"
            )
        return self.train

    @property
    def held_out_shards(self) -> TokenShards:
        """The held-out shards; raises UserError if there are none."""
        if self.held_out is None:
            where = f"{self.checkpoint} in {self.train_shards.folder.parent}"
            raise UserError(
                "eval.no_held_out",
                f"no held-out text for {where}: give --held-out, or build with --holdout",
            )
        return self.held_out

    def check_held_out(self, given: Path | None = None) -> None:
        """Raise UserError unless the held-out text is the run's, or `given` on purpose."""
        shards, train = self.held_out_shards, self.train_shards
        wrong = f"{shards.folder} was written with another tokenizer than {train.folder}"
        _check_hash("tokenizer", shards.tokenizer_sha256, [train.tokenizer_sha256], wrong)
        if given is None and self.recorded_held_out:
            wrong = (
                f"{shards.folder} is not the held-out text of {self.checkpoint}: restore it, "
                f"or score this text with --held-out {shards.folder.parent}"
            )
            _check_hash("held_out", shards.fingerprint, self.recorded_held_out.split("+"), wrong)

    @property
    def tokenizer_path(self) -> Path:
        """The folder with the tokenizer's file."""
        return self.checkpoint if self.data is None or self.folder is None else self.data

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises UserError if it is missing."""
        data = self.data if self.folder is not None else None
        hint = "Restore it or export with it; only --suite validation needs none"
        try:
            return find_tokenizer(self.checkpoint, self.folder, data, hint=hint)
        except UserError as error:
            if error.code == "hf.other_tokenizer":
                raise UserError("eval.mismatch", error.message, what="tokenizer") from None
            raise UserError("eval.no_tokenizer", error.message) from None

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The fields that identify this model and its data (PROVENANCE_KEYS in run/results.py)."""
        sha256 = None if self.train is None else self.train.tokenizer_sha256
        trained_on = self.trained_on["data_fingerprint"] if self.task else None
        trained_on = self.train.fingerprint if self.train else trained_on
        if self.folder is not None:
            facts, manifest = read_run(self.folder), Manifest.read(self.checkpoint)
            run_id, content = facts.run_id if facts else manifest.run_id, manifest.content
            if self.task is not None:
                sha256 = self.tokenizer.sha256
        else:
            record, digest = _record(self.checkpoint), hashlib.sha256()
            for path in sorted(self.checkpoint.iterdir()):
                if path.suffix in WEIGHTS or path.name == CONFIG:
                    digest.update(f"{path.name} {sha256_file(path)}\n".encode())
            run_id, content = record.get("run_id"), digest.hexdigest()
            sha256 = (record.get("tokenizer") or {}).get("sha256") or sha256
            if sha256 is None:
                with contextlib.suppress(UserError):  # validation needs none
                    sha256 = self.tokenizer.sha256
        return {
            "checkpoint": str(self.checkpoint),
            "run_id": run_id,
            "content": content,
            "step": self.step,
            "train_fingerprint": trained_on,
            "held_out_fingerprint": self.held_out and self.held_out.fingerprint,
            "tokenizer_sha256": sha256,
        }

    def load(
        self, device: torch.device, dtype: torch.dtype = torch.float32, max_length: int = 0
    ) -> Transformer:
        """Load the model, for sequences of `max_length` tokens; see load_model."""
        return load_model(self.checkpoint, device, max_length, dtype, self.folder)


def _check_hash(what: str, found: str | None, expected: Sequence[str | None], wrong: str) -> None:
    if found not in expected:
        known = " or ".join((sha256 or "none")[:16] for sha256 in expected)
        raise UserError(
            "eval.mismatch",
            f"{wrong}; its hash is {(found or 'none')[:16]}, expected {known}",
            what=what,
        )


def _open_checkpoint(
    checkpoint: Path, folder: RunFolder, data: Path | None, held_out: Path | None
) -> EvalTarget:
    check_checkpoint(checkpoint)
    record = folder.read_config()
    if "imported_from" in (record.get("config") or ()):
        message = f"{folder.path} is an import, which names no data: evaluate an export of it"
        raise UserError("eval.no_data", f"{message} (canon hf export)")
    step = checkpoint_step(checkpoint)
    try:
        config, identity = record["config"], record["identity"]
        if (task := task_of_run(identity)) is not None:
            return EvalTarget(
                checkpoint=checkpoint.resolve(),
                folder=folder,
                step=step,
                seq_len=task.seq_len,
                data=None,
                train=None,
                held_out=None,
                trained_on=identity,
            )
        shards = config["data"]
        mixed = [Path(path) for path in shards.get("paths") or []]
        recorded, seq_len = Path(shards["path"]), int(config["training"]["seq_len"])
        trained_on = identity["data_fingerprint"]
        apart = held_out or config.get("validation", {}).get("path")
    except (KeyError, TypeError) as error:
        raise UserError(
            "eval.run_damaged", f"{folder.config_file} is damaged: it lacks {error}"
        ) from None
    if data is None and mixed:
        names = ", ".join(map(str, mixed))
        raise UserError(
            "eval.mixture",
            f"{folder.path} was trained on a mixture: choose one of {names} with --data",
        )
    if data is None and not recorded.is_dir():
        raise UserError(
            "eval.data_moved",
            f"{recorded} does not exist: name the folder it was moved to with --data",
            path=recorded,
        )
    data = data or recorded
    train = TokenShards.open(data / "train")
    found = train.fingerprint
    if mixed:
        with contextlib.closing(Mixture.open(mixed, shards["weights"])) as mixture:
            if found in {source.fingerprint for source in mixture.sources}:
                found = mixture.fingerprint
    _check_hash(
        "data",
        found,
        [trained_on],
        f"{data} is not what {folder.path} was trained on: name the run's shards with --data",
    )
    if apart:
        part = open_validation(apart) if held_out or Path(apart).is_dir() else None
    else:
        part = open_held_out(data)
    own = identity.get("held_out_fingerprint")
    return EvalTarget(checkpoint.resolve(), folder, step, seq_len, data, train, part, own)


def _open_export(export: Path, data: Path | None, held_out: Path | None) -> EvalTarget:
    record, train, part = _record(export), None, None
    if data is not None:
        train = TokenShards.open(data / "train")
        part = open_held_out(data) if held_out is None else open_validation(held_out)
    seq_len, step = folder_args(export).max_seq_len, record.get("step")
    target = EvalTarget(
        export.resolve(),
        None,
        step,
        seq_len,
        data,
        train,
        part,
        trained_on=record.get("identity") or {},
    )
    if train is not None:
        wanted = (record.get("tokenizer") or {}).get("sha256") or target.tokenizer.sha256
        _check_hash(
            "tokenizer",
            train.tokenizer_sha256,
            [wanted],
            f"{data} was written with another tokenizer than {export} was trained with",
        )
    return target


def _record(export: Path) -> dict[str, Any]:
    path = export / RECORD
    return read_json(path, finite=False) if path.exists() else {}
