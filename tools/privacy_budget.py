"""Adds up releases from a checkout; `--help` says how. Installed it is called bandmf-budget."""

from __future__ import annotations

import sys

from bandmf_tf.cli.budget import main

if __name__ == "__main__":
    sys.exit(main())
