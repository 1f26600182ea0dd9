"""Reward held against checks that it does not see, while the run goes on."""
