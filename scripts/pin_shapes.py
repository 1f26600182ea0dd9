"""Writes the pinned profiles of the catalogue: run it after a change of the memory model.

.venv/bin/python scripts/pin_shapes.py
"""

from __future__ import annotations

from pathlib import Path

import msgspec

import deltawire.plan
from deltawire.plan.tables import make_catalogue_profiles

ACCELERATOR = "b200"


def main() -> None:
    """Resolve every model in every mode and write the profiles, one a line."""
    lines = [msgspec.json.encode(profile) for profile in make_catalogue_profiles(ACCELERATOR)]
    target = Path(deltawire.plan.__file__).with_name("profiles.json")
    target.write_bytes(b"[\n" + b",\n".join(lines) + b"\n]\n")


if __name__ == "__main__":
    main()
