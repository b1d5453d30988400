#!/usr/bin/env bash
# Tensor store of pipeline 1, node 0: g5.12xlarge (aws/us-west-2/g5.12xlarge/on_demand)
set -euo pipefail

arguments=(
  --socket="${HETPLAN_STORE:-${XDG_RUNTIME_DIR:-/tmp/hetplan-$(id -u)}/hetplan/pipeline-1-node-0.sock}"
  --shards=s3://shards/qwen2.5-32b
  --allow-host=s3://shards
  --device=cuda:0
  --device=cuda:1
  --device=cuda:2
  --device=cuda:3
  --memory=21604314524
)
exec "${HETPLAN:-hetplan}" store serve "${arguments[@]}"
