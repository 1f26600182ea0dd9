"""The objects of a bucket: their keys, and typed structures with the limits of each."""
