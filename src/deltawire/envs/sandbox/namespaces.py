"""Builds a separate root file system for one command, with the kernel's namespaces.

A command sees::

    /usr /bin /lib …      the machine's programs and libraries, read-only
    <Python's prefix>     the interpreter at its place on the machine, read-only; the folders of
                          installed packages are covered
    /workspace            the folder it works on    ┐ one file system in memory, whose size and
    /tmp, /dev/shm        scratch                   ┘ number of files are the disk limit
    /dev                  null, zero, full, random, urandom
    everything else       does not exist; there is no /proc, no device, no network

The launcher stays outside and keeps the memory file system open, so that it can read the folder
once every process that could change it has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from pathlib import Path

from deltawire.envs.sandbox import seccomp
from deltawire.envs.sandbox.plan import PACKAGES, CommandLimits, Request

_MOUNTS, _UTS, _IPC, _USER, _PROCESSES, _NETWORK, _CGROUP = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000, 0x02000000,
)  # fmt: skip
_NOSUID, _NODEV, _NOEXEC, _BIND, _RECURSIVE, _PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_DETACH = 2
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_READ_ONLY = 1
_SET_DEATH_SIGNAL, _SET_DUMPABLE, _DROP_BOUND, _NO_NEW_PRIVILEGES = 1, 4, 24, 38

BASE = "/tmp"  # noqa: S108  -- covered in a separate mount namespace
WORKSPACE = "/workspace"
INSIDE_UID = 1000
_SYSTEM = ("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec")
_ALIASES = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
_PACKAGE_FOLDERS = (
    "python*/site-packages",
    "python*/dist-packages",
    "lib*/python*/site-packages",
    "lib*/python*/dist-packages",
)
_DEVICES = ("null", "zero", "full", "random", "urandom")
_ETC = ("/etc/ld.so.cache", "/etc/alternatives")


class UnsupportedError(Exception):
    """This machine does not allow what isolation needs; the message says what is missing."""


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(what: str, result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise UnsupportedError(f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = _libc().mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    _call(f"mount of {kind or source} on {target}", result)


def _restrict(path: str, attributes: int, *, recursive: bool) -> None:
    """Adds mount attributes to what is mounted at ``path``, and below it."""

    class Attributes(ctypes.Structure):
        _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "how", "user"))

    wanted = Attributes(attributes, 0, 0, 0)
    result = _libc().syscall(
        ctypes.c_long(_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        path.encode(),
        ctypes.c_uint(_AT_RECURSIVE if recursive else 0),
        ctypes.byref(wanted),
        ctypes.c_size_t(ctypes.sizeof(wanted)),
    )
    _call(f"mount_setattr of {path} (Linux 5.12 or later)", result)


def _prctl(what: str, option: int, value: int) -> None:
    _call(what, _libc().prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def enter(*, user_namespace: bool) -> None:
    """Enters new namespaces; the next child is the first process of the process namespace."""
    if not seccomp.supported():
        raise UnsupportedError(f"no filter of system calls for {os.uname().machine}")
    uid, gid = os.getuid(), os.getgid()
    flags = _MOUNTS | _UTS | _IPC | _PROCESSES | _NETWORK | _CGROUP
    _call("unshare", _libc().unshare(flags | (_USER if user_namespace else 0)))
    if user_namespace:
        try:
            Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
            Path("/proc/self/gid_map").write_text(f"{INSIDE_UID} {gid} 1", encoding="ascii")
            Path("/proc/self/uid_map").write_text(f"{INSIDE_UID} {uid} 1", encoding="ascii")
        except OSError as error:
            raise UnsupportedError(f"user namespace: {error}") from error
    _mount("none", "/", "", _RECURSIVE | _PRIVATE)


def _sources(request: Request) -> list[str]:
    """The folders of the machine to show, none inside another."""
    folders = [path for path in _SYSTEM if Path(path).is_dir() and not Path(path).is_symlink()]
    folders += [path for path in _ALIASES if Path(path).is_dir() and not Path(path).is_symlink()]
    own = [str(Path(request.prefix) / name) for name in ("bin", "lib", "lib64")]
    folders += [path for path in own if Path(path).is_dir() and not Path(path).is_symlink()]
    return sorted({p for p in folders if not any(p.startswith(f"{q}/") for q in folders)})


def package_folders(sources: list[str]) -> list[str]:
    """The folders of installed packages below the shown ones. They are covered: the package that
    writes an environment's tasks knows their solutions."""
    found: set[Path] = set()
    for source in map(Path, sources):
        for pattern in _PACKAGE_FOLDERS:
            found |= {path for path in source.glob(pattern) if path.is_dir()}
    return sorted(map(str, found))


