"""The model to evaluate: a run's checkpoint, or an exported folder.

An export has no run: results need --out, and what reads shards needs --data.
"""

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
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
from canon_pretrain.data.sampler import Order
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
    data: Path | None = None
    train: TokenShards | None = None
    held_out: TokenShards | None = None
    recorded_held_out: str | None = None
    order: Order = "random"  # of training: documents are scored in windows of their own
    trained_on: dict[str, Any] = field(default_factory=dict)  # the run's identity

    @classmethod
    def open(
        cls,
        path: Path,
        data: Path | None = None,
        run: RunFolder | None = None,
        held_out: Path | None = None,
    ) -> "EvalTarget":
        """Open a checkpoint of `run`, or `locate(path)`; `held_out` replaces the run's text."""
        checkpoint = path
        if run is None:
            checkpoint, run = locate(path)
        if run is None:
            return _open_export(checkpoint, data, held_out)
        return _open_checkpoint(checkpoint, run, data, held_out)

    @property
    def evals(self) -> Path | None:
        """The folder of the run's results; None for an export or an abandoned branch."""
        if self.folder is None:
            return None
        checkpoints = CheckpointFolder.of_run(self.folder).path.resolve()
        if self.checkpoint.parent != checkpoints:
            return None
        return self.folder.path / EVALS

    @cached_property
    def task(self) -> Task | None:
        """The synthetic task of training; None if it was on shards or is unknown."""
        return task_of_run(self.trained_on)

    @property
    def train_shards(self) -> TokenShards:
        """The training shards; raises UserError for an export without --data."""
        if self.task is not None:
            raise UserError(
                "eval.no_data",
                f"{self.checkpoint} was trained on the task {self.task.name}, without shards: "
                "use --suite playground",
            )
        if self.train is None:
            raise UserError(
                "eval.no_data",
                f"{self.checkpoint} is an export, which names no data: pass --data",
            )
        return self.train

    @property
    def held_out_shards(self) -> TokenShards:
        """The held-out shards; raises UserError if there are none."""
        if self.held_out is None:
            raise UserError(
                "eval.no_held_out",
                f"no held-out text for {self.checkpoint} in {self.train_shards.folder.parent}: "
                "pass --held-out, or build with --holdout",
            )
        return self.held_out

    def check_held_out(self, chosen: Path | None = None) -> None:
        """Raise UserError unless the held-out text is the run's, or `chosen` on purpose."""
        shards = self.held_out_shards
        train = self.train_shards

        # The count models of the training shards are scored on its tokens.
        _check_hash(
            "tokenizer",
            shards.tokenizer_sha256,
            [train.tokenizer_sha256],
            f"{shards.folder} was written with another tokenizer than {train.folder}",
        )

        # The text of training, or one of several; older runs do not record it.
        if chosen is None and self.recorded_held_out:
            _check_hash(
                "held_out",
                shards.fingerprint,
                self.recorded_held_out.split("+"),
                f"{shards.folder} is not the held-out text of {self.checkpoint}: restore it, "
                f"or score this text with --held-out {shards.folder.parent}",
            )

    @property
    def tokenizer_path(self) -> Path:
        """The folder with the tokenizer's file."""
        if self.folder is None or self.data is None:
            return self.checkpoint
        return self.data

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises UserError if it is missing."""
        # the tokenizer of an export is the export's, whatever data it is evaluated on
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
        # The data, as far as it is known.
        train_fingerprint = None
        tokenizer_sha256 = None
        if self.train is not None:
            train_fingerprint = self.train.fingerprint
            tokenizer_sha256 = self.train.tokenizer_sha256
        elif self.task is not None:
            train_fingerprint = self.trained_on["data_fingerprint"]

        # The model: an export has a record only if it is ours.
        if self.folder is not None:
            run_record = read_run(self.folder)
            manifest = Manifest.read(self.checkpoint)
            run_id = run_record.run_id if run_record else manifest.run_id
            content = manifest.content
            if self.task is not None:
                tokenizer_sha256 = self.tokenizer.sha256
        else:
            record = _record(self.checkpoint)
            run_id = record.get("run_id")
            content = _export_content(self.checkpoint)
            tokenizer_sha256 = _recorded_tokenizer(record) or tokenizer_sha256
            if tokenizer_sha256 is None:
                with contextlib.suppress(UserError):  # validation needs none
                    tokenizer_sha256 = self.tokenizer.sha256
        return {
            "checkpoint": str(self.checkpoint),
            "run_id": run_id,
            "content": content,
            "step": self.step,
            "train_fingerprint": train_fingerprint,
            "held_out_fingerprint": self.held_out and self.held_out.fingerprint,
            "tokenizer_sha256": tokenizer_sha256,
        }

    def load(
        self, device: torch.device, dtype: torch.dtype = torch.float32, max_length: int = 0
    ) -> Transformer:
        """Load the model, for sequences of `max_length` tokens; see load_model."""
        return load_model(self.checkpoint, device, max_length, dtype, self.folder)


def _check_hash(
    kind: str, sha256: str | None, expected: Sequence[str | None], problem: str
) -> None:
    """Raise UserError with `problem` unless a hash is one of those expected."""
    if sha256 not in expected:
        shown = " or ".join((value or "none")[:16] for value in expected)
        raise UserError(
            "eval.mismatch",
            f"{problem}; its hash is {(sha256 or 'none')[:16]}, expected {shown}",
            what=kind,
        )


@dataclass(frozen=True)
class RecordedData:
    """The data of training on shards, as a run's config.json records it."""

    path: Path
    mixture: list[Path]  # the folders of a mixture; empty if `path` is the only one
    weights: Any
    seq_len: int
    fingerprint: str
    validation: str | None  # a folder of the validation text, if not part of `path`

    @classmethod
    def of(cls, config: Mapping[str, Any], identity: Mapping[str, Any]) -> "RecordedData":
        """Read the record. Raises KeyError and TypeError if it is damaged."""
        data = config["data"]
        return cls(
            path=Path(data["path"]),
            mixture=[Path(path) for path in data.get("paths") or []],
            weights=data.get("weights"),
            seq_len=int(config["training"]["seq_len"]),
            fingerprint=identity["data_fingerprint"],
            validation=config.get("validation", {}).get("path"),
        )

    def find(self, run: RunFolder) -> Path:
        """Return the folder of the shards, without --data. Raises UserError."""
        if self.mixture:
            raise UserError(
                "eval.mixture",
                f"{run.path} was trained on a mixture: choose one of "
                f"{', '.join(map(str, self.mixture))} with --data",
            )

        if not self.path.is_dir():
            raise UserError(
                "eval.data_moved",
                f"{self.path} does not exist: name the folder it was moved to with --data",
                path=self.path,
            )
        return self.path

    def open_train(self, data: Path, run: RunFolder) -> TokenShards:
        """Open the training shards in `data`. Raises UserError if the run had others."""
        train = TokenShards.open(data / "train")
        fingerprint = train.fingerprint
        if self.mixture:
            # the run records the fingerprint of the mixture, of which `data` may be one source
            with contextlib.closing(Mixture.open(self.mixture, self.weights)) as mixture:
                if fingerprint in {source.fingerprint for source in mixture.sources}:
                    fingerprint = mixture.fingerprint

        _check_hash(
            "data",
            fingerprint,
            [self.fingerprint],
            f"{data} is not what {run.path} was trained on: name the run's shards with --data",
        )
        return train

    def open_held_out(self, data: Path, chosen: Path | None) -> TokenShards | None:
        """Open the text that --held-out names, or the run's; None if there is none."""
        if chosen:
            return open_validation(chosen)
        if not self.validation:
            return open_held_out(data)
        if not Path(self.validation).is_dir():
            return None
        return open_validation(self.validation)


