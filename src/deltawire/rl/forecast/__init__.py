"""Forecasts: a sigmoid of compute against a run's accuracy or reward, and a rule to stop by it."""
