"""Writes the documents of midtrain.toml: questions about words with their answers, and words."""

import json
import random
import sys
from pathlib import Path

import reasoning_gym

COUNT = 2000

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
tasks = reasoning_gym.create_dataset(
    "spell_backward", size=COUNT, seed=7, min_word_len=3, max_word_len=3
)
with (folder / "spelled.jsonl").open("w") as file:
    for task in tasks:
        text = f"{task['question']}\n{task['answer']}"
        file.write(json.dumps({"text": text}) + "\n")
words = random.Random(7)
with (folder / "plain.jsonl").open("w") as file:
    for _ in range(COUNT):
        drawn = [tasks[words.randrange(COUNT)]["answer"] for _ in range(8)]
        file.write(json.dumps({"text": " ".join(drawn)}) + "\n")
