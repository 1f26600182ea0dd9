"""vLLM: weights that follow a run while they are served, through vLLM's own extension points.

Nothing here is imported before vLLM loads its plugins, or someone asks for it.
"""
