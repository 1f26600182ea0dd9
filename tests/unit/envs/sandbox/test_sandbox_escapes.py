"""Commands that try to see, reach, take or leave more than they may."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deltawire.envs.sandbox import plan
from deltawire.envs.sandbox.box import CommandLimits, Sandbox
from deltawire.errors import InputError, RetryError

linux = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
MIB = 1 << 20

QUICK = CommandLimits(wall_s=20, memory_bytes=256 * MIB, disk_bytes=4 * MIB, processes=16, files=50)


def _boxes():
    """As root with a separate user, and through a user namespace as an ordinary user."""
    kinds = [True] if not hasattr(os, "geteuid") or os.geteuid() != 0 else [False, True]
    return [pytest.param(kind, id="user-namespace" if kind else "root") for kind in kinds]


@pytest.fixture(params=_boxes())
def box(request):
    return Sandbox(user_namespace=request.param)


def run(box, command, files=None, limits=QUICK):
    if not isinstance(command, str):
        command = list(command)
    return asyncio.run(box.run(command, files or {}, limits=limits))


def python(box, code, files=None, limits=QUICK):
    return run(box, ["python", "-c", code], files, limits)


def _alive(mark):
    """The machine's processes whose command line holds ``mark``."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


@linux
def test_a_command_gets_the_folder_and_gives_one_back(box):
    files = {"a.txt": b"one\n", "deep/er/b.txt": b"two\n", "gone": b""}
    outcome = run(box, "cat a.txt deep/er/b.txt; rm gone; echo three > new; exit 7", files)
    assert (outcome.status, outcome.cause, outcome.output) == (7, "", b"one\ntwo\n")
    assert outcome.files == {"a.txt": b"one\n", "deep/er/b.txt": b"two\n", "new": b"three\n"}
    assert outcome.lost == 0


