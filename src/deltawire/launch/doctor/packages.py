"""Examines the installed packages: which extras are complete, and whether versions are tested."""

from __future__ import annotations

import importlib.metadata

from packaging.requirements import Requirement

from deltawire import __version__
from deltawire.launch.doctor.findings import Finding, Status

AREA = "packages"
PURPOSES = {
    "rl": "train and sample",
    "serve": "gateway, watch",
    "sign": "signed runs",
    "prove": "statements of training",
    "presidio": "redaction of captures",
    "lora": "adapters",
    "data": "Parquet, saved datasets",
    "trl": "TRL's trainers",
    "verifiers": "environments of verifiers",
    "mcp": "tools of MCP servers",
    "openenv": "environments of OpenEnv",
    "tinker": "Tinker's SDK",
    "ray": "run --launcher ray",
    "hosted": "export, import",
    "metrics": "Prometheus",
    "tensorboard": "TensorBoard",
    "wandb": "Weights & Biases",
    "trackio": "Trackio",
}
"""The extras that users install, with what each is for; ``dev``, ``bench`` and ``docs`` belong to
a checkout."""


def examine_packages() -> list[Finding]:
    """Compares what is installed with the ranges that this release was tested with."""
    try:
        texts = importlib.metadata.requires("deltawire") or []
    except importlib.metadata.PackageNotFoundError:
        return [
            Finding(
                area=AREA,
                name="deltawire",
                found=f"{__version__}, not installed as a package",
                status="problem",
                fix="pip install deltawire, or in a checkout: make setup",
            )
        ]
    needs = [Requirement(text) for text in texts]
    core = [one for one in needs if one.marker is None or _applies(one, "")]
    found = [_extra("deltawire", core, f"{__version__}")]
    for name, purpose in PURPOSES.items():
        found.append(_extra(name, [one for one in needs if _belongs(one, name)], purpose))
    return found


def _applies(one: Requirement, extra: str) -> bool:
    return one.marker is not None and one.marker.evaluate({"extra": extra})


def _belongs(one: Requirement, extra: str) -> bool:
    return _applies(one, extra) and not _applies(one, "")


def _extra(name: str, needs: list[Requirement], purpose: str) -> Finding:
    """One finding for all packages of an extra: missing, outside of the tested range, or complete.

    Only ``deltawire`` itself is a problem if it is incomplete.
    """
    if not needs:
        return Finding(
            area=AREA,
            name=f"[{name}]",
            found=f"{purpose}: the installed package does not know this extra",
            status="note",
            fix="install this release again: its files and its metadata differ",
        )
    missing, odd, versions = list[str](), list[str](), list[str]()
    for one in needs:
        try:
            version = importlib.metadata.version(one.name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(one.name)
            continue
        versions.append(f"{one.name} {version}")
        if not one.specifier.contains(version, prereleases=True):
            odd.append(f"{one.name} {version} (tested: {one.specifier})")
    core = name == "deltawire"
    asked = "deltawire" if core else f"'deltawire[{name}]'"
    title = name if core else f"[{name}]"
    status: Status = "ok"
    fix = ""
    shown = f"{purpose}: {', '.join(versions)}"
    if odd:
        status, shown = "problem" if core else "note", f"{purpose}: {', '.join(odd)}"
        fix = f"pip install --upgrade {asked} installs the tested versions"
    if missing:
        status = "problem" if core else "note"
        shown = f"{purpose}: lacks {', '.join(missing + odd)}"
        fix = f"pip install {asked}"
    return Finding(area=AREA, name=title, found=shown, status=status, fix=fix)
