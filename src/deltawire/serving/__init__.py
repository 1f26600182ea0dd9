"""Serves a run through several engines, with the hosted providers' hot-load contract."""
