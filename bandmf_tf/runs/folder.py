"""The folder of a training run: what is in it, under which name, and for whose eyes.

RUN/
  run.json               configuration; public
  mechanism.bandmf       the mechanism file
  ledger.jsonl           what was released, see `ledger.py`
  metrics.csv            one line a round
  tensorboard/           the same for TensorBoard
  released/              models, `model_<rounds>.npz`; their SHA-256 stands in the ledger
  secret/                owner only: checkpoints with the noise, the salt of pseudonyms
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

_MODEL = re.compile(r"model_(\d{1,18})\.npz")
_CHECKPOINT = re.compile(r"checkpoint_(\d{1,18})")


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Where the files of the run in the folder `path` are, whether they exist or not."""

    path: Path

    @property
    def config(self) -> Path:
        """The configuration, JSON."""
        return self.path / "run.json"

    @property
    def mechanism(self) -> Path:
        """The mechanism file."""
        return self.path / "mechanism.bandmf"

    @property
    def ledger(self) -> Path:
        """The ledger."""
        return self.path / "ledger.jsonl"

    @property
    def metrics(self) -> Path:
        """The metrics of every round."""
        return self.path / "metrics.csv"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard."""
        return self.path / "tensorboard"

    @property
    def released(self) -> Path:
        """The folder of released models."""
        return self.path / "released"

    @property
    def secret(self) -> Path:
        """The folder that nobody but the owner may see."""
        return self.path / "secret"

    @property
    def salt(self) -> Path:
        """The salt of pseudonyms."""
        return self.secret / "participation_salt"

    def model(self, rounds: int) -> Path:
        """Returns where the model after so many rounds is."""
        return self.released / f"model_{rounds:06d}.npz"

    def models(self) -> list[tuple[int, Path]]:
        """Returns the released models that exist, by the number of rounds."""
        return _numbered(self.released, _MODEL)


def checkpoint_path(folder: Path, rounds: int) -> Path:
    """Returns where the checkpoint after so many rounds is in a folder of checkpoints."""
    return folder / f"checkpoint_{rounds:09d}"


def checkpoint_paths(folder: Path) -> list[tuple[int, Path]]:
    """Returns the checkpoints that exist in a folder of checkpoints, by the number of rounds."""
    return _numbered(folder, _CHECKPOINT)


def _numbered(folder: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    paths = list(folder.iterdir()) if folder.is_dir() else []
    matches = ((pattern.fullmatch(path.name), path) for path in paths)
    return sorted((int(match[1]), path) for match, path in matches if match)
