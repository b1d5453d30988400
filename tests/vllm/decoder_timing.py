"""Times one prefill and the decode steps of a random decoder in real vLLM, step by step, in one process.

Run by vLLM's own Python as a script: one JSON object of `DecoderConfig` fields as the argument, one JSON object on
stdout. The engine runs in this process, so that a call of its ``step`` is one pass of the model: no part of a time
is a difference of two runs, and start, tokenising and detokenising are outside it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# On one socket. nobind: vLLM's own binding needs a worker process, and takes its threads' CPUs from others.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@dataclass(frozen=True)
class DecoderConfig:
    """A Llama with random weights, and the batch it is timed with: each sequence has ``input_tokens``."""

    hidden_size: int = 1024
    intermediate_size: int = 2816
    layers: int = 16
    heads: int = 16
    kv_heads: int = 8
    vocabulary: int = 32000
    dtype: str = "float32"
    batch: int = 1
    input_tokens: int = 128
    decode_steps: int = 8
    repeats: int = 3
    threads: int = 1

    def hugging_face(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": self.dtype,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


def measure_decoder(config: DecoderConfig, python: Path, timeout_s: float = 600) -> dict[str, float]:
    """Seconds of a prefill of the whole batch and of one decode step, by vLLM in a process of its own."""
    done = subprocess.run(
        [python, Path(__file__).resolve(), json.dumps(asdict(config))],
        env=os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(config.threads)},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    if done.returncode:
        raise RuntimeError(f"vLLM failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def time_decoder(config: DecoderConfig) -> dict[str, float]:
    """The same, in this process: vLLM is imported here and must be new to it."""
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config.hugging_face()), encoding="utf-8")
        most = config.input_tokens + config.decode_steps + 2
        head = config.hidden_size // config.heads
        token_bytes = 2 * config.layers * config.kv_heads * head * (4 if config.dtype == "float32" else 2)
        # Whole blocks of 128 tokens for each sequence, and a few to spare.
        blocks = config.batch * -(-most // 128) + 4
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=config.dtype,
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=most,
            max_num_seqs=config.batch,
            max_num_batched_tokens=max(config.batch * config.input_tokens, most),
            kv_cache_memory_bytes=blocks * 128 * token_bytes,
            disable_log_stats=True,
        )
    sampling = SamplingParams(temperature=0.0, max_tokens=config.decode_steps + 1, ignore_eos=True, detokenize=False)
    prefills, steps = [], []
    # The first pass makes oneDNN's kernels and touches every page: not counted.
    for repeat in range(config.repeats + 1):
        for sequence in range(config.batch):
            first = 3 + (repeat * config.batch + sequence) % 1000
            prompt = [(first + 7 * i) % (config.vocabulary - 3) + 3 for i in range(config.input_tokens)]
            llm.llm_engine.add_request(f"{repeat}-{sequence}", {"prompt_token_ids": prompt}, sampling)
        seconds = []
        while llm.llm_engine.has_unfinished_requests():
            start = time.perf_counter()
            llm.llm_engine.step()
            seconds.append(time.perf_counter() - start)
        if len(seconds) != config.decode_steps + 1:
            raise RuntimeError(f"{len(seconds)} steps for 1 prefill and {config.decode_steps} decode steps")
        if repeat:
            prefills.append(seconds[0])
            steps += seconds[1:]
    return _summary("prefill", prefills) | _summary("decode_step", steps)


def _summary(name: str, seconds: list[float]) -> dict[str, float]:
    """Median, the fastest (what a machine that does nothing else would take), and interquartile range over median."""
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else 3 * seconds
    return {f"{name}_s": middle, f"{name}_fastest_s": min(seconds), f"{name}_relative_spread": (high - low) / middle}


if __name__ == "__main__":
    # vLLM logs to stdout: it goes to stderr here, so that stdout holds the answer alone.
    answer_to = os.dup(1)
    os.dup2(2, 1)
    measured = time_decoder(DecoderConfig(**json.loads(sys.argv[1])))
    os.write(answer_to, json.dumps(measured).encode())