def require_hidden(sources: list[str], covered: list[str]) -> None:
    """Raises `UnsupportedError` if this package lies where a command could read it."""
    own = str(Path(__file__).resolve().parents[2])
    visible = any(_below(own, source) for source in sources)
    if visible and not any(_below(own, folder) for folder in covered):
        raise UnsupportedError(
            f"deltawire is installed in {own}, which commands in the sandbox can read; install it "
            "in a virtual environment outside the system's folders"
        )


def _below(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{Path(folder).resolve()!s}/")


def build(request: Request) -> str:
    """Lays out the root under `BASE`; returns the launcher's path to the folder of writable files,
    which has ``workspace``, ``tmp`` and ``shm`` in it."""
    sources = _sources(request)
    covered = package_folders(sources)
    require_hidden(sources, covered)
    shown = {path: os.open(path, os.O_PATH) for path in (*sources, *_present(_ETC))}
    packages = {path: os.open(path, os.O_PATH) for path in request.shown}
    devices = {name: os.open(f"/dev/{name}", os.O_PATH) for name in _DEVICES}
    links = {path: str(Path(path).readlink()) for path in _ALIASES if Path(path).is_symlink()}
    nothing_more = _NOSUID | _NODEV
    _mount("tmpfs", BASE, "tmpfs", nothing_more, "mode=755,size=4m")
    root, writable = f"{BASE}/root", f"{BASE}/writable"
    for folder in (root, writable, f"{BASE}/proc"):
        Path(folder).mkdir(mode=0o755)
    _mount(root, root, "", _BIND)
    limits = request.limits
    _mount(
        "tmpfs",
        writable,
        "tmpfs",
        nothing_more,
        f"mode=755,size={limits.disk_bytes},nr_inodes={limits.files + 8}",
    )
    for folder in ("workspace", "tmp", "shm"):
        Path(writable, folder).mkdir(mode=0o700)
        _own(f"{writable}/{folder}", request)
    for path, handle in shown.items():
        _show(root + path, handle, folder=Path(path).is_dir())
        _restrict(root + path, _READ_ONLY | nothing_more, recursive=True)
    for name, handle in devices.items():
        _show(f"{root}/dev/{name}", handle, folder=False)
        # The device can still be written; its mode and owner cannot be changed.
        _restrict(f"{root}/dev/{name}", _READ_ONLY | _NOSUID | _NOEXEC, recursive=False)
    for path in covered:
        _mount("tmpfs", root + path, "tmpfs", nothing_more, "mode=755,size=4k,nr_inodes=2")
        _restrict(root + path, _READ_ONLY, recursive=False)
    for path, handle in packages.items():
        inside = f"{root}{PACKAGES}/{Path(path).name}"
        _show(inside, handle, folder=True)
        _restrict(inside, _READ_ONLY | nothing_more, recursive=True)
    for handle in (*shown.values(), *packages.values(), *devices.values()):
        os.close(handle)
    for path, target in links.items():
        Path(root + path).symlink_to(target)
    for name, inside in (("workspace", WORKSPACE), ("tmp", "/tmp"), ("shm", "/dev/shm")):  # noqa: S108
        Path(root + inside).mkdir(parents=True)
        _mount(f"{writable}/{name}", root + inside, "", _BIND)
        if request.read_only:
            _restrict(root + inside, _READ_ONLY, recursive=False)
    _details(root, request)
    _restrict(root, _READ_ONLY, recursive=False)
    return writable


def _present(paths: tuple[str, ...]) -> list[str]:
    return [path for path in paths if Path(path).exists()]


def _own(path: str, request: Request) -> None:
    if request.uid is not None:
        os.chown(path, request.uid, request.uid)


def _show(target: str, handle: int, *, folder: bool) -> None:
    """Binds the target of an open handle; `BASE` may cover its path by now."""
    place = Path(target)
    if folder:
        place.mkdir(parents=True, exist_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    _mount(f"/proc/self/fd/{handle}", target, "", _BIND | _RECURSIVE)


def _details(root: str, request: Request) -> None:
    """Writes the names of the user, and links the interpreter."""
    uid = INSIDE_UID if request.uid is None else request.uid
    etc = Path(root, "etc")
    etc.mkdir(exist_ok=True)
    (etc / "passwd").write_text(f"agent:x:{uid}:{uid}::/tmp:/bin/sh\n", encoding="ascii")
    (etc / "group").write_text(f"agent:x:{uid}:\n", encoding="ascii")
    (etc / "hosts").write_text("127.0.0.1 localhost workspace\n", encoding="ascii")
    commands = Path(root, "run/bin")
    commands.mkdir(parents=True)
    for name in ("python", "python3"):
        (commands / name).symlink_to(request.python)


def first_process(request: Request, writable: str) -> None:
    """Becomes the first process of the namespace: in the new root, as an unprivileged user, without
    capabilities. Raises `UnsupportedError` or `OSError`."""
    del writable
    _mount("proc", f"{BASE}/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    libc = _libc()
    # The launcher keeps its mounts; only this process changes its root.
    _call("unshare", libc.unshare(_MOUNTS))
    name = b"workspace"
    _call("sethostname", libc.sethostname(name, len(name)))
    os.chdir(f"{BASE}/root")
    _call("pivot_root", libc.pivot_root(b".", b"."))
    # The old root now lies on top of the new one, and is removed.
    _call("umount", libc.umount2(b".", _DETACH))
    os.chdir("/")
    capability = 0
    while libc.prctl(_DROP_BOUND, ctypes.c_ulong(capability), 0, 0, 0) == 0:
        capability += 1
    if request.uid is not None:
        os.setgroups([])
        os.setresgid(request.uid, request.uid, request.uid)
        os.setresuid(request.uid, request.uid, request.uid)
    _prctl("no_new_privs", _NO_NEW_PRIVILEGES, 1)
    _prctl("not dumpable", _SET_DUMPABLE, 0)
    _drop_capabilities()
    _prctl("death signal", _SET_DEATH_SIGNAL, 9)


def _drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    none = (ctypes.c_uint32 * 6)()
    _call("capset", _libc().capset(header, none))


def limit_command(limits: CommandLimits, *, filtered: bool, niceness: int = 10) -> None:
    """Sets the kernel's limits on this process and all it starts, and the filter of system calls
    if ``filtered``."""

    def limit(kind: int, value: int) -> None:
        _, most = resource.getrlimit(kind)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        with contextlib.suppress(ValueError, OSError):  # macOS refuses some of them
            resource.setrlimit(kind, (value, value))

    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_AS, limits.memory_bytes)
    limit(resource.RLIMIT_CPU, max(1, round(limits.cpu_s)))
    limit(resource.RLIMIT_FSIZE, limits.disk_bytes)
    limit(resource.RLIMIT_NOFILE, limits.open_files)
    if sys.platform == "linux":
        limit(resource.RLIMIT_MSGQUEUE, 0)
        limit(resource.RLIMIT_MEMLOCK, 0)
        allowed = sorted(os.sched_getaffinity(0))
        start = os.getpid() if not filtered else int.from_bytes(os.urandom(2), "little")
        cores = {allowed[(start + i) % len(allowed)] for i in range(limits.cores)}
        os.sched_setaffinity(0, cores)
    with contextlib.suppress(OSError):
        os.nice(niceness)  # The filter refuses it.
    if filtered:
        # The first process counts, too. Without namespaces the user's other processes would.
        limit(resource.RLIMIT_NPROC, limits.processes + 1)
        seccomp.install()
