#!/usr/bin/env bash
# Prints the path of a CPython that can make virtual environments, or says what is missing.
# Usage: tools/build/find_python.sh [versions, the best first; 3.11 by default]
# Set PYTHON to choose the interpreter yourself.
set -euo pipefail

versions=("$@")
[[ $# -gt 0 ]] || versions=(3.11)

# The base interpreter, so that an activated .venv can be rebuilt without deleting itself.
readonly probe='
import sys, ensurepip, venv
assert sys.implementation.name == "cpython"
assert "%d.%d" % sys.version_info[:2] == sys.argv[1]
print(getattr(sys, "_base_executable", sys.executable))
'

tried=()
for version in "${versions[@]}"; do
  if [[ -n "${PYTHON:-}" ]]; then
    candidates=("$PYTHON")
  else
    candidates=("python$version" python3 python)
    for folder in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version"*/bin /usr/local/bin /usr/bin; do
      candidates+=("$folder/python$version")
    done
  fi
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c "$probe" "$version" 2>/dev/null; then
      exit 0
    fi
  done
  tried+=("${candidates[@]}")
done

if [[ "${versions[*]}" == 3.11 ]]; then
  echo "CPython 3.11 with venv and ensurepip is needed (TensorFlow 2.14 has no wheels for newer" \
    "versions) but was not found among: ${tried[*]}; install it (Debian 12: apt-get install" \
    "python3.11-venv, elsewhere: pyenv install 3.11) or set PYTHON to its path." >&2
else
  echo "CPython ${versions[*]} (one of them) with venv and ensurepip is needed but was not found" \
    "among: ${tried[*]}; install one (pyenv install ${versions[0]}) or set PYTHON to its path." >&2
fi
exit 1
