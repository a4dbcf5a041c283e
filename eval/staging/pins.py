"""Which commit of a hub repository is staged: pins.json in the folder of staged data.

The catalogue pins what public sources name a commit of. For the rest `stage.py` writes the commit
that it found at the first staging here, and uses it ever after; whoever copies pins.json to
another machine stages the same data there. What a user chose with --pin lies here too, and comes
before the catalogue.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from canon_pretrain.core.errors import UserError
from canon_pretrain.core.files import write_json
from eval.staging.catalogue import DataSet
from eval.staging.hub import COMMIT
from eval.staging.staged import data_set

PINS = "pins.json"


class Pins:
    """The commits of repositories in `folder`/pins.json. Raises UserError where it is damaged."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / PINS
        self._commits: dict[str, str] = {}
        try:
            stored = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return
        except OSError as error:
            raise UserError(f"{self._path}: cannot be read: {error.strerror}") from None
        except ValueError:
            stored = None
        if not (isinstance(stored, dict) and all(_is_commit(c) for c in stored.values())):
            raise UserError(
                f"{self._path}: is damaged, expected commits by repository; restore it, or delete "
                "it to keep what is staged at the commits of its manifests"
            )
        self._commits = stored

    def get(self, data: DataSet) -> str | None:
        """The commit to stage: a pin of this folder, else the catalogue's; None for neither."""
        return self._commits.get(data.path) or data.revision

    def add(self, data: DataSet, commit: str) -> None:
        """Pin the repository of `data` from now on."""
        if self._commits.get(data.path) != commit:
            self._commits[data.path] = commit
            write_json(self._path, dict(sorted(self._commits.items())))

    def choose(self, given: Iterable[str]) -> None:
        """Pin what the user asks for as KEY=COMMIT. Raises UserError before it writes anything."""
        chosen: dict[str, tuple[DataSet, str]] = {}
        for pin in given:
            key, _, commit = pin.partition("=")
            if not _is_commit(commit):
                raise UserError(
                    f"--pin {pin}: expected KEY=COMMIT with the 40 hex digits of a commit"
                )
            data = data_set(key)
            if chosen.setdefault(data.path, (data, commit))[1] != commit:
                raise UserError(
                    f"--pin {pin}: {chosen[data.path][0].key} is of the same repository "
                    f"({data.path}) and given another commit; a repository has one"
                )
        for data, commit in chosen.values():
            self.add(data, commit)


def _is_commit(value: object) -> bool:
    return isinstance(value, str) and COMMIT.fullmatch(value) is not None
