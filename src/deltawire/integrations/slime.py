"""Attests slime's engines by their log-probabilities, before each update replaces the weights::

    --custom-update-weight-post-write-path deltawire.integrations.slime.check

slime's engines are SGLang's, whose live weights deltawire cannot read without following a run. This
hook runs when a version is written and no engine has read it yet: it keeps the files under a second
name, and scores the engines against those of the version before ([black box](docs/ATTEST.md)).
``DELTAWIRE_ON_MISMATCH`` says "warn" (default) or "stop", ``DELTAWIRE_CHECK_EVERY`` which updates
are compared (each 20th): scoring takes a pass of the model on this machine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deltawire.integrations.checking import WeightCheck, said
from deltawire.launch.black_box.checking import BlackBox, BlackBoxOptions
from deltawire.runtime.trusted import ReaderTrust

KEPT = ".deltawire-compared"
WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt")


class Hook:
    """Compares the engines with the version that was written before."""

    def __init__(self, check: WeightCheck) -> None:
        self._check = check
        self._kept: Path | None = None

    def __call__(self, args: Any, version_dir: str, rollout_engines: Sequence[Any]) -> None:
        """See slime's ``--custom-update-weight-post-write-path``; only rank 0 does anything."""
        import torch

        if torch.distributed.is_initialized() and torch.distributed.get_rank():
            return
        before, due = self._kept, self._check.due()
        problem = ""
        if before is not None and due:
            urls = self._check.tried(lambda: _addresses(rollout_engines))
            problem = self._compare(before, urls or [])
        self._kept = None
        next_due = self._check.next_is_due
        self._kept = self._check.tried(
            lambda: _keep(Path(version_dir), Path(args.hf_checkpoint), next_due=next_due)
        )
        self._check.act(problem)

    def _compare(self, folder: Path, urls: Sequence[str]) -> str:
        found = []
        for url in urls:
            try:
                options = BlackBoxOptions(url=url, against=str(folder), also=[], error=0.001)
                report = BlackBox(options, ReaderTrust()).check()
            except Exception as error:
                self._check.warn_once(f"{url} was not compared: {said(error)}")
                continue
            if report.verdict == "different":
                found.append(f"{url} serves other weights than {folder.name}")
            elif report.verdict != "same":
                self._check.warn_once(f"{url}: cannot tell whether it serves its version")
        return "; ".join(found)


def _addresses(engines: Sequence[Any]) -> list[str]:
    import ray

    return [url for url in ray.get([one.get_url.remote() for one in engines]) if url]


def _keep(folder: Path, model: Path, *, next_due: bool) -> Path | None:
    """Links the files of a version, with the configuration and the tokenizer of the ``model``
    where it has none, and removes those of the version before. Returns where they lie."""
    place = folder.parent / KEPT
    shutil.rmtree(place, ignore_errors=True)
    if not next_due:
        return None
    kept = place / folder.name
    shutil.copytree(folder, kept, copy_function=os.link)
    for file in model.iterdir():
        place = kept / file.name
        if file.is_file() and not file.name.endswith(WEIGHTS) and not place.exists():
            shutil.copy(file, place)
    return kept


def _from_environment() -> Hook:
    stop = os.environ.get("DELTAWIRE_ON_MISMATCH") == "stop"
    every = int(os.environ.get("DELTAWIRE_CHECK_EVERY", "20"))
    return Hook(WeightCheck("stop" if stop else "warn", every=every))


check = _from_environment()
