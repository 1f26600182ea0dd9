"""``deltawire bench adapters``: a module for each measurement, a line for each key in `keys`."""
