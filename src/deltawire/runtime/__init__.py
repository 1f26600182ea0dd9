"""Runs processes: leases, heartbeats, the watchdog, the supervisor and event streams."""
