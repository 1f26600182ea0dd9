"""Launches a command, enforces its limits, and reads the files that it leaves.

Concurrency::

    worker ══ stdin ══▶ launcher ── fork ──▶ first process ── fork ──▶ command ─▶ its children
      ▲   request, then    │  ▲                of the namespace;          │
      │   held open        │  └── output ◀──── reaps, reports ────────────┘
      └═══ stdout ◀════════╧      status ◀──── one line, then it exits
           result, files

The launcher ends the first process when a limit is exceeded or when the worker closes stdin (or
dies, which closes it), and the kernel ends it when the launcher dies. With the first process, every
process of the namespace ends, daemons included. Only then is the folder read.

Under ``isolation = "process"`` there is no namespace: the command is a process group with the
kernel's limits on it. It sees the machine, has its network, and can leave the group.

An interactive command talks to the worker itself, over the launcher's stdin and stdout::

    worker ══ stdin ══▶ (request) ─▶ command     launcher: limits, and ends the command at SIGTERM
      ▲   ╘═ stdout ◀═══════════════════╛           │      or once the worker is dead
      └═══ stderr ◀═════════════════════════════════┘      its result, and the command's stderr
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import selectors
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from deltawire.envs.sandbox import namespaces
from deltawire.envs.sandbox.plan import (
    MAX_DEPTH,
    PRINTED_TIMES,
    CommandLimits,
    Request,
    Result,
    pack,
    read_exactly,
    read_header,
    request_of,
    valid_path,
)

CHECK_S = 0.02
"""The interval at which the launcher sums what the command's processes use."""
PAGE = os.sysconf("SC_PAGE_SIZE")
SERVER_CHECK_S = 0.2
"""The same interval for an interactive command, of which one is alive for each episode."""
CANCELLED = "cancelled"


@dataclass
class Output:
    """The first and the last bytes of the output."""

    limit: int
    total: int = 0
    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)

    def add(self, data: bytes) -> None:
        """Adds output."""
        self.total += len(data)
        room = self.limit // 2 - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        del self.tail[: max(0, len(self.tail) - (self.limit - self.limit // 2))]


def write_files(root: Path, files: list[tuple[str, bytes]], uid: int | None) -> None:
    """Writes the files; the sender has checked the paths, and they are checked again."""
    made = {root}
    for path, data in files:
        if not valid_path(path):
            raise ValueError(f"path {path[:80]!r}")
        place = root / path
        for folder in reversed(place.parents):
            if root in folder.parents and folder not in made:
                folder.mkdir(mode=0o755, exist_ok=True)
                made.add(folder)
                if uid is not None:
                    os.chown(folder, uid, uid)
        place.write_bytes(data)
        if uid is not None:
            os.chown(place, uid, uid)


