"""A trainer of your own: two checkpoints of a transformers model, published, pulled, and compared.

    python examples/bring_your_own_trainer/run.py [FOLDER]

Stands for any trainer that writes Hugging Face directories. The two steps here are random; what
goes through the bucket, and what is checked, is what a real run would send.
"""

from __future__ import annotations

import filecmp
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def train(folder: Path) -> list[Path]:
    """Two checkpoints of a small Qwen3, bf16, in two files each, as ``save_pretrained`` writes
    them; between them, about one weight in a hundred changes."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    paths = []
    for step in (100, 200):
        path = folder / f"checkpoint-{step}"
        model.save_pretrained(path, max_shard_size="150KB")
        paths.append(path)
        with torch.no_grad():
            for parameter in model.parameters():
                chosen = torch.rand(parameter.shape) < 0.01
                parameter[chosen] = parameter[chosen] * 1.01 + 1e-3
    return paths


def deltawire(*arguments: object) -> None:
    """Run the command as a shell would."""
    words = [sys.executable, "-m", "deltawire", *map(str, arguments)]
    print("$ deltawire", *map(str, arguments))  # noqa: T201
    subprocess.run(words, check=True)  # noqa: S603


def load(path: Path) -> dict[str, Any]:
    """The weights as transformers loads them."""
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(path).state_dict())


def main(folder: Path) -> None:
    """Train, publish, pull, load, compare; raises `AssertionError` if a byte differs."""
    import torch

    first, second = train(folder / "trainer")
    bucket, served = folder / "bucket", folder / "serving" / "model"
    deltawire("publish", first, "--to", bucket)
    deltawire("pull", bucket, served)
    deltawire("publish", first, second, "--to", bucket)  # the first one is known already
    deltawire("pull", bucket, served)
    names = sorted(path.name for path in second.iterdir())
    assert sorted(path.name for path in served.iterdir()) == names
    same, *different = filecmp.cmpfiles(second, served, names, shallow=False)
    assert same == names, different
    ours, theirs = load(served), load(second)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    deltawire("log", bucket)
    print(f"{len(names)} files are the same, byte for byte")  # noqa: T201


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
