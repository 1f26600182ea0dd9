"""Runs the tests of the clients, and writes the table of docs/CLIENTS.md.

.venv/bin/python scripts/client_table.py [NAME…]

With names, only these clients run; a client whose package is not installed is left as it was.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "clients"))

import client_registry as registry


def main(names: list[str]) -> int:
    """Runs clients, stores what passed, and writes the table; returns 1 if a test failed."""
    ran, failed = registry.stored(), 0
    for client in registry.CLIENTS:
        if names and client.name not in names:
            continue
        try:
            release = registry.release_of(client)
        except importlib.metadata.PackageNotFoundError:
            print(f"{client.name}: {client.package or client.name} is not installed")  # noqa: T201
            continue
        passed, output = registry.run(client)
        if not passed:
            print(f"{client.name} failed:\n{output}")  # noqa: T201
            failed = 1
            continue
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        ran[client.name] = {"passed": str(passed), "date": today, "release": release}
        registry.RAN.write_text(json.dumps(ran, indent=2, sort_keys=True) + "\n")
        print(f"{client.name}: {passed} passed")  # noqa: T201
    rows = registry.table(registry.CLIENTS, ran)
    text = registry.DOCUMENT.read_text()
    registry.DOCUMENT.write_text(registry.in_document(text, rows))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