def collect(root: Path, limits: CommandLimits) -> tuple[list[tuple[str, bytes]], int]:
    """Reads the regular files below ``root`` in order of their paths, and counts everything else.

    Links are not followed, pipes not opened, and caches of compiled Python left out. No process may
    still change the folder.
    """
    found: list[tuple[str, bytes]] = []
    lost, room = 0, limits.disk_bytes
    for relative in _walk(root):
        if relative is None:
            lost += 1
            continue
        try:
            handle = os.open(root / relative, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            lost += 1
            continue
        with open(handle, "rb") as file:  # noqa: PTH123  -- by handle
            size = os.fstat(handle).st_size
            regular = stat.S_ISREG(os.fstat(handle).st_mode)
            if not regular or size > room or len(found) >= limits.files:
                lost += 1
            else:
                data = file.read(size)
                room -= len(data)
                found.append((relative, data))
    return sorted(found), lost


def _walk(root: Path) -> Iterator[str | None]:
    """Relative paths of everything but folders; None for what cannot be named or opened."""
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        try:
            entries = list(os.scandir(root / folder))
        except OSError:
            yield None
            continue
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            try:
                plain = valid_path(path)
            except UnicodeEncodeError:
                plain = False
            if not plain or entry.is_symlink():
                yield None
            elif not entry.is_dir(follow_symlinks=False):
                yield path
            elif path.count("/") >= MAX_DEPTH:
                yield None
            elif entry.name != "__pycache__":
                waiting.append(path)


@dataclass
class Usage:
    """Measures what the command's processes use together, from ``/proc``.

    The CPU time of a child is in its parent's counters once it has been waited for, but not if the
    parent ignores SIGCHLD. So the time of a process that was seen running and then vanished is
    sampled: between two looks, the larger of what the counters show and of what such processes can
    have used is charged.
    """

    proc: Path
    cores: int = 1
    cpu_s: float = 0.0
    counted: int = 0
    looked_at: float = field(default_factory=time.monotonic)
    running: set[str] = field(default_factory=set)

    def broken(self, limits: CommandLimits) -> str:
        """The limit that they exceed now, or an empty string."""
        processes, memory, ticks = 0, 0, 0
        alive, running = set(), set()
        for entry in self._entries():
            try:
                fields = (entry / "stat").read_text(errors="replace")
            except OSError:
                continue  # It has ended since.
            numbers = fields.rpartition(")")[2].split()
            identity = f"{entry.name} {numbers[19]}"  # its number and its start
            alive.add(identity)
            if numbers[0] == "R":
                running.add(identity)
            processes += 1
            ticks += sum(int(n) for n in numbers[11:15])
            memory += int(numbers[21]) * PAGE
        self._charge(ticks, alive, running)
        if processes > limits.processes + 2:
            return "processes"
        if self.cpu_s > limits.cpu_s:
            return "cpu"
        if memory > limits.memory_bytes and self._exact() > limits.memory_bytes:
            return "memory"
        return ""

    def _charge(self, ticks: int, alive: set[str], running: set[str]) -> None:
        now = time.monotonic()
        measured = max(0, ticks - self.counted) / os.sysconf("SC_CLK_TCK")
        vanished = min(len(self.running - alive), self.cores)
        self.cpu_s += max(measured, vanished * (now - self.looked_at))
        self.counted, self.looked_at, self.running = ticks, now, running

    def _entries(self) -> list[Path]:
        return [entry for entry in self.proc.iterdir() if entry.name.isdigit()]

    def _exact(self) -> int:
        """Resident bytes with shared pages counted once, where the kernel reports that."""
        total = 0
        for entry in self._entries():
            try:
                text = (entry / "smaps_rollup").read_text()
                total += 1024 * int(text.split("Pss:")[1].split()[0])
            except (OSError, IndexError, ValueError):
                with contextlib.suppress(OSError, IndexError, ValueError):
                    total += int((entry / "statm").read_text().split()[1]) * PAGE
        return total


class Running:
    """A running command, and its pipes."""

    def __init__(self, request: Request, folder: Path, proc: Path | None, worker: int) -> None:
        self.request = request
        self.worker = worker
        self.stopped = False
        self.usage = Usage(proc, request.limits.cores) if proc is not None else None
        self.output, printing = os.pipe()
        self.reports, reporting = os.pipe()
        self.started = time.monotonic()
        self.first = os.fork()
        if self.first == 0:
            os.close(self.output)
            os.close(self.reports)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            _be_first(request, folder, printing, reporting)
        os.close(printing)
        os.close(reporting)
        if request.interactive:  # Only the command holds them from here on.
            os.close(0)
            os.close(1)
            signal.signal(signal.SIGTERM, self._stop)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def _stop(self, *_: object) -> None:
        self.stopped = True
        self.end()  # Its end wakes the loop of `watch`.

    def end(self) -> None:
        """Ends the command and all its processes."""
        if not self.first:
            return  # It was waited for, and its number may be another's by now.
        for kill in (os.killpg, os.kill) if self.usage is None else (os.kill,):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.first, signal.SIGKILL)

    def watch(self) -> tuple[Result, Output]:
        """Waits for the command's end, or ends it at a limit."""
        limits, interactive = self.request.limits, self.request.interactive
        output, report = Output(limits.output_bytes), b""
        cause, over = "", False
        selector = selectors.DefaultSelector()
        for handle in (
            (self.output, self.reports) if interactive else (0, self.output, self.reports)
        ):
            os.set_blocking(handle, False)
            selector.register(handle, selectors.EVENT_READ)
        while not over:
            if self.stopped or (interactive and os.getppid() != self.worker):
                cause = CANCELLED
                break
            for key, _ in selector.select(SERVER_CHECK_S if interactive else CHECK_S):
                data = os.read(key.fd, 1 << 16)
                if key.fd == self.output:
                    output.add(data)
                elif key.fd == self.reports:
                    report += data
                    over = not data
                elif not data:
                    over, cause = True, CANCELLED
                if not data:
                    selector.unregister(key.fd)
            cause = cause or self._broken(output)
            over = over or bool(cause)
        self.end()
        os.waitpid(self.first, 0)
        self.first = 0
        seconds = time.monotonic() - self.started
        self._drain(output)
        return _result(report, cause, seconds, output.total), output

    def _broken(self, output: Output) -> str:
        limits = self.request.limits
        if time.monotonic() - self.started > limits.wall_s:
            return "time"
        if output.total > PRINTED_TIMES * limits.output_bytes:
            return "output"
        return self.usage.broken(limits) if self.usage is not None else ""

    def _drain(self, output: Output) -> None:
        """Reads the rest of the output without waiting: a process may still hold the pipe open."""
        while True:
            try:
                data = os.read(self.output, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                return
            output.add(data)


def _result(report: bytes, cause: str, seconds: float, printed: int) -> Result:
    try:
        said = json.loads(report) if report else {}
    except ValueError:
        said = {}
    if "fault" in said:
        return Result(fault=said["fault"], unsupported=said["unsupported"])
    status = int(said.get("status", -signal.SIGKILL))
    if not cause and status == -signal.SIGXCPU:
        cause = "cpu"
    return Result(status=status, cause=cause, seconds=seconds, printed=printed)


def _be_first(request: Request, folder: Path, printing: int, reporting: int) -> None:
    """The first process: enter the root, start the command, reap until it ends, report."""
    isolated = request.isolation == "namespaces"
    try:
        if not request.interactive:
            os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
            os.dup2(printing, 1)
        os.dup2(printing, 2)
        os.setsid()
        if isolated:
            namespaces.first_process(request, str(folder))
            os.chdir(namespaces.WORKSPACE)
        else:
            os.chdir(folder)
        if any(event & select.POLLERR for _, event in _poll(reporting)):
            os._exit(0)  # The launcher died before its end was tied to this process.
        command = os.fork()
        if command == 0:
            _become(request, reporting)
        os.close(printing)
        for handle in (0, 1, 2):
            os.close(handle)
        status = None
        while status is None:
            pid, how = os.waitpid(-1, 0)
            status = os.waitstatus_to_exitcode(how) if pid == command else None
        _report(reporting, {"status": status})
    except BaseException as error:
        unsupported = isinstance(error, namespaces.UnsupportedError)
        _report(reporting, {"fault": str(error) or repr(error), "unsupported": unsupported})
    os._exit(0)


def _poll(handle: int) -> list[tuple[int, int]]:
    poller = select.poll()
    poller.register(handle, 0)
    return poller.poll(0)


def _report(handle: int, what: dict[str, object]) -> None:
    os.write(handle, json.dumps(what).encode()[:2048])


def _become(request: Request, reporting: int) -> None:
    """Replaces this process by the command."""
    try:
        for number in (
            signal.SIGPIPE,
            signal.SIGXFSZ,
        ):  # Python ignores them, and so would the command.
            signal.signal(number, signal.SIG_DFL)
        environment = dict(request.environment)
        isolated = request.isolation == "namespaces"
        namespaces.limit_command(request.limits, filtered=isolated)
        limit = os.sysconf("SC_OPEN_MAX")
        os.closerange(3, reporting)
        os.closerange(reporting + 1, max(limit, reporting + 1))
        os.set_inheritable(reporting, False)
        os.execvpe(request.command[0], request.command, environment)  # noqa: S606
    except BaseException as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.EACCES):
            os.write(2, f"{request.command[0]}: {error.strerror}\n".encode())
            os._exit(127)
        _report(reporting, {"fault": f"command: {error}", "unsupported": False})
    os._exit(126)


