"""The command line: thin commands over the layers below, each loading only what it needs."""

GROUPS = {
    "start and run": (
        "init",
        "doctor",
        "run",
        "midtrain",
        "warm_start",
        "trainer",
        "worker",
        "evaluator",
        "reference",
        "tinker",
    ),
    "weights": (
        "publish",
        "pull",
        "relay",
        "prune",
        "merge",
        "pack",
        "export",
        "import_",
        "keygen",
        "grant",
    ),
    "serve users": (
        "gateway",
        "replica",
        "learner",
        "live",
        "forget",
        "simulate",
    ),
    "look": (
        "status",
        "alive",
        "watch",
        "report",
        "log",
        "metrics",
        "rollouts",
        "probes",
        "budget",
        "fsck",
        "replay",
    ),
    "versions of a run": (
        "tag",
        "fork",
        "rescore",
        "show",
        "diff",
        "compare",
        "bisect",
        "why",
        "dataset",
        "prove",
        "verify_training",
    ),
    "plan and measure": (
        "plan",
        "shapes",
        "forecast",
        "parity",
        "attest",
        "bench",
        "completion",
    ),
}
"""One module here for each command, in the groups and the order of the help.

To add a command, write a module with ``add_parser(commands)`` and name it here. ``add_parser`` sets
``call`` to a function that takes the parsed arguments and returns the exit code, and that imports
what it needs when it is called, so that ``deltawire --help`` stays quick.
"""

COMMANDS = tuple(name for names in GROUPS.values() for name in names)
