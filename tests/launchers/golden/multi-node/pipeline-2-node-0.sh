#!/usr/bin/env bash
# Pipeline 2, node 0: g6e.xlarge (aws/us-west-2/g6e.xlarge/on_demand)
# Layers 0-18 on GPU 0
set -euo pipefail

# Private addresses of this machine and of the pipeline's first. vLLM's own queues speak pickle over TCP:
# only machines of this pipeline may reach them.
: "${HETPLAN_PIPELINE_2_NODE_0:?set it to the private address of that machine}"
model=meta-llama/Llama-3.1-70B
model="${HETPLAN_MODEL:-$model}"

export VLLM_HOST_IP="$HETPLAN_PIPELINE_2_NODE_0"
export VLLM_PP_LAYER_PARTITION=19,21,21,19

arguments=(
  "$model"
  --host="$HETPLAN_PIPELINE_2_NODE_0"
  --master-addr="$HETPLAN_PIPELINE_2_NODE_0"
  --served-model-name=llama-3.1-70b
  --tensor-parallel-size=1
  --pipeline-parallel-size=4
  --max-model-len=995
  --max-num-seqs=76
  --max-num-batched-tokens=2048
  --kv-cache-memory-bytes=8148675559
  --dtype=bfloat16
  --shutdown-timeout=120
  --distributed-executor-backend=mp
  --nnodes=4
  --node-rank=0
  --master-port=29501
  --port=8001
  --enable-scale-out
)
exec "${HETPLAN_VLLM:-vllm}" serve "${arguments[@]}"
