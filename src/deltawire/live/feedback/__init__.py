"""Takes feedback about receipts, and detects signals that no client reports."""
