"""Network namespaces with shaped links, for processes of a fleet on one machine.

Each namespace is connected to this one by a pair of virtual devices. Token buckets (``tbf``) limit
what goes each way; delay is left to `deltawire.testing.proxy`. Needs ``ip`` and ``tc`` and the
right to administer networks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from types import TracebackType

from deltawire.errors import InputError

BURST_BYTES = 64 << 10
QUEUE_MS = 100
GOODPUT = 0.965
"""The share of a shaped link's bytes that is payload: frames of 1,514 bytes carry 1,448."""


class Namespaces:
    """Makes the namespaces ``names`` with a link each; use it as a context, which removes them.

    ``host`` is the address in this namespace that processes in all of them reach. Raises
    `InputError` if the machine does not permit it.

    Example::

        with Namespaces(["trainer", "readers"]) as links:
            links.shape("readers", to_bytes_s=12.5e6)
            subprocess.run([*links.command("readers"), "python", "-V"])
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._mark = f"dw{os.getpid() % 10_000}"
        self._network = f"10.{200 + os.getpid() % 50}"
        self._numbers = {name: number for number, name in enumerate(names)}
        self.host = f"{self._network}.0.1"

    def __enter__(self) -> Namespaces:
        if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
            raise InputError(f"shaped links need {' and '.join(missing)}", hint="install iproute2")
        try:
            for number in self._numbers.values():
                self._make(number)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def command(self, name: str) -> list[str]:
        """Returns the words that start a command in a namespace."""
        return ["ip", "netns", "exec", f"{self._mark}n{self._numbers[name]}"]

    def shape(self, name: str, *, to_bytes_s: float = 0.0, from_bytes_s: float = 0.0) -> None:
        """Limits a link's payload to and from a namespace, in bytes a second; 0 lifts the limit."""
        number = self._numbers[name]
        outside, inside = self._devices(number)
        self._limit([], outside, to_bytes_s)
        self._limit(self.command(name), inside, from_bytes_s)

    def _devices(self, number: int) -> tuple[str, str]:
        return f"{self._mark}o{number}", f"{self._mark}i{number}"

    def _make(self, number: int) -> None:
        space = f"{self._mark}n{number}"
        outside, inside = self._devices(number)
        near, far = f"{self._network}.{number}.1", f"{self._network}.{number}.2"
        within = ["ip", "netns", "exec", space]
        for command in (
            ["ip", "netns", "add", space],
            ["ip", "link", "add", outside, "type", "veth", "peer", "name", inside],
            ["ip", "link", "set", inside, "netns", space],
            ["ip", "addr", "add", f"{near}/24", "dev", outside],
            ["ip", "link", "set", outside, "up"],
            [*within, "ip", "addr", "add", f"{far}/24", "dev", inside],
            [*within, "ip", "link", "set", inside, "up"],
            [*within, "ip", "link", "set", "lo", "up"],
            [*within, "ip", "route", "add", "default", "via", near],
        ):
            _run(command)

    def _limit(self, within: list[str], device: str, bytes_s: float) -> None:
        where = [*within, "tc", "qdisc"]
        subprocess.run(  # noqa: S603 - tc, with our own words
            [*where, "del", "dev", device, "root"], capture_output=True, check=False
        )
        if bytes_s:
            bits = round(8 * bytes_s / GOODPUT)
            burst = max(BURST_BYTES, bits // 8 // 200)
            _run([*where, "add", "dev", device, "root", "tbf", "rate", f"{bits}bit", "burst",
                  str(burst), "latency", f"{QUEUE_MS}ms"])  # fmt: skip

    def _remove(self) -> None:
        for number in self._numbers.values():
            for command in (
                ["ip", "netns", "del", f"{self._mark}n{number}"],
                ["ip", "link", "del", self._devices(number)[0]],
            ):
                subprocess.run(command, capture_output=True, check=False)  # noqa: S603 - as above


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - ip, tc
    if done.returncode:
        raise InputError(
            f"cannot make a shaped link: {' '.join(command[:6])}: {done.stderr.strip()[:200]}",
            hint="run as root on Linux",
        )
