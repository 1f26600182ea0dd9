"""Takes feedback about receipts, and detects signals that nobody reports."""
