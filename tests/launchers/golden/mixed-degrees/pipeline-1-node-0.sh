#!/usr/bin/env bash
# Pipeline 1, node 0: g6e.xlarge (aws/us-west-2/g6e.xlarge/on_demand)
# Layers 0-22 on GPU 0
set -euo pipefail

# Private addresses of this machine and of the pipeline's first. vLLM's own queues speak pickle over TCP:
# only machines of this pipeline may reach them.
: "${HETPLAN_PIPELINE_1_NODE_0:?set it to the private address of that machine}"
model=Qwen/Qwen2.5-32B
model="${HETPLAN_MODEL:-$model}"

export VLLM_HOST_IP="$HETPLAN_PIPELINE_1_NODE_0"
export VLLM_PP_LAYER_PARTITION=23,21,20
export HETPLAN_LAYOUT='{"stages":[{"layers":[0,23],"tensor_parallel":1,"node":0,"kv_cache_bytes":18816499891},{"layers":[23,44],"tensor_parallel":2,"node":1,"kv_cache_bytes":10610253417},{"layers":[44,64],"tensor_parallel":2,"node":1,"kv_cache_bytes":8966444445}]}'

arguments=(
  "$model"
  --host="$HETPLAN_PIPELINE_1_NODE_0"
  --master-addr="$HETPLAN_PIPELINE_1_NODE_0"
  --served-model-name=qwen2.5-32b
  --tensor-parallel-size=1
  --pipeline-parallel-size=3
  --max-model-len=995
  --max-num-seqs=192
  --max-num-batched-tokens=2048
  --kv-cache-memory-bytes=18816499891
  --dtype=bfloat16
  --shutdown-timeout=120
  --worker-cls=hetplan.runtime.vllm_plugin.worker.StagedGpuWorker
  --distributed-executor-backend=mp
  --nnodes=2
  --node-rank=0
  --master-port=29500
  --port=8000
  --enable-scale-out
)
exec "${HETPLAN_VLLM:-vllm}" serve "${arguments[@]}"
