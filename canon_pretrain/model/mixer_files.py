"""The files of a user's own mixers, FILE.py:Name: where they are, and their hashes. No torch."""

import hashlib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from canon_pretrain.core.errors import UserError
from canon_pretrain.model.args import ModelArgs, own_mixers


class MixerFile(NamedTuple):
    """A mixer of FILE.py:Name."""

    path: Path
    name: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()


def mixer_file(mixer: str) -> MixerFile:
    """Return the file and the class name of FILE.py:Name. Raises UserError without that file."""
    path, _, name = mixer.rpartition(":")
    file = MixerFile(Path(path).expanduser(), name)
    if not file.path.is_file():
        raise UserError(
            "mixer.no_file",
            f'mixer = "{mixer}": there is no file {file.path} in {Path.cwd()}. Expected '
            f"FILE.py:Name",
            given=mixer,
        )
    return file


def mixer_files(args: ModelArgs) -> list[MixerFile]:
    """Return the files of the model's own mixers. Raises UserError for two of one name."""
    # a file once, even if it holds several mixers
    paths = dict.fromkeys(mixer_file(mixer).path.resolve() for mixer in own_mixers(args))

    # A run copies the files into one folder, by their names.
    names = Counter(path.name for path in paths)
    for path in paths:
        if names[path.name] > 1:
            raise UserError(
                "mixer.two_files",
                f"two mixers are in files called {path.name}, such as {path}: a run copies each "
                "file by its name. Rename one",
                given=path,
            )

    # without a class: the files count here, not what they define
    return [MixerFile(path, "") for path in paths]
