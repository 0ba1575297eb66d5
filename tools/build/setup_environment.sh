#!/usr/bin/env bash
# Makes an environment from the locks and installs the project into it; does nothing when all is up
# to date.
# Usage: tools/build/setup_environment.sh [--dev | --modern | --core]
#   --dev     adds the tools for tests, lint and types
#   --modern  makes .venv-modern: the newest Python and TensorFlow, tools for tests, no TFF
#   --core    makes .venv-core: what `pip install .` gives, without TensorFlow; not editable
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if [[ "${1:-}" == --modern ]]; then
  readonly venv=.venv-modern lock=requirements/modern.lock versions=(3.13 3.12)
  readonly known_complaints='No broken requirements found.'
elif [[ "${1:-}" == --core ]]; then
  readonly venv=.venv-core lock=requirements/core.lock versions=(3.13 3.12 3.11)
  readonly known_complaints='No broken requirements found.'
else
  readonly venv=.venv lock=requirements/federated.lock versions=(3.11)
  # Replacements made on purpose by requirements/overrides.txt; any other complaint is an error.
  readonly known_complaints='google-vizier needs another sqlalchemy
tensorflow-federated needs another jax
tensorflow-federated needs another jaxlib'
fi
readonly python=$venv/bin/python

# A stamp names what was installed. The folder is part of it: a moved .venv does not work.
digest() { { pwd; cat "$@"; } | sha256sum | cut -d ' ' -f 1; }
is_done() { [[ "$(cat "$venv/.stamp-$1" 2>/dev/null)" == "$(digest "${@:2}")" ]]; }
mark_done() { digest "${@:2}" >"$venv/.stamp-$1"; }

install_lock() {
  "$python" -m pip install -qq --no-deps --only-binary :all: --require-hashes -r "$1"
}

check_packages() {
  local complaints
  complaints=$({ "$python" -m pip check || true; } |
    sed -E 's/^([^ ]+) [^ ]+ has requirement ([A-Za-z0-9_.-]+).*/\1 needs another \2/' | sort)
  if [[ "$complaints" != "$known_complaints" ]]; then
    echo "pip check of $venv should report exactly: $known_complaints; it reported:" >&2
    "$python" -m pip check >&2 || true
    return 1
  fi
}

if [[ "$(uname -sm)" != "Linux x86_64" ]]; then
  echo "The locks hold wheels for Linux on x86_64 (the only platform of TensorFlow Federated 0.87)," \
    "not for $(uname -sm); use pip install . for everything but TFF." >&2
  exit 1
fi

exec 9>"$venv.lock"
flock 9 # two calls at once: the second waits and then finds nothing to do

if ! is_done runtime "$lock" || ! "$python" -c '' 2>/dev/null; then
  interpreter=$(tools/build/find_python.sh "${versions[@]}")
  echo "Making $venv with $("$interpreter" --version) from $lock" \
    "(minutes and up to 3 GB the first time) ..."
  "$interpreter" -m venv --clear "$venv"
  install_lock "$lock"
  mark_done runtime "$lock"
fi

if [[ "${1:-}" == --dev ]] && ! is_done dev requirements/dev.lock; then
  echo "Installing the development tools from requirements/dev.lock ..."
  rm -f $venv/.stamp-dev $venv/.stamp-project # a failure must not leave a valid stamp behind
  install_lock requirements/dev.lock
  mark_done dev requirements/dev.lock
fi

if [[ "${1:-}" == --core ]]; then
  # As users have it: the files of a wheel, made anew each time from what the folder has now.
  rm -rf build/lib build/bdist.*
  flock pyproject.toml "$python" -m pip install -qq --no-deps --no-build-isolation --force-reinstall .
  check_packages
elif ! is_done project pyproject.toml; then
  echo "Installing the project itself (editable) ..."
  # Two environments at once would write the same egg-info.
  flock pyproject.toml "$python" -m pip install -qq --no-deps --no-build-isolation -e .
  check_packages
  mark_done project pyproject.toml
fi
