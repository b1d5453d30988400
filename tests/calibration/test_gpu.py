"""Calibrate the GPU at hand, predict a decoder layer, then time it in torch. Without a GPU there is no test here."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from hetplan.calibration.fit_run import fit_run
from hetplan.calibration.measure import measure
from hetplan.catalog.model import ModelSpec
from hetplan.catalog.steps import get_step_overheads
from hetplan.catalog.tables import default_instance_type
from hetplan.estimator.calibrated import CalibratedEstimator, StepWork, step_work
from hetplan.estimator.replica import make_replica

torch: Any = importlib.import_module("torch") if importlib.util.find_spec("torch") else None
SLACK = 2.0
HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM = 4096, 14336, 32, 8, 128
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
PROMPT = (1, 2048)
CACHED = (16, 1024)


def block(device: str, dtype: Any, sequences: int, context: int, *, prefill: bool) -> Callable[[], Any]:
    """A Llama layer: ``sequences`` prompts of ``context`` tokens, or one token each over so many cached ones."""
    functional = torch.nn.functional

    def made(*shape: int) -> Any:
        return torch.randn(shape, device=device).mul_(0.02).to(dtype)

    new = context if prefill else 1
    width = HEADS * HEAD_DIM
    qkv, out = made(width + 2 * KV_HEADS * HEAD_DIM, HIDDEN), made(HIDDEN, width)
    gate_up, down, norm = made(2 * MLP, HIDDEN), made(HIDDEN, MLP), made(HIDDEN)
    state, cache = made(sequences, new, HIDDEN), made(2, sequences, KV_HEADS, context, HEAD_DIM)

    def run() -> Any:
        x = functional.rms_norm(state, (HIDDEN,), norm, 1e-5)
        parts = functional.linear(x, qkv).view(sequences, new, HEADS + 2 * KV_HEADS, HEAD_DIM).transpose(1, 2)
        query, key, value = parts.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        if not prefill:
            cache[0, :, :, -1:], cache[1, :, :, -1:] = key, value
            key, value = cache
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=prefill, enable_gqa=True)
        x = state + functional.linear(seen.transpose(1, 2).reshape(sequences, new, width), out)
        gate, up = functional.linear(functional.rms_norm(x, (HIDDEN,), norm, 1e-5), gate_up).chunk(2, dim=-1)
        return x + functional.linear(functional.silu(gate) * up, down)

    return run


def timed(run: Callable[[], Any], calls: int = 20) -> float:
    """Seconds of a call in a CUDA graph, as engines run decode steps; the fastest of three rounds."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    found = []
    for _ in range(4):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1000 / calls)
    return float(min(found[1:]))


if torch is not None and torch.cuda.is_available():

    @pytest.mark.gpu
    def test_a_layer_that_was_predicted_takes_that_long() -> None:
        run = measure("cuda", dtypes=["fp16"], operations=None, point_limit_s=0.05)
        calibration = fit_run(run)
        none = get_step_overheads("vllm").replace(step_s=0.0, layer_s=0.0, prefill_layer_s=0.0)
        model = ModelSpec.from_config(CONFIG | {"torch_dtype": "float16"})
        machine = default_instance_type(calibration.gpu)
        replica = make_replica(
            model, machine, calibration.replace(step_overheads=(none,)), tensor_parallel=1, pipeline_parallel=1,
            schedule="static", engine="vllm", estimator="calibrated", gpu_memory_utilization=0.9,
        )  # fmt: skip
        estimator = CalibratedEstimator(replica.problem)

        def predicted(work: StepWork) -> float:
            return float(estimator.layer_step_s(model, 0, machine, 1, work)[0])

        with torch.inference_mode():
            for name, load, work in (
                ("prefill", PROMPT, step_work(prompts=PROMPT[0], prompt_tokens=PROMPT[1])),
                ("decode", CACHED, step_work(sequences=CACHED[0], context=CACHED[1])),
            ):
                seconds = timed(block("cuda", torch.float16, *load, prefill=name == "prefill"))
                ratio = predicted(work) / seconds
                print(f"{name} of a layer on {run.device.name}: {seconds * 1e6:.0f} us, predicted {ratio - 1:+.0%}")
                assert 1 / SLACK < ratio < SLACK
