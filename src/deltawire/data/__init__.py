"""Reads rows of data files by number, and defines the order in which they are drawn; imports no
models.
"""

from deltawire.data.order import heldout_rows, mixture_of, permuted, stream_seed, take
from deltawire.data.rows import Rows, open_rows, require_columns

__all__ = [
    "Rows",
    "heldout_rows",
    "mixture_of",
    "open_rows",
    "permuted",
    "require_columns",
    "stream_seed",
    "take",
]
