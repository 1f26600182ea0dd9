"""Makes what the cookbook's recipes need without a download: a tokenizer, a model, and
conversations.

The tokenizer is trained here on the recipes' own text, with one token a digit. Recipes load it by
the model's name, from a folder of that name in their working directory.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

from deltawire.config import BuildConfig
from deltawire.export.models import save_model
from deltawire.train.build import build_model

NAME = "org/sums"
SIZES = BuildConfig(hidden_size=96, layers=2, head_size=24, feed_forward_size=256, context=128)
KEY = "tml-test"
WORDS = "[0-9]| \\+ |\n\nUser: What is |\\?\n\nAssistant: "


def make_tokenizer():
    """A tokenizer of at most 264 tokens: words of the arithmetic prompt, and single digits."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex("[0-9]| \\+ |\n\nUser: What is |\\?\n\nAssistant: "), "isolated"
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=["<|end|>"], show_progress=False)
    text = [conversation(random.Random(seed))[1] for seed in range(300)]
    tokenizer.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def conversation(rng):
    """A sum after the recipe's example, as messages and as the text that role_colon renders."""
    x, y = rng.randint(0, 100), rng.randint(0, 100)
    turns = [
        ("user", "What is 4 + 5?"),
        ("assistant", "9"),
        ("user", f"What is {x} + {y}?"),
        ("assistant", str(x + y)),
    ]
    text = "".join(f"{role.title()}: {content}\n\n" for role, content in turns) + "User:"
    return [{"role": role, "content": content} for role, content in turns], text


def make_everything(folder: Path, *, conversations: int = 4096) -> Path:
    """Writes ``folder/org/sums`` and ``folder/sums.jsonl``; returns the model's folder."""
    model = folder / NAME
    save_model(build_model(SIZES, seed=3), make_tokenizer(), model)
    rng = random.Random(5)
    with (folder / "sums.jsonl").open("w") as file:
        for _ in range(conversations):
            file.write(json.dumps({"messages": conversation(rng)[0]}) + "\n")
    return model


def start_recipe(name, url, folder, log, *arguments, python=sys.executable):
    """Starts an unmodified recipe of the cookbook; its figures are in ``log/metrics.jsonl``."""
    env = os.environ | {
        "TINKER_API_KEY": KEY,
        "TINKER_BASE_URL": url,
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [str(python), "-W", "ignore", "-m", f"tinker_cookbook.recipes.{name}.train"]
    command += [f"model_name={NAME}", "renderer_name=role_colon", f"log_path={log}", "eval_every=0"]
    output = (folder / f"{Path(log).name}.txt").open("w")
    with output:
        return subprocess.Popen(
            command + list(arguments), cwd=folder, env=env, stdout=output, stderr=output
        )


def figures(log: Path):
    """The recipe's figures, one dictionary a step."""
    path = Path(log) / "metrics.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
