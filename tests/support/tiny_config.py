"""Sections of a configuration whose run takes seconds: a tiny model, and two workers."""

MODEL = """\
[model.build]
hidden_size = 32
layers = 1
head_size = 16
feed_forward_size = 64
context = 128
"""

ROLLOUT = """\
[rollout]
workers = 2
group_size = 4
max_tokens = 6
slots = 16
context = 96
"""


def endless(name: str, *, checkpoint_every: int, anchor_every: int, evaluate_every: int) -> str:
    """A run of two workers with versions without end: something stops it."""
    return f"""
name = "{name}"
{MODEL}[task]
heldout = 4
options = {{ min_word_len = 3, max_word_len = 4 }}
[warm_start]
max_steps = 2
check_every = 2
{ROLLOUT}[train]
versions = 1000000
groups_per_step = 4
max_staleness = 2
checkpoint_every = {checkpoint_every}
anchor_every = {anchor_every}
[evaluate]
every = {evaluate_every}
samples = 1
"""
