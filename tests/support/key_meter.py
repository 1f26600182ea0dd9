"""A bucket that counts how many bytes of each key were read."""

from collections import Counter

from deltawire.store import DelegatingBucket


class KeyMeter(DelegatingBucket):
    """``read_keys`` holds the bytes read of each key."""

    def __init__(self, inner):
        super().__init__(inner)
        self.read_keys = Counter()

    def get(self, key, *, limit):
        data = super().get(key, limit=limit)
        if data is not None:
            self.read_keys[key] += len(data)
        return data

    def read_ranges(self, key, ranges):
        parts = super().read_ranges(key, ranges)
        if parts is not None:
            self.read_keys[key] += sum(map(len, parts))
        return parts
