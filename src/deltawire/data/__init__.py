"""Rows of data files by number, and the order in which they are drawn; knows no models."""

from deltawire.data.order import mixture_of, permuted, take
from deltawire.data.rows import Rows, open_rows, require_columns

__all__ = ["Rows", "mixture_of", "open_rows", "permuted", "require_columns", "take"]
