"""The keys of ``deltawire bench train``: their floors, and the modules that measure them.

A module of this folder has one function, ``measure(options) -> Measured``, and may give several
keys. It runs in a separate process, so that its threads, process groups and peak of memory are
not another measurement's. To add a key: one module, one line in `KEYS`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from benchmarks.runner import ROOT
from deltawire.errors import InputError

Value = bool | float | None
"""None: not measured, for a reason that the details give."""


class Key(NamedTuple):
    """A registered figure: ``module`` measures it; it is met at or past ``floor`` in the direction
    ``sense``. A ``placeholder`` is a floor that is not based on a measurement yet: no value meets
    it."""

    module: str
    sense: Literal[">=", "<=", "is"]
    floor: Value
    what: str
    placeholder: bool = False

    def met(self, value: Value) -> bool:
        """Returns whether a value reaches the floor, which was measured before."""
        if self.placeholder:
            return False
        if self.sense == "is" or value is None or self.floor is None:
            return value is self.floor
        return value >= self.floor if self.sense == ">=" else value <= self.floor

    @property
    def bound(self) -> str:
        """The floor in words, such as ``>= 8``."""
        words = str(self.floor).lower() if self.sense == "is" else f"{self.sense} {self.floor:g}"
        return f"{words} (not measured yet)" if self.placeholder else words


KEYS: Final[dict[str, Key]] = {
    "memory_error_max": Key(
        "memory_error", "<=", 0.10, "largest error of the predicted peak memory of a step"
    ),
    "real_memory_error": Key(
        "real_memory", "<=", 0.15, "the same of whole processes on a real model, resident"
    ),
    "head_peak_ratio": Key(
        "head_peak", ">=", 8, "peak memory of the head, plain over chunked, 151,936 x 8,192"
    ),
    "packed_speedup": Key(
        "packed", ">=", 1.5, "passes over padded rows over packed ones, log-normal lengths"
    ),
    "packed_speedup_equal": Key("packed", ">=", 0.95, "the same at equal lengths"),
    "step_speedup_vs_trl": Key("peers", ">=", 1.5, "a step of TRL's GRPO over one of ours"),
    "ranks_equal": Key(
        "rank_gradients", "<=", 1e-6, "gradient of 2 ranks against 1, relative L2, dense and MoE"
    ),
    "offload_device_peak_saved": Key(
        "offload", ">=", 0.40, "share of a step's device peak that optimizer offload saves"
    ),
    "offload_equal": Key("offload", "is", True, "bits with and without optimizer offload, resumed"),
    "resume_equal": Key("resumed", "is", True, "bits of a run that was stopped and continued"),
    "kill_any_rank_equal": Key("resumed", "is", True, "bits of a run whose ranks were killed"),
    "trainer_blocked_checkpoint_vs_memcpy": Key(
        "checkpoint_cost", "<=", 1.5, "wait for a checkpoint over a copy of its bytes in memory"
    ),
}
"""Every key, in the order of the table."""


PACKAGE: Final = "benchmarks.training"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments that a measurement may read."""

    seed: int = 0
    repeats: int = 5
    cases: int = 8
    real: bool = False
    out: str = ""
    canaries: int = 2000
    worlds: str = "all"

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Options:
        """Reads the command's arguments, as far as it has them."""
        given = vars(arguments)
        return cls(**{name: given[name] for name in cls.__struct_fields__ if name in given})


class Measured(NamedTuple):
    """Values by key, and ``details`` for the JSON: plain data that the values follow from."""

    values: Mapping[str, Value]
    details: dict[str, Any] = {}  # noqa: RUF012 - a default of a tuple, never changed


def choose_keys(wanted: str, keys: Mapping[str, Key] = KEYS) -> list[str]:
    """Returns the keys that ``wanted`` names: ``all``, or names with commas between them."""
    if wanted == "all":
        return list(keys)
    names = wanted.split(",")
    if unknown := [name for name in names if name not in keys]:
        raise InputError(
            f"--keys: there is no {unknown[0][:64]!r}", hint=f"known: all, {', '.join(keys)}"
        )
    return names


def measure_in_processes(
    names: Iterable[str],
    options: Options,
    *,
    keys: Mapping[str, Key] = KEYS,
    package: str = PACKAGE,
) -> tuple[dict[str, Value], dict[str, Any]]:
    """Measures keys, each module once in a separate process; returns values and details by key.

    ``keys`` name modules of ``package``. Progress goes to standard error. Raises
    `subprocess.CalledProcessError` if a measurement fails.
    """
    values: dict[str, Value] = {}
    details: dict[str, Any] = {}
    for module in dict.fromkeys(keys[name].module for name in names):
        measured = json.loads(in_process(f"{package}.{module}", options))
        values.update(measured["values"])
        details[module] = measured["details"]
    return {name: values[name] for name in names}, details


def in_process(module: str, options: Options, function: str = "measure") -> str:
    """Calls ``function(options)`` of a module in a new process; returns the JSON of its result."""
    code = (
        "import importlib, sys, msgspec\n"
        "from benchmarks.training.keys import Options, encoded\n"
        f"call = importlib.import_module({module!r}).{function}\n"
        f"print(encoded(call(msgspec.json.decode(sys.argv[1], type=Options))))\n"
    )
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(  # noqa: S603 - our own interpreter, our own modules
        [sys.executable, "-c", code, msgspec.json.encode(options).decode()],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    return done.stdout.splitlines()[-1]


def encoded(result: Any) -> str:
    """Encodes a result as one line of JSON."""
    plain = result._asdict() if hasattr(result, "_asdict") else result
    return json.dumps(plain)


def report(
    values: dict[str, Value],
    details: dict[str, Any],
    options: Options,
    *,
    keys: Mapping[str, Key] = KEYS,
) -> dict[str, Any]:
    """Everything as plain data: each key's value, floors, and whether they are met."""
    return {
        **values,
        "seed": options.seed,
        "floors": {name: keys[name].bound for name in values},
        "met": {name: keys[name].met(value) for name, value in values.items()},
        "details": details,
    }


def rows(
    values: dict[str, Value], *, keys: Mapping[str, Key] = KEYS
) -> Sequence[tuple[str, str, str, str, str]]:
    """The table: key, value, floor, met, meaning."""
    return [
        (
            name,
            _shown(value),
            keys[name].bound,
            "yes" if keys[name].met(value) else "NO",
            keys[name].what,
        )
        for name, value in values.items()
    ]


def _shown(value: Value) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else f"{value:.4g}"
