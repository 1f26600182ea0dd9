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
