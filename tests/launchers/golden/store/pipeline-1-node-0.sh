#!/usr/bin/env bash
# Pipeline 1, node 0: g5.12xlarge (aws/us-west-2/g5.12xlarge/on_demand)
# Layers 0-21 on GPU 0,1, 22-42 on GPU 2,3
set -euo pipefail

# Private addresses of this machine and of the pipeline's first. vLLM's own queues speak pickle over TCP:
# only machines of this pipeline may reach them.
: "${HETPLAN_PIPELINE_1_NODE_0:?set it to the private address of that machine}"
model=Qwen/Qwen2.5-32B
model="${HETPLAN_MODEL:-$model}"

export VLLM_HOST_IP="$HETPLAN_PIPELINE_1_NODE_0"
export VLLM_PP_LAYER_PARTITION=22,21,21
export HETPLAN_LAYOUT='{"stages":[{"layers":[0,22],"tensor_parallel":2,"node":0,"kv_cache_bytes":8543076150,"start_kv_cache_bytes":46858240,"hold_bytes":754135859},{"layers":[22,43],"tensor_parallel":2,"node":0,"kv_cache_bytes":9811389238,"start_kv_cache_bytes":44728320,"hold_bytes":754135859},{"layers":[43,64],"tensor_parallel":1,"node":1,"kv_cache_bytes":17781842838,"start_kv_cache_bytes":89456640,"hold_bytes":1656010833}]}'
export HETPLAN_STORE_MODEL=qwen2.5-32b
export HETPLAN_STORE="${HETPLAN_STORE:-${XDG_RUNTIME_DIR:-/tmp/hetplan-$(id -u)}/hetplan/pipeline-1-node-0.sock}"

arguments=(
  "$model"
  --host="$HETPLAN_PIPELINE_1_NODE_0"
  --master-addr="$HETPLAN_PIPELINE_1_NODE_0"
  --served-model-name=qwen2.5-32b
  --tensor-parallel-size=1
  --pipeline-parallel-size=3
  --max-model-len=1024
  --max-num-seqs=189
  --max-num-batched-tokens=2048
  --kv-cache-memory-bytes=8543076150
  --dtype=bfloat16
  --shutdown-timeout=120
  --worker-cls=hetplan.runtime.vllm_plugin.worker.StagedGpuWorker
  --distributed-executor-backend=mp
  --nnodes=2
  --node-rank=0
  --master-port=29500
  --port=8000
  --enable-scale-out
  --load-format=hetplan
)
exec "${HETPLAN_VLLM:-vllm}" serve "${arguments[@]}"
