#!/usr/bin/env bash
# Pipeline 1, node 0: g6.12xlarge (aws/us-west-2/g6.12xlarge/on_demand)
# Layers 0-8 on GPU 0, 9-18 on GPU 1, 19-28 on GPU 2, 29-35 on GPU 3
set -euo pipefail

# Private addresses of this machine and of the pipeline's first. vLLM's own queues speak pickle over TCP:
# only machines of this pipeline may reach them.
: "${HETPLAN_PIPELINE_1_NODE_0:?set it to the private address of that machine}"
model=Qwen/Qwen3-8B
model="${HETPLAN_MODEL:-$model}"

export VLLM_HOST_IP="$HETPLAN_PIPELINE_1_NODE_0"
export VLLM_PP_LAYER_PARTITION=9,10,10,7

arguments=(
  "$model"
  --host="$HETPLAN_PIPELINE_1_NODE_0"
  --served-model-name=qwen3-8b
  --tensor-parallel-size=1
  --pipeline-parallel-size=4
  --max-model-len=995
  --max-num-seqs=428
  --max-num-batched-tokens=2048
  --kv-cache-memory-bytes=16015138558
  --dtype=bfloat16
  --shutdown-timeout=120
  --distributed-executor-backend=mp
  --port=9000
  --enable-scale-out
)
exec "${HETPLAN_VLLM:-vllm}" serve "${arguments[@]}"
