#!/usr/bin/env bash
# Writes requirements.lock, requirements-dev.lock, requirements-modern.lock and
# requirements-beam.lock with uv (see CONTRIBUTING.md, "Locks").
# Usage: tools/build/lock.sh [flags of `uv pip compile`, e.g. --upgrade or --upgrade-package ruff]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# uv lives in an environment of its own: a lock that does not install must not prevent a new one.
if [[ ! -x .venv-lock/bin/uv ]]; then
  "$(tools/build/find_python.sh)" -m venv --clear .venv-lock
  .venv-lock/bin/python -m pip install -qq uv==0.13.7
fi

# TFF's wheel asks for manylinux 2.31; --no-config keeps addresses of private indexes out.
compile() {
  .venv-lock/bin/uv --no-config pip compile --quiet --generate-hashes --only-binary :all: \
    --no-header --python-version "$1" --python-platform x86_64-manylinux_2_31 "${@:2}" >/dev/null
}

compile 3.11 pyproject.toml --extra tff requirements.in --override overrides.txt \
  --output-file requirements.lock "$@"
compile 3.11 requirements-dev.in --constraint requirements.lock \
  --output-file requirements-dev.lock "$@"
# Hashes are those of the wheels for all versions of Python, so that it installs on 3.13 as well.
compile 3.12 pyproject.toml requirements-modern.in --output-file requirements-modern.lock "$@"
compile 3.11 requirements-beam.in --output-file requirements-beam.lock "$@"
