"""Maps checkpoint coordinates to an engine's live parameters, and swaps new weights into them."""
