"""A disk that loses what was not flushed, as a record of a process's writes and its replay."""

import os
import random
import stat
import threading
from contextlib import contextmanager
from pathlib import Path


class WriteLog:
    """Records what a process does to files below ``root``, in order, while `recording`.

    An event is ``(kind, ...)``: open and make files, write, flush, link, rename, unlink, make
    folders. `mark` adds an event of the caller's own, such as an acknowledgment.
    """

    def __init__(self, root):
        self.root = str(root)
        self.events = []
        self._files = {}
        # Names change and are recorded in one step: another thread that found a new folder could
        # otherwise record its file there before the folder.
        self._order = threading.Lock()

    def mark(self, what):
        self.events.append(("mark", what))

    def _inside(self, path):
        path = os.fspath(path)
        return isinstance(path, str) and path.startswith(self.root)

    @contextmanager
    def recording(self, monkeypatch):
        real = {
            name: getattr(os, name)
            for name in ("open", "write", "fsync", "close", "link", "replace", "unlink", "mkdir")
        }

        def opened(path, flags, *rest, **more):
            with self._order:
                descriptor = real["open"](path, flags, *rest, **more)
                if self._inside(path):
                    self._files[descriptor] = os.fspath(path)
                    if flags & os.O_CREAT:
                        self.events.append(("make", os.fspath(path)))
            return descriptor

        def write(descriptor, data):
            done = real["write"](descriptor, data)
            if descriptor in self._files:
                self.events.append(("write", self._files[descriptor], bytes(data[:done])))
            return done

        def fsync(descriptor):
            real["fsync"](descriptor)
            if descriptor in self._files:
                kind = "flush" if stat.S_ISREG(os.fstat(descriptor).st_mode) else "flush-folder"
                self.events.append((kind, self._files[descriptor]))

        def close(descriptor):
            self._files.pop(descriptor, None)
            real["close"](descriptor)

        def two(name):
            def call(first, second, **more):
                with self._order:
                    real[name](first, second, **more)
                    if self._inside(second):
                        self.events.append((name, os.fspath(first), os.fspath(second)))

            return call

        def one(name):
            def call(path, *rest, **more):
                with self._order:
                    real[name](path, *rest, **more)
                    if self._inside(path):
                        self.events.append((name, os.fspath(path)))

            return call

        with monkeypatch.context() as patch:
            for name, fake in {
                "open": opened, "write": write, "fsync": fsync, "close": close,
                "link": two("link"), "replace": two("replace"),
                "unlink": one("unlink"), "mkdir": one("mkdir"),
            }.items():  # fmt: skip
                patch.setattr(os, name, fake)
            yield self


def after_power_cut(events, root, into, seed):
    """Make in ``into`` what a disk may hold when the power fails after ``events``.

    The bytes of a file that were not flushed are lost, from a random place on. A folder's changes
    since it was last flushed may each be there or not: file systems write them in any order.
    """
    random_ = random.Random(seed)
    files, flushed = {}, {}
    """Bytes of each file, by number, and how many of them are on the disk."""
    live, durable = {}, {root: {}}
    """Names of each folder, to a file's number or "folder": in memory, and on the disk."""
    pending = {root: []}
    live[root] = {}

    def name(path, target):
        folder, base = os.path.split(path)
        if target is None:
            live[folder].pop(base, None)
        else:
            live[folder][base] = target
        pending[folder].append((base, target))

    def find(path):
        folder, base = os.path.split(path)
        return live[folder][base]

    for event in events:
        kind, *what = event
        if kind == "make":
            files[len(files)] = b""
            flushed[len(files) - 1] = 0
            name(what[0], len(files) - 1)
        elif kind == "write":
            files[find(what[0])] += what[1]
        elif kind == "flush":
            number = find(what[0])
            flushed[number] = len(files[number])
        elif kind == "flush-folder" and what[0] in live:
            durable[what[0]] = dict(live[what[0]])
            pending[what[0]] = []
        elif kind in ("link", "replace"):
            name(what[1], find(what[0]))
            if kind == "replace":
                name(what[0], None)
        elif kind == "unlink":
            name(what[0], None)
        elif kind == "mkdir":
            live[what[0]], durable[what[0]], pending[what[0]] = {}, {}, []
            name(what[0], "folder")

    def lay(folder, target):
        target.mkdir(parents=True, exist_ok=True)
        written = [change for change in pending[folder] if random_.random() < 0.5]
        names = {**durable[folder], **dict(written)}
        for base, number in names.items():
            if number == "folder":
                lay(f"{folder}/{base}", target / base)
            elif number is not None:
                kept = random_.randint(flushed[number], len(files[number]))
                if kept < len(files[number]) and random_.random() < 0.5:
                    kept = flushed[number]
                (target / base).write_bytes(files[number][:kept])

    lay(root, Path(into))
    return into
