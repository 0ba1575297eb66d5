#!/usr/bin/env bash
# Prints the path of a CPython 3.11 that can make virtual environments, or says what is missing.
# Set PYTHON to choose the interpreter yourself.
set -euo pipefail

# The base interpreter, so that an activated .venv can be rebuilt without deleting itself.
readonly probe='
import sys, ensurepip, venv
assert sys.implementation.name == "cpython" and sys.version_info[:2] == (3, 11)
print(getattr(sys, "_base_executable", sys.executable))
'

if [[ -n "${PYTHON:-}" ]]; then
  candidates=("$PYTHON")
else
  candidates=(python3.11 python3 python)
  for folder in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11*/bin /usr/local/bin /usr/bin; do
    candidates+=("$folder/python3.11")
  done
fi

for candidate in "${candidates[@]}"; do
  if "$candidate" -c "$probe" 2>/dev/null; then
    exit 0
  fi
done

echo "CPython 3.11 with venv and ensurepip is needed (TensorFlow 2.14 has no wheels for newer" \
  "versions) but was not found among: ${candidates[*]}; install it (Debian 12: apt-get install" \
  "python3.11-venv, elsewhere: pyenv install 3.11) or set PYTHON to its path." >&2
exit 1
