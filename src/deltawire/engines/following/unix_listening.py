"""Has uvicorn listen on a Unix socket, for engines whose servers only know TCP ports.

Others on the machine could reach a port; a socket lies in a folder that only this user can enter.
"""

from __future__ import annotations

import importlib
from typing import Any


def listen_on(path: str) -> None:
    """Has every server that uvicorn starts in this process listen on ``path``."""
    uvicorn: Any = importlib.import_module("uvicorn")
    original = uvicorn.Config

    def on_path(app: Any, **options: Any) -> Any:
        return original(app, **{**options, "uds": path})

    uvicorn.Config = on_path
