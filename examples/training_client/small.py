# ruff: noqa: T201
"""A small model to try the examples on: `python examples/training_client/small.py MODEL_DIR`."""

import sys
from pathlib import Path

from deltawire.config import BuildConfig
from deltawire.export.models import save_model
from deltawire.train.build import build_model, byte_tokenizer


def build(directory: Path) -> Path:
    """Writes a byte-level model of about 60,000 parameters, with random weights."""
    sizes = BuildConfig(hidden_size=48, layers=2, head_size=16, feed_forward_size=128, context=128)
    save_model(build_model(sizes, seed=0), byte_tokenizer(), directory)
    return directory


if __name__ == "__main__":
    print("wrote", build(Path(sys.argv[1])))
