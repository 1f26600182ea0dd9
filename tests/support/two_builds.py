"""A second build of deltawire: a copy of the package with the next release's number and features.

    python tests/support/two_builds.py COPY status RUN_URL

runs a command of the copy in the folder COPY; its child processes do too.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve()
NEXT = "0.2.0"
EDITS = {
    "__init__.py": [('__version__ = "0.1.0"', f'__version__ = "{NEXT}"')],
    "config/features.py": [
        (
            "FEATURES: Final[dict[str, Feature]] = {}",
            'FEATURES: Final[dict[str, Feature]] = {"rollout.tempo": Feature("0.2", ("worker",))}',
        )
    ],
    "config/sections.py": [
        (
            "class RolloutConfig(Section, frozen=True, kw_only=True):",
            "class RolloutConfig(Section, frozen=True, kw_only=True):\n    tempo: Count = 1",
        )
    ],
    "wire/status.py": [
        (
            "    ended: bool = False\n",
            '    ended: bool = False\n    mood: str = "newer"\n',
        )
    ],
}
"""The next release has a number, a setting that workers must know, and a member of heartbeats that
this release does not know."""


def make_next_build(folder: Path) -> Path:
    """Copies the package that is imported here, and changes the copy; returns its folder."""
    import deltawire
    from deltawire import _native

    source = Path(deltawire.__file__).parent
    copy = folder / "deltawire"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    native = Path(_native.__file__)
    shutil.copy(native, copy / native.name)
    for name, edits in EDITS.items():
        text = (copy / name).read_text()
        for old, new in edits:
            if old not in text:
                raise ValueError(f"{name} has no {old!r}: change EDITS with it")
            text = text.replace(old, new, 1)
        (copy / name).write_text(text)
    return folder


def command_of(build: Path | None) -> list[str]:
    """The first words of a command of this build, or of the one in a folder."""
    if build is None:
        return [sys.executable, "-m", "deltawire"]
    return [sys.executable, str(SCRIPT), str(build)]


def main() -> None:
    """Runs the command of the copy."""
    # An editable installation finds the checkout before any path.
    sys.meta_path[:] = [one for one in sys.meta_path if "Redirecting" not in type(one).__name__]
    folder = sys.argv[1]
    sys.path[0:1] = [folder, folder]  # `deltawire.__main__` removes the first.
    os.environ["PYTHONPATH"] = folder
    sys.argv = ["deltawire", *sys.argv[2:]]
    runpy.run_module("deltawire", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
