"""The system calls that a sandboxed command does not get, as a filter that the kernel runs.

Left out is what would leave the sandbox (namespaces, mounts, tracing, handles), what takes memory
that no other limit sees (memory files, System V), what reaches around the network namespace
(sockets of other families, such as a virtual machine's to its host), and large parts of the kernel
that no test suite needs (bpf, io_uring, keys). Numbers are those of ``asm/unistd.h``.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _JUMP_EQUAL, _JUMP_SET, _JUMP_GREATER, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_AT_NUMBER, _AT_MACHINE, _AT_FIRST_ARGUMENT = 0, 4, 16
_NEW_NAMESPACES = 0x7E020080
"""CLONE_NEW* of clone's flags: mount, cgroup, uts, ipc, user, pid, net, time."""
_FAMILIES = (1, 2, 10)
"""unix, inet, inet6: the namespace has no network behind the last two."""

_EVERYWHERE = (*range(424, 436), 438, 442, 443, 447)
"""pidfd_send_signal, io_uring, the mount calls from open_tree to clone3, pidfd_getfd,
mount_setattr, quotactl_fd, memfd_secret: one number on every machine."""
_X86_64 = (
    *(29, 64, 68),  # shmget, semget, msgget
    *(101, 103, 135, 154, 172, 173),  # ptrace, syslog, personality, modify_ldt, iopl, ioperm
    *(155, 161, 163, 165, 166, 167, 168, 169),  # pivot_root, chroot, acct, mount … reboot
    *(175, 176, 179, 203, 212, 240),  # modules, quotactl, sched_setaffinity, lookup_dcookie, mq
    *(246, 248, 249, 250, 256, 272, 279),  # kexec, keys, migrate_pages, unshare, move_pages
    *(298, 300, 303, 304, 308, 310, 311, 312, 313),  # perf, fanotify, handles, setns, process_vm
    *(319, 320, 321, 323),  # memfd_create, kexec_file_load, bpf, userfaultfd
)
_AARCH64 = (
    *(39, 40, 41, 51, 60, 89, 92, 97),  # umount2, mount, pivot_root, chroot … unshare
    *(104, 105, 106, 116, 117, 122, 142),  # kexec, modules, syslog, ptrace, affinity, reboot
    *(180, 186, 190, 194, 217, 218, 219),  # mq, System V, keys
    *(224, 225, 238, 239, 241, 262, 264, 265, 268),  # swap, pages, perf, fanotify, handles, setns
    *(270, 271, 272, 273, 279, 280, 282, 294),  # process_vm, kcmp, modules, memfd, bpf, faults
)
_MACHINES = {
    # kernel's name of the machine: (audit architecture, clone, clone3, socket, denied)
    "x86_64": (0xC000003E, 56, 435, 41, _X86_64),
    "aarch64": (0xC00000B7, 220, 435, 198, _AARCH64),
}


def supported() -> bool:
    """Whether there is a filter for this machine."""
    return platform.machine() in _MACHINES


def program() -> bytes:
    """The filter for this machine, as ``struct sock_filter[]``."""
    architecture, clone, clone3, socket, denied = _MACHINES[platform.machine()]
    refuse = _ERRNO | errno.EPERM
    code = [
        (_LOAD, 0, 0, _AT_MACHINE),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _AT_NUMBER),
        # Another calling convention of the same processor has its own numbers: none of them.
        (_JUMP_GREATER, 0, 1, 0x40000000),
        (_RETURN, 0, 0, _KILL),
        # glibc falls back to clone, whose flags a filter can see.
        (_JUMP_EQUAL, 0, 1, clone3),
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
    ]
    for number in sorted({*_EVERYWHERE, *denied} - {clone3}):
        code += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, refuse)]
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def install() -> None:
    """Put the filter on this process and all that it starts; needs no_new_privs. Raises
    `OSError`."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    code = program()
    buffer = ctypes.create_string_buffer(code, len(code))
    filled = Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(22, 2, ctypes.byref(filled), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")
