"""Starts and watches jobs: a whole run, one process of it, transfers, exporters.

The functions here do what the commands promise, take plain parameters, and know no argparse.
"""
