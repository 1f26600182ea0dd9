"""Publishes the weights that slime writes to disk, from its own hook.

::

    export DELTAWIRE_RUN=s3://bucket/run
    train.py --update-weight-mode full --update-weight-transport disk \\
        --update-weight-disk-dir DIR --custom-update-weight-post-write-path deltawire.slime.publish

slime calls the hook on every rank after a version's directory is complete and before engines read
it. It removes the directory afterwards, so the hook returns when the version is committed.
"""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import Any

from deltawire.errors import InputError
from deltawire.store import open_bucket
from deltawire.sync import CheckpointPublisher
from deltawire.sync.huggingface.publish_dirs import DirectoryResult

RUN = "DELTAWIRE_RUN"
"""The environment variable that names the run's location."""

_PUBLISHERS: dict[str, CheckpointPublisher] = {}


def publish(args: Any, version_dir: str | Path, rollout_engines: Any) -> DirectoryResult | None:
    """Publishes the directory ``version_dir`` from rank 0; other ranks return None at once.

    ``args`` and ``rollout_engines`` are slime's and not used. Raises `InputError` without the
    variable ``DELTAWIRE_RUN``, and for a directory that is not a complete model or another one than
    the run's.
    """
    del args, rollout_engines
    if _rank() != 0:
        return None
    url = os.environ.get(RUN, "")
    if not url:
        raise InputError(
            f"{RUN} is not set", hint=f"export {RUN}=s3://bucket/run for the trainer's processes"
        )
    if url not in _PUBLISHERS:
        publisher = CheckpointPublisher(open_bucket(url, create=True))
        _PUBLISHERS[url] = publisher
        atexit.register(publisher.close)
    return _PUBLISHERS[url].publish(Path(version_dir), in_name_order=True)


def close() -> None:
    """Closes the publishers of this process, as its end does; the next `publish` opens them
    again."""
    for publisher in _PUBLISHERS.values():
        atexit.unregister(publisher.close)
        publisher.close()
    _PUBLISHERS.clear()


def _rank() -> int:
    """Returns this process's rank in torch's process group, 0 without one."""
    import torch.distributed as dist

    return int(dist.get_rank()) if dist.is_available() and dist.is_initialized() else 0
