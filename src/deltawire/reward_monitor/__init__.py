"""Compares rewards with probes, checks that are not part of the reward, during a run."""
