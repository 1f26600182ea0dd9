"""The promises of the whole package: light imports, its layers, its size, its flags, no pickle."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltawire.cli.main import build_parser

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for room in ("src", "benchmarks") for path in (ROOT / room).rglob("*.py"))
HEAVY = ("torch", "transformers", "reasoning_gym", "matplotlib", "vllm", "sglang")

LONG_MODULES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
"""Exceptions to the limits below, each with its reason."""

TRUST = {"--public-key", "--max-age", "--allow-rollback"}
FLAGS = {
    "init": {
        "--model",
        "--task",
        "--reward",
        "--on",
        "--mode",
        "--name",
        "--versions",
        "--max-tokens",
        "--yes",
        "--json",
    },
    "completion": set(),
    "doctor": {"--conformance", "--json"},
    "midtrain": {
        "--out",
        "--bucket",
        "--seed",
        "--shape",
        "--max-hours",
        "--max-dollars",
        "--hourly-dollars",
        "--notify",
        "--key",
        "--allow-rollback",
        "--plain",
        "--json",
    },
    "run": {
        "--out",
        "--bucket",
        "--seed",
        "--engine",
        "--shape",
        "--launcher",
        "--all",
        "--dry-run",
        "--max-hours",
        "--max-dollars",
        "--hourly-dollars",
        "--notify",
        "--key",
        "--allow-rollback",
        "--plain",
        "--json",
    },
    "worker": TRUST | {"--key", "--id", "--patience", "--supervised", "--cpus"},
    "trainer": TRUST
    | {
        "--key",
        "--config",
        "--model",
        "--seed",
        "--engine",
        "--shape",
        "--supervised",
        "--cpus",
    },
    "reference": TRUST | {"--key", "--supervised", "--cpus"},
    "evaluator": TRUST | {"--key", "--supervised", "--cpus"},
    "warm-start": TRUST | {"--key", "--cpus", "--out", "--bucket", "--seed", "--supervised"},
    "report": TRUST | {"--out", "--json"},
    "publish": {
        "--to",
        "--watch",
        "--settle",
        "--files",
        "--idle",
        "--name",
        "--anchor-every",
        "--anchor-share",
        "--retain",
        "--grace",
        "--backwards",
        "--dry-run",
        "--compaction-strides",
        "--key",
        "--threads",
        "--json",
    },
    "prune": TRUST | {"--retain", "--grace", "--dry-run", "--key", "--json"},
    "pull": TRUST
    | {
        "--version",
        "--follow",
        "--no-report",
        "--precision",
        "--adapter",
        "--verify",
        "--threads",
        "--json",
    },
    "pack": {"--format", "--out", "--layers", "--json"},
    "merge": TRUST | {"--version", "--min-kept", "--json"},
    "relay": TRUST
    | {
        "--follow",
        "--no-report",
        "--precision",
        "--start",
        "--keep-all",
        "--grace",
        "--compaction-strides",
        "--key",
        "--threads",
        "--json",
    },
    "keygen": {"--json"},
    "grant": {"--key", "--revoke", "--json"},
    "export": TRUST | {"--version", "--base", "--json"},
    "import": set(),
    "learner": TRUST | {"--id", "--key", "--supervised", "--cpus"},
    "live": TRUST
    | {
        "--version",
        "--upstream",
        "--reason",
        "--by",
        "--once",
        "--again",
        "--gate",
        "--gate-margin",
        "--gate-timeout",
        "--webhook",
        "--webhook-secret-file",
        "--share",
        "--effect",
        "--rate",
        "--key",
        "--json",
        "--secret",
        "--without-gateway",
        "--gateway-key",
        "--wait",
    },
    "forget": TRUST
    | {"--secret", "--without-gateway", "--learner-key", "--no-learner", "--no-trainer"}
    | {"--rebuild", "--key", "--json"},
    "simulate": {"--out", "--seconds", "--rate", "--requests", "--dry-run", "--seed", "--json"},
    "replica": TRUST | {"--host", "--port", "--token-file", "--hold", "--cpus", "--precision"},
    "gateway": TRUST
    | {
        "--key",
        "--secret",
        "--model-name",
        "--clients",
        "--upstream",
        "--upstream-model",
        "--upstream-key-file",
        "--capture-header",
        "--capture-users",
        "--capture-share",
        "--redact",
        "--redact-failure",
        "--keep-text",
        "--state",
        "--spool-mb",
        "--feedback-per-minute",
        "--feedback-per-day",
        "--webhook-secret-file",
        "--log-format",
        "--cors-origin",
        "--filter-request",
        "--filter-answer",
        "--filter-key-file",
        "--filter-failure",
        "--judge",
        "--judge-key-file",
        "--judge-share",
        "--replica",
        "--replicas-file",
        "--replicas-dns",
        "--host",
        "--port",
        "--token-file",
        "--admin-token-file",
        "--tls-cert",
        "--tls-key",
        "--transition",
        "--drain",
        "--first-token-s",
        "--silence-s",
        "--whole-answer-s",
        "--model",
    },
    "tinker": {
        "--model",
        "--name",
        "--parameters",
        "--frozen-head",
        "--stable-reinforce",
        "--host",
        "--port",
        "--token-file",
        "--tls-cert",
        "--tls-key",
        "--models",
        "--samplers",
        "--slots",
        "--context",
        "--checkpoint-every",
        "--ranks",
    },
    "fsck": TRUST | {"--quick", "--json"},
    "log": TRUST | {"--last", "--graph", "--json"},
    "bench": set(),
    "probes": TRUST | {"--json", "--live"},
    "rollouts": TRUST
    | {
        "--version",
        "--task",
        "--family",
        "--worker",
        "--min-reward",
        "--max-reward",
        "--search",
        "--group",
        "--failed",
        "--cause",
        "--count",
        "--json",
    },
    "metrics": TRUST
    | {
        "--host",
        "--port",
        "--token-file",
        "--no-token",
        "--every",
        "--window",
        "--to",
        "--out",
        "--project",
        "--offline",
    },
    "shapes": {
        "--on",
        "--mode",
        "--context",
        "--lora-rank",
        "--lora-experts",
        "--packing",
        "--optimizer",
        "--checkpointing",
        "--offload",
        "--startable",
        "--accelerators",
        "--out",
        "--published",
        "--json",
    },
    "plan": TRUST | {"--rates", "--what-if", "--simulate", "--seed", "--plot", "--json"},
    "bisect": TRUST
    | {"--good", "--bad", "--noisy", "--serve", "--error", "--questions", "--state", "--json"},
    "why": TRUST | {"--on", "--probe", "--layer", "--every", "--steps", "--json"},
    "tag": TRUST | {"--delete", "--key", "--json"},
    "fork": TRUST | {"--set", "--to", "--key", "--json"},
    "rescore": TRUST | {"--reward", "--from", "--to", "--to-run", "--json"},
    "show": TRUST | {"--json"},
    "diff": TRUST
    | {"--answers", "--on", "--prompts", "--seeds", "--max-tokens", "--page", "--json"},
    "compare": TRUST | {"--error", "--among", "--json"},
    "dataset": TRUST | {"--to", "--first", "--last", "--json"},
    "prove": TRUST | {"--out", "--derived", "--key", "--json"},
    "verify-training": TRUST | {"--spot", "--proof", "--signed-by", "--json"},
    "replay": TRUST | {"--from", "--to", "--dump", "--out", "--json"},
    "alive": TRUST | {"--silence", "--json"},
    "status": TRUST | {"--watch", "--every", "--json", "--window"},
    "budget": TRUST | {"--json"},
    "forecast": TRUST | {"--of", "--compute", "--from", "--like", "--plot", "--json"},
    "watch": TRUST | {"--port", "--no-browser", "--cache"},
    "attest": TRUST
    | {"--against", "--also", "--watch", "--token-file", "--prometheus", "--no-report", "--json"}
    | {"--black-box", "--error", "--model", "--prompts"},
    "parity": TRUST
    | {
        "--version",
        "--left",
        "--right",
        "--prompts",
        "--count",
        "--length",
        "--tokens",
        "--seed",
        "--device",
        "--layers",
        "--tolerance",
        "--replay",
        "--limit",
        "--dump",
        "--also",
        "--plot",
        "--json",
    },
}


def loaded_by(code: str) -> set[str]:
    listing = "import sys; print(*sorted(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\n{listing}"], capture_output=True, text=True, check=True
    )
    return {name.split(".")[0] for name in result.stdout.splitlines()[-1].split()}


@pytest.mark.parametrize(
    "module",
    [
        "deltawire",
        "deltawire.sync",
        "deltawire.codec",
        "deltawire.attest",
        "deltawire.launch.session",
    ],
)
def test_importing_loads_nothing_heavy(module: str) -> None:
    assert not loaded_by(f"import {module}") & set(HEAVY)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import contextlib, io\nfrom deltawire.cli.main import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "    main(['--help'])"
    )
    assert not loaded_by(code) & {*HEAVY, "numpy", "obstore", "rich", "msgspec"}


def test_help_loads_few_modules() -> None:
    """Importing takes nearly all of its time; `scripts/check_wheel.py` measures that."""
    code = (
        "import contextlib, io, sys\nfrom deltawire.cli.main import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "    main(['--help'])\n"
        "print(len(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True
    )
    assert int(result.stdout) < 250


def with_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A command's parser and those of its actions."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from with_actions(below)


def test_flags_are_those_that_were_agreed() -> None:
    commands = next(
        action.choices for action in build_parser()._actions if isinstance(action.choices, dict)
    )
    flags = {
        name: {
            option
            for one in with_actions(parser)
            for action in one._actions
            for option in action.option_strings
            if option.startswith("--") and option != "--help"
        }
        for name, parser in commands.items()
    }
    assert flags == FLAGS


@pytest.mark.parametrize("command", FLAGS)
def test_a_command_needs_only_its_own_parser(command: str) -> None:
    (parsers,) = (
        action.choices
        for action in build_parser(command)._actions
        if isinstance(action.choices, dict)
    )
    assert list(parsers) == [command]


def too_long(name: str, text: str) -> list[str]:
    """A module's name if it is too long, and those of its functions that are."""
    lines = len(text.splitlines())
    found = [name] if lines > 600 and name not in LONG_MODULES else []
    # Most modules need not be parsed: a function is no longer than its module.
    for node in ast.walk(ast.parse(text)) if lines > 70 else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > 70 and f"{name}:{node.name}" not in LONG_FUNCTIONS:
                found.append(f"{name}:{node.name}")
    return found