def _open_checkpoint(
    checkpoint: Path, run: RunFolder, data: Path | None, held_out: Path | None
) -> EvalTarget:
    """Open a run's checkpoint; `data` and `held_out` (--data, --held-out) replace its folders."""
    check_checkpoint(checkpoint)
    step = checkpoint_step(checkpoint)
    record = run.read_config()
    if "imported_from" in (record.get("config") or ()):
        raise UserError(
            "eval.no_data",
            f"{run.path} is an import, which names no data: evaluate an export of it "
            "(canon hf export)",
        )

    # The record of training: of a task, which needs no data, or of shards.
    try:
        config = record["config"]
        identity = record["identity"]
        task = task_of_run(identity)
        if task is not None:
            return EvalTarget(
                checkpoint.resolve(),
                run,
                step,
                task.seq_len,
                trained_on=identity,
            )
        recorded = RecordedData.of(config, identity)
    except (KeyError, TypeError) as error:
        raise UserError(
            "eval.run_damaged",
            f"{run.config_file} is damaged: it lacks {error}",
        ) from None

    # Its shards, which may have been moved to --data.
    data = data or recorded.find(run)
    return EvalTarget(
        checkpoint=checkpoint.resolve(),
        folder=run,
        step=step,
        seq_len=recorded.seq_len,
        data=data,
        train=recorded.open_train(data, run),
        held_out=recorded.open_held_out(data, held_out),
        recorded_held_out=identity.get("held_out_fingerprint"),
        order=identity.get("data.order", "random"),
    )


def _open_export(export: Path, data: Path | None, held_out: Path | None) -> EvalTarget:
    """Open an exported folder, which needs no data for suites other than `validation`."""
    record = _record(export)
    train = None
    held_out_shards = None
    if data is not None:
        train = TokenShards.open(data / "train")
        held_out_shards = open_held_out(data) if held_out is None else open_validation(held_out)

    identity = record.get("identity") or {}
    target = EvalTarget(
        checkpoint=export.resolve(),
        folder=None,
        step=record.get("step"),
        seq_len=folder_args(export).max_seq_len,
        data=data,
        train=train,
        held_out=held_out_shards,
        order=identity.get("data.order", "random"),
        trained_on=identity,
    )

    # Else the model would read ids of another vocabulary.
    if train is not None:
        _check_hash(
            "tokenizer",
            train.tokenizer_sha256,
            [_recorded_tokenizer(record) or target.tokenizer.sha256],
            f"{data} was written with another tokenizer than {export} was trained with",
        )
    return target


def _record(export: Path) -> dict[str, Any]:
    """Return the record that our export writes; {} for a folder of another library."""
    path = export / RECORD
    return read_json(path, finite=False) if path.exists() else {}


def _recorded_tokenizer(record: Mapping[str, Any]) -> str | None:
    return (record.get("tokenizer") or {}).get("sha256")


def _export_content(export: Path) -> str:
    """Return the hash of an export's weights and config."""
    digest = hashlib.sha256()
    for path in sorted(export.iterdir()):
        if path.suffix in WEIGHTS or path.name == CONFIG:
            digest.update(f"{path.name} {sha256_file(path)}\n".encode())
    return digest.hexdigest()
