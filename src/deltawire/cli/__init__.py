"""The command line: thin commands over the layers below, each loading only what it needs."""

COMMANDS = (
    "init",
    "doctor",
    "run",
    "midtrain",
    "worker",
    "trainer",
    "evaluator",
    "reference",
    "warm_start",
    "publish",
    "prune",
    "pull",
    "merge",
    "pack",
    "relay",
    "export",
    "import_",
    "keygen",
    "grant",
    "gateway",
    "replica",
    "learner",
    "live",
    "forget",
    "simulate",
    "tinker",
    "report",
    "fsck",
    "log",
    "parity",
    "bench",
    "status",
    "watch",
    "forecast",
    "budget",
    "replay",
    "probes",
    "rollouts",
    "metrics",
    "shapes",
    "plan",
    "completion",
)
"""One module here for each command, in the order of the help.

To add a command, write a module with ``add_parser(commands)`` and name it here. ``add_parser`` sets
``call`` to a function that takes the parsed arguments and returns the exit code, and that imports
what it needs when it is called, so that ``deltawire --help`` stays quick.
"""
