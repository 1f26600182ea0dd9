"""Runs a framework's own module with its engines attested::

    python -m deltawire.integrations prime_rl --on-mismatch stop MODULE [ARGUMENTS]

The module runs as ``python -m MODULE ARGUMENTS`` would, in this process.
"""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys

NAMES = ("areal", "nemo_rl", "prime_rl", "skyrl", "trl", "verl")


def main(arguments: list[str]) -> None:
    """Turns the check on, then runs the module."""
    parser = argparse.ArgumentParser(prog="python -m deltawire.integrations")
    parser.add_argument("framework", choices=NAMES)
    parser.add_argument("--on-mismatch", choices=("warn", "stop"), default="warn")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="check each Nth update")
    parser.add_argument("module")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    integration = importlib.import_module(f"deltawire.integrations.{options.framework}")
    integration.verify(options.on_mismatch, every=options.every)
    sys.argv = [options.module, *options.rest]
    runpy.run_module(options.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
