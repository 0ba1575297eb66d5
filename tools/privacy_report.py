"""Reports the privacy of a run from a checkout; `--help` says how. Installed: bandmf-report."""

from __future__ import annotations

import sys

from bandmf_tf.cli.report import main

if __name__ == "__main__":
    sys.exit(main())
