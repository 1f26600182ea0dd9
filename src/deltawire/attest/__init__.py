"""Attests weights: digests of any model's tensors, and verdicts on what differs from a reference.

`digests` computes them for a module, a mapping of tensors or a folder of safetensors files, and
`Digests.write` stores them as ``digests.json``. docs/ATTEST.md describes the file and the verdicts.
Nothing here imports torch unless the tensors are torch's.
"""

from deltawire.attest.digesting import digests, digests_of_stream
from deltawire.attest.statement import Digests, TensorDigest, read_digests

__all__ = ["Digests", "TensorDigest", "digests", "digests_of_stream", "read_digests"]
