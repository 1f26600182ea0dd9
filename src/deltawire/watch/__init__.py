"""A local web page over any number of runs: what they do now, and what they did.

The page reads buckets and writes nothing to them. `server` answers requests, `api` computes what
they ask for from the states that `run_reader` keeps of each run, and ``static/`` is the page.
"""
