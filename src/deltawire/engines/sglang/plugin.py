"""The plugin's entry point (``sglang.srt.plugins``), run once in each of SGLang's processes."""

from __future__ import annotations

import os

from deltawire.engines.sglang import FOLLOW


def register() -> None:
    """Registers the hooks that follow a run, if `FOLLOW` names one.

    SGLang logs the errors of a plugin and serves on. A server that should follow a run must not
    serve other weights, so an error here ends the process.
    """
    if not os.environ.get(FOLLOW):
        return
    try:
        from deltawire.engines.sglang import hooks

        hooks.install()
    except BaseException as error:
        raise SystemExit(f"deltawire cannot follow the run: {error}") from error
