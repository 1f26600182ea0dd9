"""A process that runs out of memory says what it asked for; the second time ends the run."""

import errno
import gc
import os
import re
import subprocess
import sys
import time
import weakref

import numpy as np
import pytest

from deltawire.cli import run as run_command
from deltawire.cli.main import main
from deltawire.config import flatten, run_config
from deltawire.errors import BugError, InputError, OutOfMemoryError
from deltawire.runtime import memory
from deltawire.runtime import supervisor as supervising
from deltawire.runtime.memory import (
    SETTINGS,
    describe_failure,
    explaining_memory,
    held_bytes,
    memory_failure,
)
from deltawire.runtime.supervisor import ChildError, Supervisor
from deltawire.store import open_bucket

TOO_MUCH = 1 << 50
"""More bytes than a process has addresses for, so no setting of the kernel grants them."""

AFTER_EXEC = """
import resource
from deltawire.runtime.memory import held_bytes
print(held_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
"""
BIG_PARENT = f"""
import os, sys
filled = b"x" * (400 << 20)
os.execv(sys.executable, [sys.executable, "-c", {AFTER_EXEC!r}])
"""


@pytest.mark.skipif(not held_bytes(), reason="the system does not say what a process holds")
def test_the_peak_of_a_program_is_not_that_of_the_one_that_started_it():
    done = subprocess.run([sys.executable, "-c", BIG_PARENT], capture_output=True, check=True)
    held, by_usage = map(int, done.stdout.split())
    assert by_usage > 400 << 20, "getrusage no longer shows why it is not used"
    assert 1 << 20 < held < 200 << 20


FILLED = """
import numpy as np
from deltawire.runtime.memory import held_bytes
before = held_bytes(peak=False)
filled = np.ones(300 << 20, dtype=np.uint8)
full = held_bytes(peak=False)
del filled
print(before, full, held_bytes(peak=False), held_bytes())
"""


@pytest.mark.skipif(not held_bytes(), reason="the system does not say what a process holds")
def test_the_peak_stays_and_the_present_size_falls():
    """In a process of its own: the heap of one that ran other tests may keep what is freed."""
    done = subprocess.run([sys.executable, "-c", FILLED], capture_output=True, check=True)
    before, full, after, peak = map(int, done.stdout.split())
    assert full > before + (250 << 20)
    assert after < before + (150 << 20)
    assert peak > before + (250 << 20)


def of_python():
    bytearray(1 << 62)


def of_numpy():
    np.empty(TOO_MUCH, dtype=np.uint8)


def of_torch():
    import torch

    torch.empty(TOO_MUCH, dtype=torch.uint8)


def of_a_gpu():
    import torch

    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB "
        "of which 10.50 GiB is free. Including non-PyTorch memory, this process has 68 GiB."
    )


def of_the_system():
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def of_another_thread():
    try:
        of_numpy()
    except MemoryError as error:
        raise BugError("the follower ended") from error


ASKED = {
    of_python: "",
    of_numpy: "it asked for 1048576.0 GiB",
    of_torch: "it asked for 1048576.0 GiB",
    of_a_gpu: "it asked for 20.0 GiB",
    of_the_system: "",
    of_another_thread: "it asked for 1048576.0 GiB",
}


@pytest.mark.parametrize("fails", ASKED, ids=lambda one: one.__name__)
def test_every_failed_allocation_is_told_in_one_line(fails):
    with pytest.raises(OutOfMemoryError) as caught, explaining_memory("w3", "worker"):
        fails()
    line = str(caught.value)
    assert line.startswith("w3 ran out of memory: ")
    assert ASKED[fails] in line
    assert line.endswith("; lower rollout.slots, rollout.context or rollout.workers")
    there = "10.50 GiB of the GPU's 79.11 GiB were free" if fails is of_a_gpu else "this machine's"
    assert there in line
    assert len(line.splitlines()) == 1


@pytest.mark.parametrize(
    "error", [InputError("no"), RuntimeError("no"), OSError(errno.ENOENT, "no"), KeyError("no")]
)
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)) as caught, explaining_memory("trainer", "trainer"):
        raise error
    assert caught.value is error


def test_causes_that_form_a_cycle_are_followed_once():
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__cause__, other.__cause__ = other, one
    assert memory_failure(one) is None
    other.__cause__ = failed = MemoryError()
    failed.__cause__ = one
    assert memory_failure(one) is failed


def test_an_allocation_that_failed_and_was_handled_is_not_the_cause():
    error = None
    try:
        try:
            of_numpy()
        except MemoryError:
            raise InputError("a limit was crossed") from None
    except InputError as caught:
        error = caught
    assert memory_failure(error) is None


class Large:
    pass


def test_what_filled_the_memory_is_free_when_the_error_is_reported():
    seen = []

    def fill():
        large = Large()
        seen.append(weakref.ref(large))
        of_numpy()

    with pytest.raises(OutOfMemoryError) as caught, explaining_memory("trainer", "trainer"):
        fill()
    gc.collect()
    assert isinstance(caught.value.__cause__, MemoryError)
    assert seen[0]() is None


