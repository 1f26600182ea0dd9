"""Protects a worker's credentials from other processes of the same user.

Environments start processes, and some of them run what a model wrote. A process of the same user
can read another one's memory and its initial environment through ``/proc``, unless that process is
not dumpable, and every child inherits the environment variables.
"""

from __future__ import annotations

import ctypes
import os
import sys

from deltawire.store.opening import SECRETS

_SET_DUMPABLE = 4
CREDENTIALS = (*SECRETS, "AWS_CONTAINER_AUTHORIZATION_TOKEN")
"""Environment variables from which stores take their credentials when they are opened."""


def protect_credentials() -> list[str]:
    """Makes this process non-dumpable and removes the credentials of stores from its environment.

    Call it once the bucket is open and the engine has started: both read the variables then. An
    open bucket keeps those of `SECRETS`, also for the connections that it opens later.
    Returns the names that were removed. Systems other than Linux have no such attribute; there,
    only the variables are removed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    return [name for name in CREDENTIALS if os.environ.pop(name, None) is not None]
