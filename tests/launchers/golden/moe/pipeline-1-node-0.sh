#!/usr/bin/env bash
# Pipeline 1, node 0: g6e.12xlarge (aws/us-west-2/g6e.12xlarge/on_demand)
# Layers 0-15 on GPU 0,1, 16-31 on GPU 2,3
set -euo pipefail

# Private addresses of this machine and of the pipeline's first. vLLM's own queues speak pickle over TCP:
# only machines of this pipeline may reach them.
: "${HETPLAN_PIPELINE_1_NODE_0:?set it to the private address of that machine}"
model=mistralai/Mixtral-8x7B-v0.1
model="${HETPLAN_MODEL:-$model}"

export VLLM_HOST_IP="$HETPLAN_PIPELINE_1_NODE_0"
export VLLM_PP_LAYER_PARTITION=16,16

arguments=(
  "$model"
  --host="$HETPLAN_PIPELINE_1_NODE_0"
  --served-model-name=mixtral-8x7b
  --tensor-parallel-size=2
  --pipeline-parallel-size=2
  --max-model-len=995
  --max-num-seqs=558
  --max-num-batched-tokens=2048
  --kv-cache-memory-bytes=18940848799
  --dtype=bfloat16
  --shutdown-timeout=120
  --distributed-executor-backend=mp
  --port=8000
  --enable-scale-out
)
exec "${HETPLAN_VLLM:-vllm}" serve "${arguments[@]}"
