#!/usr/bin/env bash
# Runs a command while a PostgreSQL of its own is there, whose URL is in BANDMF_POSTGRES.
# Usage: tools/build/with_postgresql.sh command [arguments]
#
# The server has an empty database in a temporary folder and a socket there, no port, and a user
# other than root. Where PostgreSQL is not installed, the command runs without it, after a line
# that says so.
set -euo pipefail

find_server() {
  local folder
  for folder in $(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -rV) ""; do
    if [[ -x "$folder/initdb" && -x "$folder/pg_ctl" ]]; then
      echo "$folder"
      return
    fi
  done
  dirname "$(command -v initdb 2>/dev/null)" 2>/dev/null
}

if ! server=$(find_server) || [[ ! -x "$server/pg_ctl" ]]; then
  echo "SKIPPED: PostgreSQL is not installed, and its tests are left out." >&2
  exec "$@"
fi

# PostgreSQL refuses to run as root; Debian's package makes a user for it.
as_server=()
[[ $EUID != 0 ]] || as_server=(setpriv --reuid=postgres --regid=postgres --clear-groups)

folder=$(mktemp -d /tmp/bandmf-postgresql-XXXXXX)
[[ $EUID != 0 ]] || chown postgres:postgres "$folder"

end() {
  local status=$?
  (cd "$folder" && "${as_server[@]}" "$server/pg_ctl" -D data -m immediate stop) >/dev/null 2>&1 || true
  rm -rf "$folder"
  exit "$status"
}
trap end EXIT

start() {
  cd "$folder"
  "${as_server[@]}" "$server/initdb" -D data --username=bandmf --auth=trust --encoding=UTF8 \
    --locale=C.UTF-8
  "${as_server[@]}" "$server/pg_ctl" -D data -w -l log \
    -o "-c listen_addresses='' -c unix_socket_directories='$folder'" start
}

if ! (start) >"$folder.log" 2>&1; then
  echo "SKIPPED: PostgreSQL does not start here, and its tests are left out: $(tail -n 1 "$folder.log")" >&2
  rm -f "$folder.log"
  "$@"
  exit
fi
rm -f "$folder.log"
BANDMF_POSTGRES="postgresql://bandmf@/postgres?host=$folder" "$@"
