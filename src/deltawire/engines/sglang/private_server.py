"""Starts SGLang's HTTP server on a Unix socket: ``private_server PATH ARGUMENTS…``."""

from __future__ import annotations

import sys

from deltawire.engines.following.unix_listening import listen_on


def main() -> None:
    """Serves until the process is ended."""
    listen_on(sys.argv[1])
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    launch_server(prepare_server_args(sys.argv[2:]))


if __name__ == "__main__":
    main()
