"""No module, class, function, parameter, field, option or key has a name that was replaced.

Each word below was a private or ambiguous name once; its replacement is the field's term. A word
counts where it stands as a part of a name: ``fold_strides`` has ``fold``, ``scaffold`` has not.
"""

import ast
import collections
import re
from pathlib import Path

from deltawire.cli.main import build_parser
from deltawire.config import flatten, parse_config
from deltawire.wire import keys

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "deltawire"
SOURCES = sorted(PACKAGE.rglob("*.py"))

OLD = {
    "announced": "manifest follower",
    "annex": "commit metadata",
    "believed": "a name for what it means",
    "boundary": "retention floor",
    "brood": "orphan tracker",
    "cell": "chunk",
    "cells": "chunks",
    "conductor": "swap controller",
    "desk": "credit issuer",
    "driven": "agent harness",
    "fold": "compaction, compacted delta",
    "folding": "compaction",
    "folds": "compacted deltas",
    "heart": "heartbeat",
    "leftovers": "orphans",
    "liaison": "trainer link",
    "look": "poll, check",
    "mend": "repair",
    "mix": "drop bias",
    "outside": "vllm policy engine",
    "owned": "a name for what it means",
    "plain": "unpacked",
    "pool": "rollout buffer",
    "pooled": "buffered",
    "pulse": "heartbeat",
    "reach": "route finder",
    "redo": "recompute",
    "redone": "recomputed",
    "remade": "postprocess check",
    "retire": "prune",
    "retired": "pruned",
    "roster": "object cache",
    "say": "report, log",
    "series": "checkpoint publisher",
    "survey": "route finder",
    "sweep": "deletion intent",
    "sweeps": "deletion intents",
    "swept": "deleted",
    "tell": "report, log",
    "tenure": "lease",
    "vigil": "watchdog",
    "warming": "warm start",
    "watched": "checkpoint watcher",
    "watchman": "watchdog",
}
"""Old word → what is used instead."""

EXCEPTIONS = {
    "config/thinking.py:tell": "the key that tells a model its budget",
    "config/thinking.py:tell_as": "the key that tells a model its budget",
    "dashboard/series.py:Series": "a series of points over time",
    "dashboard/series.py:series": "a series of points over time",
    "placement/kernels.py:outside": "positions outside a storage",
    "placement/moves.py:OUTSIDE": "positions outside a storage",
    "placement/tracing.py:_look_up": "the verb look up",
    "plan/activations.py:boundary": "the boundary of checkpointed layers",
    "plan/architecture.py:outside": "parameters outside the layers",
    "plan/step_time.py:COMPRESSED_REACH": "how far compressed attention reaches",
    "reward_monitor/watch.py:LOOK_BACK": "a look-back window",
    "runtime/trusted.py:owned_run": "the run that a key owns",
    "watch/api.py:WatchedRuns": "runs that a page of deltawire watch shows",
    "watch/api.py:_series": "a series of points over time",
    "dashboard/live.py:plain_line": "text without escapes",
    "launch/session.py:plain": "the option --plain: lines instead of a live view",
    "launch/watching.py:plain": "the option --plain: lines instead of a live view",
    "option:run --plain": "lines instead of a live view",
    "option:midtrain --plain": "lines instead of a live view",
    "sync/follow/fetch.py:pool": "a pool of threads",
}
"""``file:name`` → why the word is right there. `mix` in code of the digest is a local variable."""


def parts(name):
    """The lower-case words of a snake_case, kebab-case or CamelCase name."""
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    return {part for part in re.split(r"[^A-Za-z]+", spaced.lower()) if part}


def defined(path):
    """Every name that a file defines: itself, classes, functions, parameters, fields, constants."""
    found = {path.stem}
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.arg):
            found.add(node.arg)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    for node in tree.body:
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def old_names(names, place):
    """Those of the names that have an old word, but for the exceptions."""
    return {
        f"{place}:{name}: {word} is {OLD[word]}"
        for name in names
        for word in parts(name) & OLD.keys()
        if f"{place}:{name}" not in EXCEPTIONS
    }


def test_no_definition_has_an_old_name():
    found = [old_names(defined(path), path.relative_to(PACKAGE).as_posix()) for path in SOURCES]
    assert len(found) > 500
    assert not set().union(*found)


def test_no_folder_has_an_old_name():
    folders = {path.name for path in PACKAGE.rglob("*") if path.is_dir()}
    assert len(folders) > 20
    assert not old_names(folders, "folder")


def test_no_option_has_an_old_name():
    commands = next(
        action.choices for action in build_parser()._actions if isinstance(action.choices, dict)
    )
    options = {
        f"{name} {option}"
        for name, parser in commands.items()
        for action in parser._actions
        for option in action.option_strings
    }
    assert len(options) > 60
    assert not old_names(options, "option")


def test_no_key_of_the_configuration_or_the_bucket_has_an_old_name():
    config = flatten(parse_config({"name": "r", "model": {"build": {}}}, source="test"))
    assert len(config) > 60
    assert not old_names(config, "key")
    prefixes = [value for name, value in vars(keys).items() if name.isupper()]
    assert len(prefixes) > 5
    assert not old_names([value for value in prefixes if isinstance(value, str)], "object")


def test_every_exception_is_still_needed():
    places = {
        f"{path.relative_to(PACKAGE).as_posix()}:{name}"
        for path in SOURCES
        if path.relative_to(PACKAGE).as_posix() in {place.split(":")[0] for place in EXCEPTIONS}
        for name in defined(path)
    }
    missing = {place for place in EXCEPTIONS if not place.startswith("option:")} - places
    assert not missing


def test_no_class_name_occurs_twice():
    places = collections.defaultdict(list)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(PACKAGE).as_posix())
    assert len(places) > 300
    twice = {name: found for name, found in places.items() if len(found) > 1}
    # The callback of each framework has one name: users import it from that framework's module.
    assert twice == {"Publish": ["rllib.py", "trl/callback.py"]}
