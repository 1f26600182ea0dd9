"""What a person sees of a run: the live screen, the closing summary and the report."""
