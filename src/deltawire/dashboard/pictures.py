"""Formats of the pictures that commands write."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from deltawire.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SUFFIXES: Final = (".svg", ".png", ".pdf")


def check_suffix(path: Path) -> None:
    """Raises `InputError` unless ``path`` ends as a format that `save_picture` writes."""
    if path.suffix not in _SUFFIXES:
        raise InputError(f"--plot {path}: use one of {', '.join(_SUFFIXES)}")


def save_picture(figure: Figure, path: Path) -> None:
    """Writes the figure in the format of the suffix; the same figure gives the same SVG."""
    check_suffix(path)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=130, metadata=metadata)
