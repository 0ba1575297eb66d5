#!/usr/bin/env bash
# Starts TFF worker services on this machine, one for each port, until interrupted:
#   production/workers.sh 8001 8002 &
#   .venv/bin/python -m production.train_federated --workers=localhost:8001,localhost:8002 ...
# A worker speaks plain gRPC without authentication: bind it to trusted networks only.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ $# == 0 ]]; then
  echo "usage: production/workers.sh PORT..." >&2
  exit 1
fi
binary=$("${PYTHON:-.venv/bin/python}" -c 'import importlib.util, pathlib
spec = importlib.util.find_spec("tensorflow_federated")
print(pathlib.Path(spec.origin).parent / "data" / "worker_binary")')
pids=()
# A busy worker ignores milder signals; it holds nothing that is worth saving.
end_workers() {
  kill -KILL "${pids[@]}" 2>/dev/null || true
  wait
}
trap end_workers EXIT
trap 'exit 143' INT TERM
for port in "$@"; do
  "$binary" --port="$port" &
  pids+=($!)
done
wait
