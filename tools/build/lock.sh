#!/usr/bin/env bash
# Writes the locks in requirements/ with uv (see CONTRIBUTING.md, "Locks").
# Usage: tools/build/lock.sh [flags of `uv pip compile`, e.g. --upgrade or --upgrade-package ruff]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# uv lives in an environment of its own: a lock that does not install must not prevent a new one.
if [[ ! -x .venv-lock/bin/uv ]]; then
  "$(tools/build/find_python.sh)" -m venv --clear .venv-lock
  .venv-lock/bin/python -m pip install -qq uv==0.13.7
fi

# TFF's wheel asks for manylinux 2.31; --no-config keeps addresses of private indexes out.
lock() {
  .venv-lock/bin/uv --no-config pip compile --quiet --generate-hashes --only-binary :all: \
    --no-header --python-version "$1" --python-platform x86_64-manylinux_2_31 \
    "requirements/$2.in" --output-file "requirements/$2.lock" "${@:3}" >/dev/null
}

lock 3.11 federated pyproject.toml --extra tff --override requirements/overrides.txt "$@"
lock 3.11 dev --constraint requirements/federated.lock "$@"
# Hashes are those of the wheels for all versions of Python, so that it installs on 3.13 as well.
lock 3.12 modern pyproject.toml --extra keras "$@"
lock 3.11 core pyproject.toml "$@"
lock 3.11 beam "$@"
