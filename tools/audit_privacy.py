"""Audits a mechanism on the library's paths; `--help` says how. Installed: bandmf-audit."""

from __future__ import annotations

import sys

from bandmf_tf.audit.program import main

if __name__ == "__main__":
    sys.exit(main())
