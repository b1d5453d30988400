#!/usr/bin/env bash
# Pipeline 1, node 0: g6e.12xlarge (aws/us-west-2/g6e.12xlarge/on_demand)
# Layers 0-19 on GPU 0, 20-40 on GPU 1, 41-61 on GPU 2, 62-79 on GPU 3
set -euo pipefail

# Private addresses of this machine and of the pipeline's first. vLLM's own queues speak pickle over TCP:
# only machines of this pipeline may reach them.
: "${HETPLAN_PIPELINE_1_NODE_0:?set it to the private address of that machine}"
model=meta-llama/Llama-3.1-70B
model="${HETPLAN_MODEL:-$model}"

export VLLM_HOST_IP="$HETPLAN_PIPELINE_1_NODE_0"
export VLLM_PP_LAYER_PARTITION=20,21,21,18

arguments=(
  "$model"
  --host="$HETPLAN_PIPELINE_1_NODE_0"
  --served-model-name=llama-3.1-70b
  --tensor-parallel-size=1
  --pipeline-parallel-size=4
  --max-model-len=995
  --max-num-seqs=576
  --max-num-batched-tokens=2048
  --kv-cache-memory-bytes=23550126519
  --dtype=bfloat16
  --shutdown-timeout=120
  --quantization=fp8
  --kv-cache-dtype=fp8
  --distributed-executor-backend=mp
  --port=8000
  --enable-scale-out
)
exec "${HETPLAN_VLLM:-vllm}" serve "${arguments[@]}"
