"""Runs the command: ``python -P -m deltawire`` imports nothing from the working directory."""

import sys

if not sys.flags.safe_path:
    # Python puts the working directory first. Its files, such as a bucket's, must not become code.
    del sys.path[0]

from deltawire.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
