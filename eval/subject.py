"""What is evaluated: a checkpoint, with what its run says about it."""

import contextlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from canon_pretrain.checkpoint.weights import check_checkpoint, checkpoint_step
from canon_pretrain.data.mixture import Mixture
from canon_pretrain.data.shards import TokenShards
from canon_pretrain.data.tokenizer import Tokenizer
from canon_pretrain.errors import UserError
from canon_pretrain.run.folder import RunFolder
from eval.suites import VALIDATION


@dataclass(frozen=True)
class Subject:
    """A checkpoint, and what its run says about it."""

    checkpoint: Path
    folder: RunFolder
    step: int
    data: Path
    train: TokenShards
    held_out: TokenShards
    max_length: int

    @classmethod
    def open(cls, checkpoint: Path, data: Path | None, max_length: int | None) -> "Subject":
        """Raises UserError where the checkpoint, its run or its data are not there or not whole."""
        check_checkpoint(checkpoint)
        folder = RunFolder.of_checkpoint(checkpoint)
        config = folder.read_config()
        try:
            section = config["config"]["data"]
            mixed = [Path(folder) for folder in section.get("paths") or []]
            recorded = Path(section["path"])
            seq_len = int(config["config"]["training"]["seq_len"])
            trained_on = config["identity"]["data_fingerprint"]
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{folder.config_file} is damaged, or another version of this program wrote it: it "
                f"lacks {error}"
            ) from None
        if mixed and data is None:
            raise UserError(
                f"{folder.path} was trained on a mixture of {', '.join(map(str, mixed))}: name the "
                "one whose held-out part and tokenizer to use with --data"
            )
        if data is None and not recorded.is_dir():
            raise UserError(
                f"{recorded}, the data of {folder.path}, is not there: name the folder that it was "
                "moved to with --data"
            )
        data = data or recorded
        train, held_out = TokenShards.open(data / "train"), TokenShards.open(data / "validation")
        if mixed:
            try:
                with contextlib.closing(Mixture.open(mixed, section["weights"])) as mixture:
                    known = {source.fingerprint for source in mixture.sources}
                    found = mixture.fingerprint if train.fingerprint in known else train.fingerprint
            except UserError as error:
                raise UserError(
                    f"{folder.path} was trained on a mixture, whose folders must be where they "
                    f"were (links will do) for --data to be checked: {error}"
                ) from None
        else:
            found = train.fingerprint
        if found != trained_on:
            raise UserError(
                f"{data} is not what {folder.path} was trained on: its fingerprint is "
                f"{found[:12]}, the run's {trained_on[:12]}. Name the run's shards "
                "with --data"
            )
        max_length = max_length or seq_len
        step = checkpoint_step(checkpoint)
        return cls(checkpoint.resolve(), folder, step, data, train, held_out, max_length)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the data was written with; raises UserError where it is not there."""
        try:
            tokenizer = Tokenizer.find(self.data, eos=self.train.eos_id)
        except UserError as error:
            raise UserError(
                f"{error}. This suite reads text; only --suite {VALIDATION} does without"
            ) from None
        if tokenizer.sha256 != self.train.tokenizer_sha256:
            raise UserError(
                f"{self.data / tokenizer.file_name} is not the tokenizer that {self.data} was "
                f"written with: its sha256 is {tokenizer.sha256[:16]}, expected "
                f"{self.train.tokenizer_sha256[:16]}"
            )
        return tokenizer
