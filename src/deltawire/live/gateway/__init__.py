"""The gateway's HTTP side: answers, receipts, streams."""
