"""The sandbox hides the solutions of its tasks, allows listed system calls, and counts time."""

import asyncio
import os
import platform
import struct
import sys

import pytest

from deltawire.envs.sandbox import namespaces, seccomp
from deltawire.envs.sandbox.box import CommandLimits, Sandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")

FIND = """
import os, site, sys
seen = []
for root, folders, names in os.walk("/"):
    if root == "/dev":
        folders[:] = []
    seen += [os.path.join(root, n) for n in [*names, *folders] if "deltawire" in n.lower()]
    if "/workspace/subjects" in root or "subjects.py" in names:
        seen.append(root)
for base in {sys.prefix, "/usr", "/usr/local"}:
    for folder in site.getsitepackages([base]):
        seen += os.listdir(folder) if os.path.isdir(folder) else []
print(seen)
"""


def run(command, limits=None):
    return asyncio.run(Sandbox().run(command, {}, limits=limits or CommandLimits()))


def test_no_installed_package_is_visible():
    """The module that writes the tasks knows their solutions; it may be installed anywhere."""
    patient = CommandLimits(wall_s=200.0, cpu_s=200.0)  # All files that it can see are many.
    assert run(["python", "-I", "-S", "-c", FIND], patient).output.strip() == b"[]"


def test_folders_of_packages_below_a_shown_one_are_covered(tmp_path):
    shown = tmp_path / "lib"
    wanted = {
        shown / "python3.11/site-packages",
        shown / "python3/dist-packages",
        shown / "lib/python3.12/dist-packages",
    }
    for folder in wanted:
        folder.mkdir(parents=True)
    (shown / "python3.11/json").mkdir()
    assert set(namespaces.package_folders([str(shown)])) == set(map(str, wanted))


def test_a_package_that_commands_could_read_is_refused(tmp_path, monkeypatch):
    own = tmp_path / "lib/python3.11/site-packages/deltawire/envs/sandbox"
    own.mkdir(parents=True)
    monkeypatch.setattr(namespaces, "__file__", str(own / "namespaces.py"))
    shown, covered = str(tmp_path / "lib"), str(tmp_path / "lib/python3.11/site-packages")
    with pytest.raises(namespaces.UnsupportedError, match="commands in the sandbox can read"):
        namespaces.require_hidden([shown], [])
    namespaces.require_hidden([shown], [covered])
    namespaces.require_hidden([str(tmp_path / "other")], [])


BURN = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
def fork():
    while True:
        try:
            return os.fork()
        except BlockingIOError:
            time.sleep(0.01)
while True:
    if fork() == 0:
        end = time.process_time() + 0.03
        while time.process_time() < end:
            pass
        os._exit(0)
    time.sleep(0.03)
"""


def test_time_of_children_without_a_waiting_parent_counts():
    """With SIGCHLD ignored, the kernel adds the time of a child to no counter of its parent's."""
    limits = CommandLimits(cpu_s=1.0, wall_s=120.0)
    ended = run(["python", "-I", "-S", "-c", BURN], limits)
    assert ended.cause == "cpu"


def test_an_idle_command_is_charged_nothing():
    ended = run(
        ["/bin/sh", "-c", "for n in 1 2 3 4 5 6; do sleep 0.3; done"], CommandLimits(cpu_s=1.0)
    )
    assert (ended.status, ended.cause) == (0, "")


def decide(number, *, architecture=None, argument=0):
    """The filter's answer for a system call, by an interpreter of its instructions."""
    known = seccomp._MACHINES[platform.machine()][0]
    data = {0: number, 4: known if architecture is None else architecture, 16: argument}
    code = [struct.unpack("=HBBI", seccomp.program()[n : n + 8])
            for n in range(0, len(seccomp.program()), 8)]  # fmt: skip
    at = value = 0
    while True:
        kind, yes, no, operand = code[at]
        at += 1
        if kind == 0x20:
            value = data[operand]
        elif kind == 0x06:
            return operand
        else:
            held = {0x15: value == operand, 0x45: bool(value & operand),
                    0x35: value >= operand, 0x25: value > operand}[kind]  # fmt: skip
            at += yes if held else no


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86-64")
def test_the_filter_allows_what_it_lists_and_nothing_else():
    allow = 0x7FFF0000
    for number in (0, 1, 9, 57, 59, 60, 202, 231, 257, 262, 302, 318, 334, 439):
        assert decide(number) == allow, number
    refused = (29, 101, 141, 142, 144, 155, 161, 165, 175, 203, 246, 248, 251, 272, 298, 308, 310,
               314, 319, 321, 323, 425, 434, 438, 440, 447, 457, 462, 470, 999)  # fmt: skip
    for number in refused:
        assert decide(number) != allow, number
    assert decide(56) == allow
    assert decide(56, argument=0x10000000) != allow
    assert decide(302, argument=1) != allow
    assert decide(41, argument=1) == allow
    assert decide(41, argument=40) != allow
    assert decide(1, architecture=3) == 0x80000000
    assert decide(0x40000001) == 0x80000000


def test_the_filter_is_small_enough_for_the_kernel():
    assert len(seccomp.program()) // 8 < 4096
    assert os.sysconf("SC_PAGE_SIZE")
