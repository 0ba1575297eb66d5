#!/usr/bin/env bash
# Starts TFF worker services on this machine, one for each port, until interrupted:
#   production/certificates.sh tls localhost
#   production/workers.sh tls 8001 8002 &
#   .venv/bin/python -m production.train_federated --workers=localhost:8001,localhost:8002 --tls=tls ...
# Workers run in a network of their own; only programs with a certificate of tls/ca.pem get through.
# ALLOW_OPEN_WORKER=1 goes on where the system has no such networks, as in most containers: there the
# ports of the workers themselves must be closed by a firewall or a network policy.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ $# -lt 2 ]]; then
  echo "usage: production/workers.sh FOLDER_OF_CERTIFICATES PORT..." >&2
  exit 1
fi
tls=$1
shift
python=${PYTHON:-.venv/bin/python}
binary=$("$python" -c 'import importlib.util, pathlib
spec = importlib.util.find_spec("tensorflow_federated")
print(pathlib.Path(spec.origin).parent / "data" / "worker_binary")')
open=()
[[ ${ALLOW_OPEN_WORKER:-} != 1 ]] || open=(--open)
pids=()
# A busy worker ignores milder signals; it holds nothing that is worth saving.
end_workers() {
  kill -KILL "${pids[@]}" 2>/dev/null || true
  wait
}
trap end_workers EXIT
trap 'exit 143' INT TERM
for port in "$@"; do
  "$python" -I bandmf_tf/federated/_relay.py --listen=":$port" --certificate="$tls/worker.pem" \
    --key="$tls/worker.key" --client_ca="$tls/ca.pem" "${open[@]}" -- "$binary" &
  pids+=($!)
done
wait -n
