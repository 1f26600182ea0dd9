"""A filter, run by the kernel, of the system calls that a sandboxed command may make.

An allow-list: what it does not name is refused, so that a call that a later kernel adds is refused
until somebody has read what it does. Left out is what would leave the sandbox (namespaces, mounts,
tracing, handles), what takes memory that no other limit sees (memory files, System V), what
reaches around the network namespace (sockets of other families, such as a virtual machine's to its
host), what slows or starves other processes of the sandbox (priorities, and limits of others), and
large parts of the kernel that no test suite needs (bpf, io_uring, keys, asynchronous I/O). Numbers
are those of ``asm/unistd.h``.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from functools import cache

_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_JUMP_GREATER, _JUMP_ABOVE = 0x35, 0x25  # ≥ and >
_AT_NUMBER, _AT_MACHINE, _AT_FIRST_ARGUMENT = 0, 4, 16
_NEW_NAMESPACES = 0x7E020080
"""CLONE_NEW* of clone's flags: mount, cgroup, uts, ipc, user, pid, net, time."""
_FAMILIES = (1, 2, 10)
"""unix, inet, inet6: the namespace has no network for the last two."""

_EVERYWHERE = (
    *((436, 437), (439, 439), (441, 441)),  # close_range, openat2, faccessat2, epoll_pwait2
    *((449, 449), (451, 452), (454, 456)),  # futex_waitv, cachestat, fchmodat2, futexes
)
"""Calls that have one number on every machine."""
_X86_64 = (
    *((0, 28), (32, 55)),  # read … madvise; dup … getsockopt
    *((57, 63), (72, 100)),  # fork … uname; fcntl … times
    *((102, 102), (104, 125)),  # getuid; getgid … capget
    *((127, 133), (137, 138), (140, 140)),  # signals … mknod; statfs; getpriority
    *((143, 143), (145, 152)),  # sched_getparam; sched_getscheduler … munlockall
    *((157, 158), (160, 160), (162, 162)),  # prctl, arch_prctl; setrlimit; sync
    *((186, 202), (204, 204), (213, 213)),  # gettid … futex; sched_getaffinity; epoll_create
    *((217, 219), (221, 226), (228, 235)),  # getdents64 …; fadvise64, timers; clocks … utimes
    *((247, 247), (252, 255), (257, 271)),  # waitid; ioprio_get, inotify; openat … ppoll
    *((273, 278), (280, 297), (299, 299)),  # robust lists, splice; utimensat … ; recvmmsg
    *((306, 307), (309, 309)),  # syncfs, sendmmsg; getcpu
    *((315, 318), (322, 322), (324, 332)),  # sched_getattr … getrandom; execveat; … statx
    (334, 334),  # rseq
)
_AARCH64 = (
    *((5, 17), (19, 29), (31, 38)),  # attributes, getcwd; eventfd2 … ioctl; ioprio_get … renameat
    (43, 50),  # statfs … fchdir
    *((52, 57), (59, 59), (61, 88)),  # fchmod … close; pipe2; getdents64 … utimensat
    *((90, 90), (93, 96), (98, 103)),  # capget; exit … set_tid_address; futex … setitimer
    *((107, 111), (113, 115), (120, 121)),  # timers; clocks; sched_getscheduler, _getparam
    *((123, 139), (141, 141)),  # sched_getaffinity … ; getpriority
    *((143, 160), (163, 169)),  # identities … ; limits … time
    *((172, 179), (198, 216), (220, 223)),  # getpid … sysinfo; sockets … mremap; clone … fadvise64
    *((226, 237), (240, 240), (242, 243)),  # mprotect … ; rt_tgsigqueueinfo; accept4, recvmmsg
    *((260, 260), (267, 267), (269, 269)),  # wait4; syncfs; sendmmsg
    *((275, 278), (281, 281), (283, 291)),  # sched_getattr … getrandom; execveat; … statx
    (293, 293),  # rseq
)
_CLONE3 = 435
_MACHINES = {
    # kernel's name of the machine: (audit architecture, clone, socket, prlimit64, allowed)
    "x86_64": (0xC000003E, 56, 41, 302, _X86_64),
    "aarch64": (0xC00000B7, 220, 198, 261, _AARCH64),
}


def supported() -> bool:
    """Returns whether there is a filter for this machine."""
    return platform.machine() in _MACHINES


@cache
def program() -> bytes:
    """The filter for this machine, as ``struct sock_filter[]``."""
    architecture, clone, socket, prlimit, allowed = _MACHINES[platform.machine()]
    refuse = _ERRNO | errno.EPERM
    code = [
        (_LOAD, 0, 0, _AT_MACHINE),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _AT_NUMBER),
        # Another calling convention of the same processor has other numbers: none are allowed.
        (_JUMP_GREATER, 0, 1, 0x40000000),
        (_RETURN, 0, 0, _KILL),
        # glibc falls back to clone, whose flags a filter can see.
        (_JUMP_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_JUMP_EQUAL, 0, 4, clone),
        (_LOAD, 0, 0, _AT_FIRST_ARGUMENT),
        (_JUMP_SET, 0, 1, _NEW_NAMESPACES),
        (_RETURN, 0, 0, refuse),
        (_RETURN, 0, 0, _ALLOW),
        (_JUMP_EQUAL, 0, 3 + len(_FAMILIES), socket),
        (_LOAD, 0, 0, _AT_FIRST_ARGUMENT),
        *((_JUMP_EQUAL, len(_FAMILIES) - i, 0, f) for i, f in enumerate(_FAMILIES)),
        (_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT),
        (_RETURN, 0, 0, _ALLOW),
        # A process may limit itself, and no other: process 0 is the caller.
        (_JUMP_EQUAL, 0, 4, prlimit),
        (_LOAD, 0, 0, _AT_FIRST_ARGUMENT),
        (_JUMP_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, refuse),
        (_RETURN, 0, 0, _ALLOW),
    ]
    for first, last in sorted((*allowed, *_EVERYWHERE)):
        code += [
            (_JUMP_GREATER, 0, 2, first),
            (_JUMP_ABOVE, 1, 0, last),
            (_RETURN, 0, 0, _ALLOW),
        ]
    code.append((_RETURN, 0, 0, refuse))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def install() -> None:
    """Applies the filter to this process and all that it starts; needs no_new_privs.

    Raises `OSError`.
    """

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    code = program()
    buffer = ctypes.create_string_buffer(code, len(code))
    filled = Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(22, 2, ctypes.byref(filled), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")
