#!/usr/bin/env bash
# Waits until every pipeline answers; fails after HETPLAN_READY_TIMEOUT_S seconds (default 1800).
set -euo pipefail
limit="${HETPLAN_READY_TIMEOUT_S:-1800}"
ready() {
  until curl --fail --silent --show-error --max-time 5 --output /dev/null "$1" 2>/dev/null; do
    if (( SECONDS > limit )); then echo "not ready after ${limit} s: $1" >&2; exit 1; fi
    sleep 2
  done
  echo "ready: $1"
}
ready "http://${HETPLAN_PIPELINE_1_NODE_0:?set it to the private address of that machine}:8000/health"