def test_modules_and_functions_stay_short() -> None:
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in SOURCES}
    assert len(texts) > 500
    assert not [one for name, text in texts.items() for one in too_long(name, text)]


def test_a_long_function_and_a_long_module_are_found() -> None:
    long = "def f():\n" + "    pass\n" * 70
    assert too_long("a.py", long) == ["a.py:f"]
    assert not too_long("a.py", long.removesuffix("    pass\n"))
    assert too_long("a.py", "x = 1\n" * 601) == ["a.py"]


# A store to test against has to listen somewhere; these do, on loopback.
LISTENERS = {"proxy.py", "s3_server.py"}
UNIX_SOCKETS = {"hosted.py"}
"""Modules that listen on a socket in a folder which only this user can enter."""


FORBIDDEN = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "socketserver"}
LISTENS = {"listen_on", "bind", "create_server", "start_server"}
NEEDS_PARSING = re.compile("|".join([*sorted(FORBIDDEN | LISTENS), r"torch\s*\.\s*(?:load|save)"]))


def pickles_and_sockets(name: str, text: str) -> list[str]:
    """Names the imports and calls of a module that run what they read, or listen."""
    room, _, base = name.rpartition("/")
    may_listen = room.endswith("/testing") and base in LISTENERS
    found = [f"{name}: 0.0.0.0"] if may_listen and "0.0.0.0" in text else []
    may_listen = may_listen or (base in UNIX_SOCKETS and "AF_UNIX" in text)
    for node in ast.walk(ast.parse(text)) if NEEDS_PARSING.search(text) else ():
        words: set[str] = set()
        if isinstance(node, ast.Import):
            words = {alias.name.split(".")[0] for alias in node.names} & FORBIDDEN
        if isinstance(node, ast.ImportFrom):
            words = {(node.module or "").split(".")[0]} & FORBIDDEN
        if isinstance(node, ast.Attribute):
            words = set() if may_listen else {node.attr} & LISTENS
            if isinstance(node.value, ast.Name) and node.value.id == "torch":
                words |= {node.attr} & {"load", "save"}  # They pickle.
        found += [f"{name}: {word}" for word in sorted(words)]
    return found


def test_no_pickle_and_no_socket() -> None:
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in SOURCES}
    assert len(texts) > 500
    assert not [one for name, text in texts.items() for one in pickles_and_sockets(name, text)]


@pytest.mark.parametrize(
    "text",
    ["import pickle", "from dill import loads", "import marshal as m", "socket.bind(a)",
     "asyncio.start_server(f)", "torch.load(path)", "torch . save(a, b)"],
)  # fmt: skip
def test_a_pickle_and_a_socket_are_found(text: str) -> None:
    assert pickles_and_sockets("src/deltawire/a.py", text)
    assert not pickles_and_sockets("src/deltawire/a.py", "import json\nself.load(a)")


def test_every_path_in_the_architecture_exists() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = set(
        re.findall(r"`((?:src|benchmarks|native|docs|tests|examples|scripts)/[\w./-]*)`", text)
    )
    assert len(named) > 20
    assert not [path for path in sorted(named) if not (ROOT / path).exists()]
    modules = (ROOT / "src" / "deltawire").rglob("*.py")
    rooms = {path.parent.relative_to(ROOT).as_posix() + "/" for path in modules}
    assert not sorted(room for room in rooms if not any(one.startswith(room) for one in named))
    assert len(text.splitlines()) <= 120
