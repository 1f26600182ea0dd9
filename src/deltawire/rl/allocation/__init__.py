"""Decides how many completions each prompt gets, from what its first completions earned."""
