"""The plugin's entry point (``sglang.srt.plugins``), run once in each of SGLang's processes."""

from __future__ import annotations

import os

from deltawire.engines.live_parts import attests_here
from deltawire.engines.sglang import FOLLOW


def register() -> None:
    """Registers the hooks that follow a run, if `FOLLOW` names one, or else those that attest.

    SGLang logs the errors of a plugin and serves on. A server that should follow a run must not
    serve other weights, so an error here ends the process.
    """
    if (follows := bool(os.environ.get(FOLLOW))) or attests_here():
        try:
            from deltawire.engines.sglang import attesting, hooks

            (hooks if follows else attesting).install()
        except BaseException as error:
            what = "follow the run" if follows else "attest"
            raise SystemExit(f"deltawire cannot {what}: {error}") from error
