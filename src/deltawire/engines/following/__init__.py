"""Has an engine that serves follow a run: what all such engines share.

`RankWeights` holds one rank's part of the weights, and swaps it with the other ranks. An engine's
own folder says when a swap may happen there, and how tokens and cached prefixes are labeled.
"""
