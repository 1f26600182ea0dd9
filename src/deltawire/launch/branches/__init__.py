"""Tools over the versions of a run: find the one that broke something."""
