"""Makes the versions of a run's further precisions again, and compares the bits.

A version of such a line is a function of the run's version of the same number and of the scales of
the line's version before it (`deltawire.train.publications`). So it needs neither groups nor the
trainer's state to be checked.
"""

from __future__ import annotations

import torch
from torch import nn

from deltawire.errors import CorruptError, InputError
from deltawire.export.quantized import QuantizedWeights
from deltawire.export.source import open_source
from deltawire.runtime.lines import line_bucket
from deltawire.store import Bucket
from deltawire.sync import Mirror, committed_versions, load_mirror, read_manifest, read_run


class DerivedLine:
    """The line of a run's versions by ``exporter``; ``model`` is read for names and shapes only.

    Example::

        line = DerivedLine(bucket, "fp8-block", model)
        line.require(load_mirror(bucket, run, at=7))
    """

    def __init__(self, bucket: Bucket, exporter: str, model: nn.Module) -> None:
        """Raises `InputError` if the run has no such line."""
        self.exporter = exporter
        self.bucket = line_bucket(bucket, exporter)
        self.run = read_run(self.bucket)
        source = open_source(exporter, model)
        if not isinstance(source, QuantizedWeights):
            raise InputError(f"{exporter} does not quantize", run=self.bucket.url)
        self._source = source
        self._mirror: Mirror | None = None
        self.versions = committed_versions(self.bucket)

    def require(self, upper: Mirror) -> Mirror:
        """Returns the line's version of ``upper``'s number. Raises `CorruptError` if it cannot be
        read, or does not follow from ``upper`` and the line's version before.

        The first version that can be read has scales that no other one states; unless it is version
        0, its scales are taken as they are.
        """
        version = upper.version
        before = self._before(version)
        if self._mirror is None or self._mirror.version != before:
            self._mirror = None
            if before is not None:
                self._mirror = load_mirror(self.bucket, self.run, at=before)
        mirror, self._mirror = self._mirror, None
        if mirror is not None:
            self._source.continue_from(mirror.copy())
        mirror = load_mirror(self.bucket, self.run, at=version, into=mirror)
        if before is None and version:
            self._source.continue_from(mirror.copy())
        for name, shard in self._source.derived(upper).items():
            made = shard.bits.contiguous().reshape(-1).view(torch.uint8).numpy()
            if not (mirror.tensors[name].reshape(-1).view("u1") == made).all():
                raise CorruptError(
                    f"{name[:100]} is not what {self.exporter} makes of version {version}",
                    run=self.bucket.url,
                    version=version,
                )
        self._mirror = mirror
        return mirror

    def _before(self, version: int) -> int | None:
        """Returns the line's version before, None if retention deleted it or there is none."""
        before = max((one for one in self.versions if one < version), default=None)
        if before is None:
            return None
        manifest = read_manifest(self.bucket, self.run, before)
        return None if manifest is None or manifest.pruned else before
