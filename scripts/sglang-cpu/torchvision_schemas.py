"""Lets the default index's torchvision import with torch's CPU build.

Its compiled operators do not load there, and it registers replacements for two of them: these get
their schemas first. A ``.pth`` file imports this module in every Python of the environment; it
costs nothing until torchvision is imported.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from typing import Any

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_kept: list[Any] = []


class BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Defines the schemas when torchvision is first looked for, and finds nothing itself."""

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: Any = None) -> None:
        """Returns None, so that the usual finders go on."""
        if name == "torchvision" and self in sys.meta_path:
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(operator + SCHEMA)
            _kept.append(library)  # The schemas go with it.


sys.meta_path.insert(0, BeforeTorchvision())