def serve(request: Request, files: list[tuple[str, bytes]], worker: int) -> bytes:
    """Runs one command; returns the frame of its result. ``worker`` is the parent's number."""
    scratch: Path | None = None
    if request.interactive:  # Until `Running` handles it, so that it cannot leave a command behind.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        if request.isolation == "namespaces":
            namespaces.enter(user_namespace=request.user_namespace)
            writable = Path(namespaces.build(request))
            folder, proc = writable / "workspace", Path(namespaces.BASE, "proc")
            write_files(folder, files, request.uid)
            running = Running(request, writable, proc, worker)
        else:
            scratch = Path(tempfile.mkdtemp(prefix="deltawire-workspace-"))
            folder = scratch
            write_files(folder, files, None)
            running = Running(request, folder, None, worker)
        result, output = running.watch()
        if result.cause == CANCELLED and not request.interactive:
            return b""  # The worker no longer reads.
        if request.interactive:
            return _frame(result, bytes(output.head + output.tail), [])
        left, lost = collect(folder, request.limits)
    except namespaces.UnsupportedError as error:
        return _frame(Result(fault=str(error), unsupported=True), b"", [])
    except (OSError, ValueError) as error:
        return _frame(Result(fault=str(error)), b"", [])
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    return _frame(
        Result(**{**asdict(result), "lost": lost}), bytes(output.head + output.tail), left
    )


def _frame(result: Result, output: bytes, files: list[tuple[str, bytes]]) -> bytes:
    table = [[path, len(data)] for path, data in files]
    header = {"result": asdict(result), "output": len(output), "files": table}
    return pack(header, [output, *(data for _, data in files)])


def main() -> None:
    """One request from stdin, one result to stdout."""
    worker = os.getppid()  # First of all: it names another once the worker is dead.
    header = read_header(read_exactly)
    files = [(str(path), read_exactly(int(size))) for path, size in header["files"]]
    request = request_of(header)
    answer = memoryview(serve(request, files, worker))
    while answer:
        answer = answer[os.write(2 if request.interactive else 1, answer) :]
    sys.exit(0)
