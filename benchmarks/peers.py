"""Environments of the libraries we measure ourselves against.

A peer is installed into a virtual environment of its own, so that its dependencies never meet ours.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

JAX_PRIVACY = "jax-privacy==2.0.0"
OPACUS = "opacus==1.6.0 torch==2.13.0"

_FOLDER = pathlib.Path(__file__).resolve().parent / ".peers"


def peer_python(requirement: str = JAX_PRIVACY) -> pathlib.Path | None:
    """Returns the interpreter of an environment with `requirement`, or several, made if need be.

    Returns None, after saying why on standard error, when it cannot be installed.
    """
    folder = _FOLDER / requirement.replace("==", "-").replace(" ", "_")
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    if stamp.exists():
        return python
    print(f"Installing {requirement} into {folder.name} (once) ...", file=sys.stderr)
    commands = (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", *requirement.split()],
    )
    for command in commands:
        outcome = subprocess.run(command, capture_output=True, text=True, check=False)
        if outcome.returncode != 0:
            reason = outcome.stderr.strip().splitlines()[-1:] or ["no message"]
            print(f"Skipping {requirement}: {reason[0]}", file=sys.stderr)
            return None
    stamp.touch()
    return python
