"""The loop: asynchronous reinforcement learning over a bucket."""
