"""Runs examples/real/vllm.toml over an S3 server on loopback.

    PYTHONPATH=examples/real DELTAWIRE_TRUSTED_MODULES=rewards \\
        .venv/bin/python examples/real/over_s3.py [CONFIG.toml] [OUT]

The server keeps its objects in memory and ends with this program, so the run cannot be continued.
It comes with `pip install 'deltawire[dev]'`.
"""

from __future__ import annotations

import os
import sys

from deltawire.cli.main import main
from deltawire.testing.s3_server import S3Server

if __name__ == "__main__":
    given = sys.argv[1:]
    config = given[0] if given else "examples/real/vllm.toml"
    out = given[1] if len(given) > 1 else "runs/real-vllm"
    with S3Server() as server:
        server.make_bucket("real")
        os.environ.update(server.environment)
        sys.exit(main(["run", config, "--out", out, "--bucket", "s3://real/run"]))
