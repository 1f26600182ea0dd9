"""Starts SGLang's HTTP server on a Unix socket: ``private_server PATH ARGUMENTS…``.

SGLang listens on a TCP port only, which others on the machine could reach. Its HTTP server is
uvicorn, which takes a path instead.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


def main() -> None:
    """Serves until the process is ended."""
    path, *arguments = sys.argv[1:]
    uvicorn: Any = importlib.import_module("uvicorn")
    original = uvicorn.Config

    def on_path(app: Any, **options: Any) -> Any:
        return original(app, **{**options, "uds": path})

    uvicorn.Config = on_path
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    launch_server(prepare_server_args(arguments))


if __name__ == "__main__":
    main()
