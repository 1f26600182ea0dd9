"""The chain of versions: its objects, and routes through them."""
