"""Registers engines: each is a folder here and one line in `ENGINES`.

Each entry names a module with three functions, which import heavy packages only when called::

    def check_machine() -> None: ...                           # raises InputError: cannot run here
    def check_tensors(tensors: Sequence[TensorSpec]) -> None: ...   # … cannot serve such a run
    def open_engine(request: EngineRequest) -> OpenEngine: ...
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deltawire.errors import InputError

if TYPE_CHECKING:
    from deltawire.engines.base import EngineRequest, OpenEngine
    from deltawire.wire.run import TensorSpec

ENGINES = {
    "transformers": "deltawire.engines.transformers.opening",
    "sglang": "deltawire.engines.sglang.opening",
    "vllm": "deltawire.engines.vllm.opening",
}
"""Engines by the name that ``rollout.engine`` gives."""


def check_engine(name: str) -> None:
    """Raises `InputError` if there is no engine of that name, or it cannot run on this machine."""
    _module(name).check_machine()


def check_tensors(name: str, tensors: Sequence[TensorSpec]) -> None:
    """Raises `InputError` that names the first of a run's tensors that the engine cannot serve."""
    _module(name).check_tensors(tensors)


def open_engine(name: str, request: EngineRequest) -> OpenEngine:
    """Opens the engine of that name; raises `InputError` as `check_engine` does."""
    opened: OpenEngine = _module(name).open_engine(request)
    return opened


def _module(name: str) -> Any:
    if name not in ENGINES:
        raise InputError(
            f"there is no engine {name[:80]!r}",
            hint=f"set rollout.engine to one of {', '.join(sorted(ENGINES))}",
        )
    return importlib.import_module(ENGINES[name])
