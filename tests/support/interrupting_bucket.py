"""A bucket that lets something else happen at one of its requests, or ends its process there."""

from deltawire.store import DelegatingBucket


class KilledError(Exception):
    """The process is gone."""


class InterruptingBucket(DelegatingBucket):
    """Calls ``interrupt`` before its ``at``-th request, or ``after`` it. So many requests later
    (``ends``) every request raises `KilledError`; None is never.

    ``left`` is how many requests are left until then; it is positive if they never came.
    """

    def __init__(self, inner, at, interrupt=lambda: None, *, after=False, ends=None):
        super().__init__(inner)
        self.left, self.interrupt, self.after, self.ends = at, interrupt, after, ends

    def _call(self, verb, key, operation):
        self.left -= 1
        if self.left == 0 and not self.after:
            self.interrupt()
        found = operation()
        if self.left == 0 and self.after:
            self.interrupt()
        if self.ends is not None and self.left <= -self.ends:
            raise KilledError
        return found
