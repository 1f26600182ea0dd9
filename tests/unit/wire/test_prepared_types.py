"""Types that several threads decode first: msgspec 0.22 dies of it, unless they are prepared."""

import subprocess
import sys

PROGRAM = '''
from __future__ import annotations

import sys
import threading
import types

import msgspec

from deltawire.wire.objects import decode_packed

SOURCE = """
from __future__ import annotations
from typing import Annotated
import msgspec
from msgspec import Meta

class Inner(msgspec.Struct):
    a: Annotated[int, Meta(ge=0)]
    b: list[str]

class Outer(msgspec.Struct):
    x: Inner
    y: list[Inner]
    z: Annotated[bytes, Meta(max_length=10)] = b""
"""

sys.setswitchinterval(1e-6)
data = msgspec.msgpack.encode({"x": {"a": 1, "b": ["q"]}, "y": [{"a": 1, "b": []}], "z": b"1"})
found = []
for number in range(200):
    module = types.ModuleType(f"made{number}")
    sys.modules[module.__name__] = module
    exec(compile(SOURCE, module.__name__, "exec"), module.__dict__)
    together = threading.Barrier(8)

    def decode():
        together.wait()
        found.append(decode_packed(data, module.Outer, run="r", key="k").y[0].a)

    threads = [threading.Thread(target=decode) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(sum(found))
'''


def test_threads_that_are_first_to_decode_a_type_do_not_crash():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "1600"
