"""The reward of examples/real/sums.toml: the last number of the answer has to be the sum."""

import re


def last_number(completion: str, row: dict) -> float:
    """Returns 1 for the right number, 0.1 for anything else."""
    numbers = re.findall(r"-?\d+", completion)
    return 1.0 if numbers and numbers[-1] == row["answer"] else 0.1
