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

from deltawire.errors import DeltawireError
from deltawire.integrations.checking import WeightCheck
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
            import ray

            urls = ray.get([one.get_url.remote() for one in rollout_engines])
            problem = self._compare(before, [url for url in urls if url])
        self._keep(Path(version_dir), Path(args.hf_checkpoint), next_due=self._check.next_is_due)
        self._check.act(problem)

    def _compare(self, folder: Path, urls: Sequence[str]) -> str:
        found = []
        for url in urls:
            try:
                options = BlackBoxOptions(url=url, against=str(folder), also=[], error=0.001)
                report = BlackBox(options, ReaderTrust()).check()
            except DeltawireError as error:
                self._check.warn_once(f"{url} was not compared: {error}")
                continue
            if report.verdict == "different":
                found.append(f"{url} serves other weights than {folder.name}")
            elif report.verdict != "same":
                self._check.warn_once(f"{url}: cannot tell whether it serves its version")
        return "; ".join(found)

    def _keep(self, folder: Path, model: Path, *, next_due: bool) -> None:
        """Links the files of a version, with the configuration and the tokenizer of the ``model``
        where it has none, and removes those of the version before."""
        place = folder.parent / KEPT
        shutil.rmtree(place, ignore_errors=True)
        self._kept = None
        if next_due:
            self._kept = place / folder.name
            shutil.copytree(folder, self._kept, copy_function=os.link)
            for file in model.iterdir():
                place = self._kept / file.name
                if file.is_file() and not file.name.endswith(WEIGHTS) and not place.exists():
                    shutil.copy(file, place)


def _from_environment() -> Hook:
    stop = os.environ.get("DELTAWIRE_ON_MISMATCH") == "stop"
    every = int(os.environ.get("DELTAWIRE_CHECK_EVERY", "20"))
    return Hook(WeightCheck("stop" if stop else "warn", every=every))


check = _from_environment()