@linux
def test_no_file_of_the_machine_is_there(box, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("the machine's own")
    ours = [secret, Path(__file__), "/etc/shadow", "/etc/hostname", "/proc/self/environ", "/sys"]
    ours += ["/dev/vda", "/dev/mem", "/dev/kmsg", "/dev/tty", "/var/log", "/boot", "/run/lock"]
    outcome = python(
        box,
        f"import os; print([p for p in {[str(p) for p in ours]!r} if os.path.lexists(p)]);"
        "print(sorted(os.listdir('/')));"
        "print([p for p in ('/usr/bin', '/', '/etc', '/dev') if os.access(p, os.W_OK)])",
    )
    missing, top, writable = outcome.output.decode().splitlines()
    assert missing == "[]"
    assert writable == "[]"
    allowed = {"bin", "sbin", "lib", "lib32", "lib64", "usr", "etc", "dev", "run", "tmp"}
    allowed |= {"workspace", Path(sys.base_prefix).parts[1]}
    assert set(eval(top)) <= allowed


@linux
def test_the_worker_s_environment_and_handles_stay_outside(box, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "keep-me")
    code = """
import os
print('keep-me' in str(os.environ))
held = []
for n in range(256):
    try: os.fstat(n); held.append(n)
    except OSError: pass
print(held, os.getppid(), os.getpid() < 10, os.read(0, 1))
"""
    assert python(box, code).output.decode().splitlines() == ["False", "[0, 1, 2] 1 True b''"]


@linux
def test_there_is_no_network_not_even_to_this_machine(box):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"""
import socket
for make in (
    lambda: socket.create_connection(('127.0.0.1', {port}), 2),
    lambda: socket.create_connection(('192.0.2.1', 80), 2),
    lambda: socket.getaddrinfo('example.org', 80),
    lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).connect((2, 1)),
    lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
):
    try: make(); print('reached')
    except OSError as error: print('no')
"""
        assert python(box, code).output == b"no\n" * 6


@linux
def test_a_socket_of_the_machine_cannot_be_named(box, tmp_path):
    listener = socket.socket(socket.AF_UNIX)
    name = f"\0deltawire-{os.getpid()}"
    with listener:
        listener.bind(name)
        listener.listen()
        code = f"""
import socket
try: socket.socket(socket.AF_UNIX).connect({name!r}); print('reached')
except ConnectionRefusedError: print('no')
"""
        assert python(box, code).output == b"no\n"


@linux
def test_privileged_calls_are_refused(box):
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
tries = {
    'unshare': lambda: libc.unshare(0x10000000),
    'mount': lambda: libc.mount(b'x', b'/tmp', b'tmpfs', 0, b''),
    'umount': lambda: libc.umount2(b'/workspace', 2),
    'ptrace': lambda: libc.ptrace(16, 1, 0, 0),
    'memfd': lambda: libc.syscall(319 if os.uname().machine == 'x86_64' else 279, b'm', 0),
    'shmget': lambda: libc.shmget(1, 4096, 0o1600),
    'chroot': lambda: libc.chroot(b'/tmp'),
    'affinity': lambda: libc.sched_setaffinity(0, 8, b'\\xff' * 8),
    'clone': lambda: libc.syscall(56 if os.uname().machine == 'x86_64' else 220,
                                  0x10000011, 0, 0, 0, 0),
    'setuid': lambda: libc.setuid(0),
}
print([name for name, call in tries.items() if call() != -1])
print(len(os.sched_getaffinity(0)))
"""
    assert python(box, code).output == b"[]\n1\n"


@linux
def test_what_is_shown_of_the_machine_cannot_be_changed(box):
    ours = [Path("/dev/null"), Path("/usr/bin/env")]
    before = [path.stat().st_mode for path in ours]
    code = """
import os
open('/dev/null', 'w').write('x')
for path in ('/dev/null', '/usr/bin/env', '/usr/lib', '/etc/passwd', '/etc'):
    for change in (lambda: os.chmod(path, 0o777), lambda: os.utime(path), lambda: os.unlink(path)):
        try: change(); print('changed', path)
        except OSError: pass
print('done')
"""
    assert python(box, code).output == b"done\n"
    assert [path.stat().st_mode for path in ours] == before


@linux
def test_set_uid_programs_give_no_rights(box):
    outcome = run(box, "for f in su mount passwd sudo; do command -v $f; done; su -c id; exit 0")
    assert b"uid=0" not in outcome.output


@linux
def test_a_fork_bomb_stays_small_and_ends(box):
    mark = f"bomb-{os.getpid()}"
    code = f"""
import os, time  # {mark}
while True:
    try: os.fork()
    except OSError: time.sleep(0.01)
"""
    outcome = python(box, code, limits=CommandLimits(wall_s=2, processes=16))
    assert outcome.cause in ("time", "processes")
    assert outcome.status == -9
    assert _alive(mark) == []


@linux
def test_memory_is_bounded_for_one_process_and_for_all(box):
    one = python(box, "x = bytearray(2 << 30)")
    assert (one.status, one.cause) == (1, "")
    assert b"MemoryError" in one.output
    many = python(
        box,
        "import os, time\n"
        "for _ in range(8):\n"
        "    if os.fork() == 0: x = bytearray(b'1') * (100 << 20); time.sleep(30)\n"
        "time.sleep(30)",
    )
    assert many.cause == "memory"


@linux
def test_shared_pages_count_once(box):
    code = """
import os, time
x = bytearray(b'1') * (100 << 20)
children = [os.fork() for _ in range(2)]
if all(children):
    for child in children: os.waitpid(child, 0)
    print('done')
else:
    time.sleep(0.3); os._exit(0)
"""
    assert python(box, code).output.endswith(b"done\n")


@linux
def test_the_disk_is_bounded_in_bytes_files_and_holes(box):
    full = run(box, "head -c 100000000 /dev/zero > a; head -c 100000000 /dev/zero > b; exit 0")
    assert sum(map(len, full.files.values())) <= QUICK.disk_bytes
    scratch = run(
        box,
        "for i in 1 2 3; do head -c 3000000 /dev/zero > /tmp/$i || echo full; done;"
        "head -c 3000000 /dev/zero > /dev/shm/x || echo full",
    )
    assert scratch.output.count(b"full\n") >= 2
    many = python(
        box,
        "import os\n"
        "for i in range(100000):\n"
        "    try: open(f'f{i}', 'x').close()\n"
        "    except OSError: print(i); break",
    )
    assert int(many.output) <= QUICK.files + 8
    assert len(many.files) + many.lost <= QUICK.files + 8
    holes = python(
        box,
        "import os\n"
        "for i in range(40):\n"
        "    with open(f'f{i}', 'w') as f: os.truncate(f.fileno(), 4 << 20)\n"
        "try: os.truncate('f0', 1 << 40)\n"
        "except OSError: print('refused')",
    )
    assert sum(map(len, holes.files.values())) <= QUICK.disk_bytes
    assert holes.lost >= 38


@linux
def test_processor_time_is_bounded_across_processes(box):
    code = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"
    outcome = python(box, code, limits=CommandLimits(wall_s=30, cpu_s=1))
    assert outcome.cause == "cpu"
    assert outcome.seconds < 25


@linux
def test_links_out_of_the_folder_are_neither_followed_nor_kept(box):
    command = """
ln -s /etc/passwd passwd; ln -s / root; ln -s ../../../etc up; mkfifo pipe; mkdir -p d/__pycache__
echo x > d/__pycache__/c.pyc; echo y > d/kept; chmod 000 d/kept; mkdir closed; echo z > closed/f
chmod 000 closed; python -c "import socket; socket.socket(socket.AF_UNIX).bind('sock')"
python -c "open(b'bad\\xff', 'w'); open('new\\nline', 'w'); open('esc\\x1b', 'w')"
"""
    outcome = run(box, command)
    assert outcome.files == {"d/kept": b"y\n", "closed/f": b"z\n"}
    assert outcome.lost == 8


@linux
def test_a_folder_without_an_end_is_cut(box):
    code = "import os\nfor _ in range(45): os.mkdir('d'); os.chdir('d'); open('f', 'w').close()"
    outcome = python(box, code, limits=CommandLimits(files=200))
    assert 0 < len(outcome.files) <= plan.MAX_DEPTH
    assert outcome.lost >= 1


@linux
def test_nothing_outlives_its_command(box):
    mark = f"orphan-{os.getpid()}"
    code = f"""
import os, signal, sys, time  # {mark}
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            time.sleep(0.05); open('/workspace/late', 'a').write('x')
    os._exit(0)
print('left', flush=True)
"""
    outcome = python(box, code)
    assert (outcome.status, outcome.output, outcome.cause) == (0, b"left\n", ""), "it did not wait"
    assert _alive(mark) == []


@linux
def test_one_that_ignores_every_signal_ends_at_its_time(box):
    mark = f"deaf-{os.getpid()}"
    command = f"trap '' TERM INT HUP QUIT; setsid sleep 1000 {mark} & while :; do sleep 1; done"
    outcome = run(box, command.replace(mark, ""), limits=CommandLimits(wall_s=1))
    assert (outcome.cause, outcome.status) == ("time", -9)
    assert _alive("sleep\x001000") == []


@linux
def test_its_first_process_cannot_be_ended_from_inside(box):
    outcome = python(
        box, "import os\nfor number in (9, 15, 19):\n    os.kill(1, number)\nprint('still')"
    )
    assert (outcome.status, outcome.output) == (0, b"still\n")


def test_endless_output_is_cut_in_the_middle_or_ended(any_box):
    limits = CommandLimits(output_bytes=1000, wall_s=20)
    outcome = run(any_box, "seq 1 20000", limits=limits)
    assert (outcome.status, outcome.cause) == (0, "")
    assert len(outcome.output) == 1000
    assert outcome.output.startswith(b"1\n2\n")
    assert outcome.output.endswith(b"\n20000\n")
    assert outcome.printed == len(b"".join(b"%d\n" % i for i in range(1, 20001)))
    endless = run(any_box, "yes", limits=limits)
    assert endless.cause == "output"
    assert len(endless.output) == 1000


@pytest.fixture(params=["namespaces", "process"])
def any_box(request):
    if request.param == "namespaces" and sys.platform != "linux":
        pytest.skip("namespaces are Linux's")
    return Sandbox(isolation=request.param)


def test_a_missing_command_is_reported(any_box):
    outcome = run(any_box, ["no-such-command"])
    assert outcome.status == 127
    assert b"no-such-command" in outcome.output


def test_cancelling_ends_the_command(any_box):
    mark = 4000 + os.getpid()

    async def cancelled():
        task = asyncio.create_task(any_box.run(f"sleep {mark} & sleep {mark}", {}))
        for _ in range(5000):
            await asyncio.sleep(0.02)
            if len(_alive(f"sleep\0{mark}")) == 2:
                break
        else:
            pytest.fail("never started")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    deadline = time.monotonic() + 120
    while _alive(f"sleep\0{mark}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _alive(f"sleep\0{mark}") == []


@linux
def test_a_killed_worker_leaves_no_process_running():
    mark = 5000 + os.getpid()
    code = f"""
import asyncio
from deltawire.envs.sandbox.box import Sandbox
asyncio.run(Sandbox().run('setsid sleep {mark} & sleep {mark}', {{}}))
"""
    worker = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 120
    while len(_alive(f"sleep\0{mark}")) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(_alive(f"sleep\0{mark}")) == 2
    worker.kill()
    worker.wait()
    deadline = time.monotonic() + 120
    while _alive(f"sleep\0{mark}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _alive(f"sleep\0{mark}") == []


def test_process_isolation_limits_though_it_does_not_isolate():
    box = Sandbox(isolation="process")
    outcome = run(box, "cat a; echo new > b; sleep 0.01 & exit 3", {"a": b"x"})
    assert (outcome.status, outcome.output) == (3, b"x")
    assert outcome.files == {"a": b"x", "b": b"new\n"}
    assert run(box, "sleep 60", limits=CommandLimits(wall_s=1)).cause == "time"
    assert b"MemoryError" in run(box, [sys.executable, "-c", "bytearray(4 << 30)"]).output


@pytest.mark.parametrize("path", ["../a", "/etc/x", "a/../../b", "", "a//b", "./a", "a\0b", "x\n"])
def test_paths_that_leave_the_folder_are_refused(path):
    with pytest.raises(InputError, match="not a valid path below"):
        run(Sandbox(isolation="process"), "true", {path: b""})


def test_a_folder_beyond_its_limits_is_refused():
    with pytest.raises(InputError, match="5 bytes"):
        run(Sandbox(isolation="process"), "true", {"a": b"12345"}, CommandLimits(disk_bytes=4))


@linux
def test_a_machine_that_cannot_isolate_is_reported_and_nothing_runs(tmp_path, monkeypatch):
    """Twice: where the kernel has no room for namespaces, and on another system."""
    code = """
import asyncio, ctypes, sys
from deltawire.errors import InputError
from deltawire.envs.sandbox.box import Sandbox
libc = ctypes.CDLL(None)
libc.unshare(0x10000000)
try: open('/proc/sys/user/max_user_namespaces', 'w').write('0')
except OSError: pass
try:
    asyncio.run(Sandbox(user_namespace=True).run(f'touch {sys.argv[1]}', {}))
except InputError as error: print(error)
"""
    trace = tmp_path / "ran"
    said = subprocess.run(
        [sys.executable, "-c", code, trace], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert "gives no sandbox" in said
    assert 'isolation = "process"' in said
    assert not trace.exists()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(InputError, match="darwin"):
        Sandbox()


def test_a_launcher_that_fails_is_an_error_to_try_again(monkeypatch):
    import deltawire.envs.sandbox.box as module

    monkeypatch.setattr(module, "_BOOT", "{!r}; import sys; sys.exit('out of memory')")
    with pytest.raises(RetryError, match="launcher failed: out of memory"):
        run(Sandbox(isolation="process"), "true")
