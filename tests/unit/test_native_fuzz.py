"""The fuzz targets of native/fuzz, for some seconds each: under sanitizers, nothing is found.

`make fuzz` runs them for as long as one likes, by libFuzzer where there is clang++. Here our own
driver runs them, from the same seeds every time, so that it takes no more than a C++ compiler.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.drills

FUZZ = Path(__file__).parents[2] / "native" / "fuzz"
SECONDS = 10
BUILD_SECONDS = 900


def compiler():
    """The C++ compiler that has both sanitizers; skips where there is none."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and shutil.which(name) and has_sanitizers(name):
            return name
    return pytest.skip("no C++ compiler here has the address and undefined-behaviour sanitizers")


def has_sanitizers(name):
    words = [name, "-x", "c++", "-fsanitize=address,undefined", "-o", os.devnull, "-"]
    done = subprocess.run(words, input=b"int main() {}", capture_output=True, check=False)
    return done.returncode == 0


def make(goal, folder, **variables):
    words = [shutil.which("make") or pytest.skip("there is no make"), "-C", str(FUZZ), "-j2", goal]
    words += [f"{name}={value}" for name, value in variables.items()]
    done = subprocess.run(
        [*words, f"OUT={folder}"], capture_output=True, check=False, text=True,
        timeout=BUILD_SECONDS,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def built():
    """The variables that make needs; the targets stay in build/ until native/ changes."""
    variables = {"folder": FUZZ.parents[1] / "build" / "fuzz", "CXX": compiler(), "ENGINE": "own"}
    code, said = make("build", **variables)
    assert code == 0, said[-4000:]
    return variables


@pytest.mark.timeout(BUILD_SECONDS + 120)
@pytest.mark.parametrize("target", ["delta", "whole", "round_trip"])
def test_targets_find_nothing_in_a_short_run(target, built):
    code, said = make("run", **built, TARGETS=target, SECONDS=SECONDS, SEED=1)
    assert code == 0, said[-8000:]
    runs = int(said.split("Done ")[1].split(" runs")[0])
    assert runs > 56, "the seeds are already more"
