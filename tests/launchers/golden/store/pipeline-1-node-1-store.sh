#!/usr/bin/env bash
# Tensor store of pipeline 1, node 1: g6e.xlarge (aws/us-west-2/g6e.xlarge/on_demand)
set -euo pipefail

arguments=(
  --socket="${HETPLAN_STORE:-${XDG_RUNTIME_DIR:-/tmp/hetplan-$(id -u)}/hetplan/pipeline-1-node-1.sock}"
  --shards=s3://shards/qwen2.5-32b
  --allow-host=s3://shards
  --device=cuda:0
  --memory=43219887160
)
exec "${HETPLAN:-hetplan}" store serve "${arguments[@]}"
