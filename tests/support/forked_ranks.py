"""Starts trainer ranks again and again as forks of one process, and kills chosen ones at chosen
points of their work.

Run as a script with a bucket's URL and a JSON list of starts, each with ``ranks`` and, to kill,
``rank``, ``point`` (a key of `POINTS`) and ``version``. It does what torch's elastic agent does:
once a rank has died, it kills the others. Forks save importing torch for each rank of each start.
Prints the exit codes of each start as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rank_steps import free_port

from deltawire.launch.processes import ChildOptions, run_as_trainer
from deltawire.launch.ranks import rank_environment
from deltawire.rl.trainer import entry, rank  # noqa: F401 - imported before forking
from deltawire.sync.publish import commit, publisher, sharded
from deltawire.train.checkpoint_storage import BucketWriter
from deltawire.train.masters import MasterWeights

PATIENCE_S = 240.0


def _argument(place: int) -> Callable[..., int]:
    return lambda *arguments: arguments[place]


POINTS: dict[str, tuple[list[Any], str, Callable[..., int], bool]] = {
    # name: the owners of a function, its name, the version that a call is of, and whether to
    # strike after the call instead of before it
    "gradients": ([MasterWeights], "step", lambda masters, *_: masters.steps + 1, False),
    "updated": ([MasterWeights], "step", lambda masters, *_: masters.steps + 1, True),
    "encoding": ([commit.VersionWriter], "encode", lambda writer: writer.next_version, False),
    "part": ([sharded.ShardPublisher], "_create_part", _argument(1), True),
    "manifest": (
        [sharded, publisher], "create_manifest", lambda _, manifest, *__: manifest.version, False,
    ),
    "committed": (
        [sharded, publisher], "create_manifest", lambda _, manifest, *__: manifest.version, True,
    ),
    "waiting": ([sharded.ShardPublisher], "_await_manifest", _argument(1), False),
    "save": ([BucketWriter], "write_data", lambda writer, *_: writer._version, False),
    "saved": ([BucketWriter], "write_data", lambda writer, *_: writer._version, True),
    "commit": ([BucketWriter], "finish", lambda writer, *_: writer._version, False),
}  # fmt: skip


def die_at(point: str, version: int) -> None:
    """Kill this process at a point of its work on a version."""
    owners, name, version_of, after = POINTS[point]
    for owner in owners:
        honest = getattr(owner, name)

        def struck(*arguments: Any, honest: Any = honest, **named: Any) -> Any:
            due = version_of(*arguments) == version
            if due and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = honest(*arguments, **named)
            if due:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, struck)


def run_rank(number: int, ranks: int, port: int, url: str, start: dict[str, Any]) -> None:
    """One rank; never returns."""
    code = 1
    try:
        if ranks > 1:
            os.environ.update(
                rank_environment(number, ranks, local_rank=number, address="127.0.0.1", port=port)
            )
        if start.get("rank") == number:
            die_at(start["point"], start["version"])
        # It would start the ranks itself, where there is no environment of theirs.
        entry_of(url)
        code = 0
    finally:
        os._exit(code)


def entry_of(url: str) -> None:
    import deltawire.launch.processes as launching

    launching._ranks_of = lambda *_: 1
    run_as_trainer(url, source=None, options=ChildOptions())


def run_start(url: str, start: dict[str, Any]) -> list[int]:
    """All ranks of one start, to their end."""
    port = int(free_port())
    children = []
    for number in range(start["ranks"]):
        pid = os.fork()
        if pid == 0:
            run_rank(number, start["ranks"], port, url, start)
        children.append(pid)
    codes: dict[int, int] = {}
    deadline = time.monotonic() + PATIENCE_S
    while len(codes) < len(children):
        for pid in set(children) - codes.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if any(codes.values()) or time.monotonic() > deadline:
            for pid in set(children) - codes.keys():
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[pid] for pid in children]


def run_starts(bucket: Any, starts: list[dict[str, Any]]) -> list[list[int]]:
    """Runs this script on a bucket; returns the exit codes of each start."""
    from rank_runs import environment

    process = subprocess.run(
        [sys.executable, str(Path(__file__)), bucket.url, json.dumps(starts)],
        env={
            **environment(), "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-4000:]
    found: list[list[int]] = json.loads(process.stdout.splitlines()[-1])
    for start, codes in zip(starts, found, strict=True):
        expected = -signal.SIGKILL if "rank" in start else 0
        assert codes[start.get("rank", 0)] == expected, (start, codes, process.stderr[-4000:])
    return found


if __name__ == "__main__":
    codes_of_starts = [run_start(sys.argv[1], start) for start in json.loads(sys.argv[2])]
    sys.stdout.write(json.dumps(codes_of_starts) + "\n")
