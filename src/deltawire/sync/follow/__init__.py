"""The reading side: fetches, verifies and applies versions."""
