"""Deals tests out to processes by files, but those of some files one by one."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

APART = ("tests/protocol/test_protocol.py",)
"""Files whose tests share nothing: in one process they would outlast all others."""


class FilesApart(LoadFileScheduling):
    """xdist's distribution by files, with the tests of `APART` on their own."""

    def _split_scope(self, nodeid):
        file = super()._split_scope(nodeid)
        return nodeid if file in APART else file
