#!/usr/bin/env bash
# Makes what a training program and its workers know each other by, for a year, in a new folder:
#   production/certificates.sh FOLDER HOST...
# ca.pem signs both sides; worker.pem/.key go to the workers, which are reached under the names HOST,
# program.pem/.key to the program. ca.key signs more of them: keep it offline, or destroy it.
set -euo pipefail

if [[ $# -lt 2 ]]; then
  echo "usage: production/certificates.sh FOLDER HOST..." >&2
  exit 1
fi
folder=$1
shift
umask 077
mkdir "$folder"
cd "$folder"
names=$(printf ',DNS:%s' "$@")

openssl req -x509 -newkey rsa:3072 -nodes -days 366 -keyout ca.key -out ca.pem \
  -subj "/CN=bandmf training" 2>/dev/null
sign() { # NAME EXTENSIONS: a key and a certificate of the authority above
  openssl req -newkey rsa:3072 -nodes -keyout "$1.key" -out "$1.csr" -subj "/CN=bandmf $1" 2>/dev/null
  openssl x509 -req -in "$1.csr" -CA ca.pem -CAkey ca.key -CAcreateserial -days 366 -out "$1.pem" \
    -extfile <(printf '%s' "$2") 2>/dev/null
  rm "$1.csr"
}
sign worker "$(printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth' "${names#,}")"
sign program "extendedKeyUsage=clientAuth"
