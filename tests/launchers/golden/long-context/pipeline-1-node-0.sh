#!/usr/bin/env bash
# Pipeline 1, node 0: g6e.12xlarge (aws/us-west-2/g6e.12xlarge/on_demand)
# Layers 0-7 on GPU 0, 8-15 on GPU 1, 16-23 on GPU 2, 24-31 on GPU 3
set -euo pipefail

# Private addresses of this machine and of the pipeline's first. vLLM's own queues speak pickle over TCP:
# only machines of this pipeline may reach them.
: "${HETPLAN_PIPELINE_1_NODE_0:?set it to the private address of that machine}"
model=meta-llama/Llama-3.1-8B
model="${HETPLAN_MODEL:-$model}"

export VLLM_HOST_IP="$HETPLAN_PIPELINE_1_NODE_0"
export VLLM_PP_LAYER_PARTITION=8,8,8,8

arguments=(
  "$model"
  --host="$HETPLAN_PIPELINE_1_NODE_0"
  --served-model-name=llama-3.1-8b
  --tensor-parallel-size=1
  --pipeline-parallel-size=4
  --max-model-len=131072
  --max-num-seqs=992
  --max-num-batched-tokens=2048
  --kv-cache-memory-bytes=37262098202
  --dtype=bfloat16
  --shutdown-timeout=120
  --distributed-executor-backend=mp
  --port=8000
  --enable-scale-out
)
exec "${HETPLAN_VLLM:-vllm}" serve "${arguments[@]}"
