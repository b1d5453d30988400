"""Times one prefill and the decode steps of decoders with random weights in real vLLM, step by step, in one process.

The process has vLLM import once for all decoders. The engine runs inside it, so that a call of its ``step`` is one
pass of the model: no part of a time is a difference of two runs, and start, tokenising and detokenising are outside it.
As a script: a JSON list of `Decoder` as the argument, a JSON list of `DecoderTiming` on stdout.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from hetplan.base import Frozen
from hetplan.errors import InvalidInputError

MODULE = "hetplan.calibration.vllm_decoder"
# In one process, on one socket. nobind: vLLM's own binding needs a worker process, and takes its threads' CPUs from
# others.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_BLOCK_TOKENS = 128
_TAIL = 3000

Count = Annotated[int, Field(gt=0)]
Torch = Literal["float32", "bfloat16", "float16"]


class Decoder(Frozen):
    """A Llama with random weights, and the batch it is timed with: each sequence has ``input_tokens``."""

    hidden_size: Count
    intermediate_size: Count
    layers: Count
    heads: Count
    kv_heads: Count
    vocabulary_size: Count = 32000
    dtype: Torch = "float32"
    batch: Count = 1
    input_tokens: Count = 128
    output_tokens: Annotated[int, Field(ge=2)] = 9
    repeats: Count = 3

    def hugging_face(self) -> dict[str, Any]:
        """Its config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary_size,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": self.dtype,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


class StepTiming(Frozen):
    """Median, the fastest (what a machine that does nothing else would take), and interquartile range over median."""

    median_s: Annotated[float, Field(gt=0)]
    fastest_s: Annotated[float, Field(gt=0)]
    relative_spread: Annotated[float, Field(ge=0)]


class DecoderTiming(Frozen):
    """Steps of a decoder: one prefill of the whole batch, and one token of each sequence."""

    decoder: Decoder
    prefill: StepTiming
    decode: StepTiming


def time_decoders(
    decoders: Sequence[Decoder],
    *,
    python: str | Path = sys.executable,
    threads: int = 1,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 600,
) -> list[DecoderTiming]:
    """Time decoders in vLLM, in a process of their own.

    Parameters
    ----------
    decoders : sequence of Decoder
    python : path
        An interpreter that has vLLM and hetplan.
    threads : int
        OpenMP threads of that process.
    environment : mapping, optional
        Further environment variables.
    timeout_s : float
        Seconds after which the process is ended.

    Raises
    ------
    InvalidInputError
        If vLLM is not there, fails or does not end; the message ends with what it last wrote.
    """
    argv = [str(python), "-m", MODULE, json.dumps([decoder.model_dump() for decoder in decoders])]
    variables = os.environ | _ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)} | dict(environment or {})
    try:
        done = subprocess.run(  # noqa: S603 (this package's own module, no shell)
            argv, env=variables, capture_output=True, text=True, check=False, timeout=timeout_s
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidInputError(f"vLLM's steps could not be timed: {error}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-_TAIL:]
        raise InvalidInputError(f"vLLM's steps could not be timed: it ended with {done.returncode}: {said}")
    return [DecoderTiming.from_dict(one) for one in json.loads(done.stdout)]


def _time(decoder: Decoder) -> DecoderTiming:
    """In this process, which has no other engine now."""
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(decoder.hugging_face()), encoding="utf-8")
        most = decoder.input_tokens + decoder.output_tokens + 1
        head = decoder.hidden_size // decoder.heads
        token_bytes = 2 * decoder.layers * decoder.kv_heads * head * (4 if decoder.dtype == "float32" else 2)
        # Whole blocks for each sequence, and a few to spare.
        blocks = decoder.batch * -(-most // _BLOCK_TOKENS) + 4
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=decoder.dtype,
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=most,
            max_num_seqs=decoder.batch,
            max_num_batched_tokens=max(decoder.batch * decoder.input_tokens, most),
            kv_cache_memory_bytes=blocks * _BLOCK_TOKENS * token_bytes,
            disable_log_stats=True,
        )
    sampling = SamplingParams(temperature=0.0, max_tokens=decoder.output_tokens, ignore_eos=True, detokenize=False)
    engine = llm.llm_engine
    prefills: list[float] = []
    decodes: list[float] = []
    # The first pass makes oneDNN's kernels and touches every page: not counted.
    for repeat in range(decoder.repeats + 1):
        for sequence in range(decoder.batch):
            first = (repeat * decoder.batch + sequence) % 1000
            prompt = [(first + 7 * i) % (decoder.vocabulary_size - 3) + 3 for i in range(decoder.input_tokens)]
            engine.add_request(f"{repeat}-{sequence}", {"prompt_token_ids": prompt}, sampling)
        seconds = []
        while engine.has_unfinished_requests():
            start = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - start)
        if len(seconds) != decoder.output_tokens:
            raise RuntimeError(f"{len(seconds)} steps for a prefill and {decoder.output_tokens - 1} decode steps")
        if repeat:
            prefills.append(seconds[0])
            decodes += seconds[1:]
    return DecoderTiming(decoder=decoder, prefill=_summary(prefills), decode=_summary(decodes))


def _summary(seconds: list[float]) -> StepTiming:
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else 3 * seconds
    return StepTiming(median_s=middle, fastest_s=min(seconds), relative_spread=(high - low) / middle)


def _clean() -> None:
    """Take down what is left of an engine, so that another can start. Takes seconds: not after the last."""
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


def _main() -> None:
    # vLLM logs to stdout: it goes to stderr here, so that stdout holds the answer alone.
    answer_to = os.dup(1)
    os.dup2(2, 1)
    timed: list[DecoderTiming] = []
    for one in json.loads(sys.argv[1]):
        if timed:
            _clean()
        timed.append(_time(Decoder.from_dict(one)))
    with os.fdopen(answer_to, "w", encoding="utf-8") as answer:
        answer.write(json.dumps([timing.model_dump() for timing in timed]))


if __name__ == "__main__":
    _main()
