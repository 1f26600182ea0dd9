#!/usr/bin/env bash
# Starts all that serves a run to users on this machine: a replica with the embedded engine, the
# gateway with the provider that you have as its baseline, the process that decides, and the page.
# Ctrl-C stops everything. What it needs again lies in RUN.live: tokens, the secret, logs.
#
#   export UPSTREAM_URL=https://api.openai.com/v1 UPSTREAM_MODEL=gpt-x
#   export DELTAWIRE_UPSTREAM_KEY_PROVIDER=sk-…
#   examples/live/start.sh runs/support
#
# Then, in another terminal: python examples/live/ask.py runs/support.live
set -euo pipefail

run=${1:?"usage: $0 RUN_FOLDER"}
: "${UPSTREAM_URL:?the base URL of a model that your product uses now}"
: "${UPSTREAM_MODEL:?its name for the model}"
state=${LIVE_STATE:-$run.live}
gateway_port=${GATEWAY_PORT:-8400} replica_port=${REPLICA_PORT:-8001} page_port=${PAGE_PORT:-8300}

umask 077
mkdir -p "$state"
for name in token admin replica; do
  [ -s "$state/$name" ] || head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$state/$name"
done
export DELTAWIRE_REPLICA_KEY
DELTAWIRE_REPLICA_KEY=$(cat "$state/replica")
[ -s "$state/secret" ] || deltawire live secret create "$run" --secret "$state/secret"

children=()
# shellcheck disable=SC2329  # the trap calls it
stop() {
  trap - INT TERM EXIT
  for child in "${children[@]}"; do kill "$child" 2>/dev/null || true; done
  wait
}
trap stop INT TERM EXIT

start() { # NAME COMMAND…: its output goes to a log.
  local name=$1
  shift
  "$@" >"$state/$name.log" 2>&1 &
  children+=($!)
}

start replica deltawire replica "$run" --port "$replica_port"
start gateway deltawire gateway "$run" --port "$gateway_port" --model-name "${MODEL_NAME:-support}" \
  --replica "http://127.0.0.1:$replica_port" \
  --upstream "provider=$UPSTREAM_URL" --upstream-model "provider=$UPSTREAM_MODEL" \
  --token-file "$state/token" --admin-token-file "$state/admin" --secret "$state/secret" \
  --state "$state/gateway" --capture-header
start page deltawire watch "$run" --no-browser --port "$page_port"

url=http://127.0.0.1:$gateway_port
for _ in $(seq 300); do
  curl -fsS "$url/readyz" >/dev/null 2>&1 && ready=1 && break
  for child in "${children[@]}"; do
    kill -0 "$child" 2>/dev/null || { tail -n 3 "$state"/*.log >&2; exit 1; }
  done
  sleep 1
done
[ "${ready:-}" ] || { tail -n 3 "$state"/*.log >&2; exit 1; }

# The provider serves, and no user sees a version, until a person begins a canary or resumes.
if ! ls "$run"/live/decisions/*.json >/dev/null 2>&1; then
  deltawire live promote "$run" --upstream provider --reason "the product begins with it" >/dev/null
  deltawire live pause "$run" --reason "until a person begins a canary" >/dev/null
fi
start decide deltawire live decide "$run" --gate "${GATE:-none}"

printf '%s' "$url" >"$state/url"
echo "ready: $url/v1, token in $state/token; page: $(grep -m1 -o 'http[^ ]*' "$state/page.log" || true)"
wait -n
echo "a process ended; the ends of the logs:" >&2
tail -n 3 "$state"/*.log >&2
exit 1
