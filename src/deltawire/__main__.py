"""``python -m deltawire``."""

from deltawire.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