BUILD = {"model.build.layers", "model.build.context"}
"""Keys of a section that this test's configuration leaves out."""


def test_each_role_has_three_settings_and_all_exist():
    known = set(flatten(run_config({"name": "x", "model": {"path": "x"}}, url="")))
    for role, words in SETTINGS.items():
        named = re.findall(r"[a-z_]+\.[a-z_.]+[a-z]", words)
        assert len(set(named)) == 3, role
        assert {one for one in named if one not in known} <= BUILD, role
    assert set(SETTINGS) == {"trainer", "worker", "evaluator", "reference", "warm-start"}


def test_a_command_ends_with_the_status_of_its_own(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run_command, "run", lambda arguments: of_numpy())
    assert main(["run", str(tmp_path / "x.toml")]) == 10
    line = capsys.readouterr().err
    assert line.startswith("error: run ran out of memory: it asked for 1048576.0 GiB")
    assert len(line.splitlines()) == 1


RAISES = """
import sys
from deltawire.runtime.memory import describe_failure
print("Traceback: of the library")
print("error:", describe_failure(MemoryError("Unable to allocate 3.0 GiB"), "child", "trainer"))
sys.exit(10)
"""
KILLED = """
import os, signal, sys
from pathlib import Path
counter, most = Path(sys.argv[1]), int(sys.argv[2])
tries = Path(sys.argv[1] + ".tries")
count = int(tries.read_text()) + 1 if tries.exists() else 1
tries.write_text(str(count))
filled = b"x" * (100 << 20)
if len(sys.argv) > 3:
    counter.write_text(f"pgfault 9\\noom_kill {count}\\n")
if count <= most:
    import time
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def supervisor(tmp_path, monkeypatch):
    monkeypatch.setattr(supervising, "RESTART_PAUSE_S", 0.01)
    counter = tmp_path / "vmstat"
    counter.write_text("pgfault 9\noom_kill 0\n")
    monkeypatch.setattr(memory, "_COUNTERS", ((counter, "oom_kill"),))
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    made = Supervisor(bucket, tmp_path / "logs", command=(sys.executable, "-c"))
    made.start()
    yield made
    made.stop()


def until_the_end(supervisor):
    while not supervisor.check():
        time.sleep(0.02)


def test_the_second_failed_allocation_ends_the_run_with_the_childs_words(supervisor):
    supervisor.add("child", "trainer", [RAISES])
    with pytest.raises(ChildError) as caught:
        until_the_end(supervisor)
    assert caught.value.exit_code == 10
    assert str(caught.value).startswith("child ran out of memory: it asked for 3.0 GiB")
    assert "train.max_tokens_per_batch" in str(caught.value)
    assert supervisor._children[0].starts == 2


def test_the_second_kill_of_the_kernel_ends_the_run(supervisor, tmp_path):
    supervisor.add("child", "trainer", [KILLED, str(tmp_path / "vmstat"), "9", "counts"])
    with pytest.raises(ChildError, match=r"^the kernel ended child because memory ran out") as told:
        until_the_end(supervisor)
    assert told.value.exit_code == 10
    assert "it held 0." in str(told.value)
    assert "this machine has" in str(told.value)
    assert str(told.value).endswith(SETTINGS["trainer"])
    assert supervisor._children[0].starts == 2


def test_a_kill_by_somebody_else_is_no_lack_of_memory(supervisor, tmp_path):
    supervisor.add("child", "trainer", [KILLED, str(tmp_path / "vmstat"), "3"])
    until_the_end(supervisor)
    assert supervisor._children[0].starts == 4


def test_a_size_without_a_unit_is_in_bytes():
    told = describe_failure(MemoryError("you tried to allocate 2147483648 bytes."), "x", "trainer")
    assert "it asked for 2.0 GiB" in told.message


FRAGMENTED = """
from deltawire.runtime.memory import held_bytes, release_heap
blocks = [bytearray(b"x" * (64 << 10)) for _ in range(4000)]
kept = blocks[::50]
del blocks
before = held_bytes(peak=False)
release_heap()
print(before, held_bytes(peak=False))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library is another one")
def test_freed_memory_between_blocks_in_use_goes_back_to_the_system():
    done = subprocess.run([sys.executable, "-c", FRAGMENTED], capture_output=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before > 200 << 20, "the C library gives back by itself"
    assert after < before - (150 << 20)


def test_the_heap_is_released_only_after_growth(monkeypatch):
    held, released = [100], []
    monkeypatch.setattr(memory, "held_bytes", lambda *, peak: held[0])

    def release() -> None:
        released.append(held[0])
        held[0] = 120

    monkeypatch.setattr(memory, "release_heap", release)
    growth = memory.HeapGrowth(limit=50)
    for now, wanted in ((150, False), (151, True), (170, False), (171, True)):
        held[0] = now
        assert growth.release() == wanted
    assert released == [151, 171]
