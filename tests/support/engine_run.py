"""A whole run of four versions of a tiny model, for engines with servers."""

RUN = """
name = "tiny"
[model.build]
hidden_size = 64
layers = 2
head_size = 32
feed_forward_size = 128
context = 128
[task]
heldout = 4
options = { min_word_len = 3, max_word_len = 4 }
[rollout]
workers = 1
group_size = 4
max_tokens = 6
temperature = 0.8
slots = 16
context = 96
[train]
versions = 4
groups_per_step = 4
max_staleness = 2
optimizer.learning_rate = 1e-3
schedule.warmup_steps = 1
[evaluate]
every = 1000
samples = 1
[parity.stop]
k3 = 1e-6
"""
