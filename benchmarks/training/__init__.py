"""``deltawire bench train``: one module for each measurement, one line for each key in `keys`."""
