"""Plans a mechanism from a checkout; `--help` says how. Installed it is called bandmf-plan."""

from __future__ import annotations

import sys

from bandmf_tf.cli.plan import main

if __name__ == "__main__":
    sys.exit(main())
