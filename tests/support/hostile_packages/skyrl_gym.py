"""Stands in for SkyRL-Gym: an environment that misbehaves as its name says."""

import os
import subprocess
import time


def make(how, *, env_config, extras):
    return Environment(how)


class Environment:
    def __init__(self, how):
        self.how = how

    def init(self, prompt):
        if self.how == "hangs at the start":
            time.sleep(3600)
        if self.how == "raises at the start":
            raise RuntimeError("no luck")
        return prompt, {}

    def step(self, action):
        if self.how == "hangs":
            time.sleep(3600)
        if self.how == "raises":
            raise KeyError("no luck")
        if self.how == "dies":
            os._exit(3)
        if self.how == "prints":
            os.write(1, b'{"reward": 7}\n')
            os.write(2, b"x" * 1_000_000)
        if self.how == "leaves a process":
            subprocess.Popen(["sleep", "3600"])
        if self.how == "eats memory":
            bytearray(1 << 40)
        said = {
            "floods": [{"role": "user", "content": "x" * 10_000_000}],
            "many messages": [{"role": "user", "content": ""}] * 65,
            "a role": [{"role": "root", "content": ""}],
            "no messages": "hello",
        }
        rewards = {"NaN": float("nan"), "1e308": 1e308, "a text": "1.0", "a long integer": 10**400}
        return {
            "observations": said.get(self.how, []),
            "reward": rewards.get(self.how, 1.0),
            "done": "yes" if self.how == "done in words" else True,
            "metadata": {"no metadata": None, "a word": {"steps": "two"}}.get(
                self.how, {"steps": 1}
            ),
        }
