#!/usr/bin/env bash
# Pipeline 1, node 0: g6.12xlarge (aws/us-west-2/g6.12xlarge/on_demand)
# Layers 0-7 on GPU 0,1, 8-15 on GPU 2,3
set -euo pipefail

# Private addresses of this machine and of the pipeline's first. vLLM's own queues speak pickle over TCP:
# only machines of this pipeline may reach them.
: "${HETPLAN_PIPELINE_1_NODE_0:?set it to the private address of that machine}"
model=meta-llama/Llama-3.1-70B
model="${HETPLAN_MODEL:-$model}"

export VLLM_HOST_IP="$HETPLAN_PIPELINE_1_NODE_0"
export VLLM_PP_LAYER_PARTITION=8,8,8,8,9,8,8,8,9,6

arguments=(
  "$model"
  --host="$HETPLAN_PIPELINE_1_NODE_0"
  --master-addr="$HETPLAN_PIPELINE_1_NODE_0"
  --served-model-name=llama-3.1-70b
  --tensor-parallel-size=2
  --pipeline-parallel-size=10
  --max-model-len=995
  --max-num-seqs=710
  --max-num-batched-tokens=2048
  --kv-cache-memory-bytes=12925375005
  --dtype=bfloat16
  --shutdown-timeout=120
  --distributed-executor-backend=mp
  --nnodes=5
  --node-rank=0
  --master-port=29500
  --port=8000
  --enable-scale-out
)
exec "${HETPLAN_VLLM:-vllm}" serve "${arguments[@]}"
