"""Simulates a fleet by discrete events: transfers over shared links and cores, and rollouts."""
