"""The clients that deltawire is tested with: the one source of the table in docs/CLIENTS.md.

`scripts/client_table.py` runs the tests of each and stores in ``ran.json`` what passed, at which
release, and when; it then writes the table. A client that must be read from its source is pinned by
repository, commit and the date on which that commit was checked.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FOLDER = Path(__file__).parent
TESTS = FOLDER.parent
RAN = FOLDER / "ran.json"
DOCUMENT = TESTS.parent / "docs" / "CLIENTS.md"
BEGIN = "<!-- clients: written by scripts/client_table.py -->"
END = "<!-- end of clients -->"


@dataclass(frozen=True, kw_only=True)
class Client:
    """A client, the ``tests`` that run it (paths below tests/), and what they use of it. ``named``
    selects those of a shared file by a part of their names.

    ``package`` is its distribution, whose release is stored with a result. A client without one was
    read in ``repository`` at ``commit``, checked on the day ``checked``. ``against`` says what the
    tests run: the client's own package or module, or calls and files of ours, made as its code
    makes them.
    """

    name: str
    against: Literal["its own code", "our imitation"]
    uses: str
    tests: tuple[str, ...]
    named: str = ""
    package: str = ""
    repository: str = ""
    commit: str = ""
    checked: str = ""


CLIENTS = (
    Client(
        name="TRL and Hugging Face trainers",
        package="trl",
        against="its own code",
        uses="SFTTrainer, GRPOTrainer, LoRA, resuming, with the callback",
        tests=("unit/trl/test_trl_publish.py",),
    ),
    Client(
        name="PEFT",
        package="peft",
        against="its own code",
        uses="its directories, written here and loaded there and the other way, with equal logits",
        tests=("compat/export/test_peft_directories.py",),
    ),
    Client(
        name="Tinker's SDK and command line",
        package="tinker",
        against="its own code",
        uses="every verb, refusals, REST client, `tinker run list`",
        tests=("unit/tinker/test_tinker_client.py",),
    ),
    Client(
        name="Tinker's cookbook",
        package="tinker-cookbook",
        against="its own code",
        uses="chat_sl and math_rl, with a server that is killed",
        tests=("crash/tinker/test_recipes_restarted.py",),
    ),
    Client(
        name="openai",
        package="openai",
        against="its own code",
        uses="chat, completions, streams, tools, choices, seeds, errors",
        tests=("unit/chat/openai/test_chat_endpoint.py", "unit/chat/openai/test_chat_choices.py"),
    ),
    Client(
        name="verifiers",
        package="verifiers",
        against="its own code",
        uses="a taskset and a harness, in its own process",
        tests=("unit/envs/test_verifiers_tasks.py",),
    ),
    Client(
        name="Ray RLlib",
        package="ray",
        against="its own code",
        uses="PPO, with the callback",
        tests=("e2e/test_rllib_publish.py",),
    ),
    Client(
        name="verl",
        package="verl",
        against="its own code",
        uses="its manager of checkpoint engines, worker groups, rollout workers, on CPUs",
        tests=("clients/test_verl_itself.py",),
    ),
    Client(
        name="verl, by its calls",
        repository="volcengine/verl",
        commit="1dda039",
        checked="2026-11-22",
        against="our imitation",
        uses="its calls of a checkpoint engine, with a double of its registry",
        tests=("unit/test_verl_engine.py",),
    ),
    Client(
        name="slime",
        repository="THUDM/slime",
        commit="624b824",
        checked="2026-11-28",
        against="its own code",
        uses="its update by disk, its writer and its loader of both hooks, without Megatron",
        tests=("clients/test_slime_itself.py",),
    ),
    Client(
        name="slime, by its calls",
        repository="THUDM/slime",
        commit="624b824",
        checked="2026-11-22",
        against="our imitation",
        uses="its hook's arguments and folders",
        tests=("unit/test_slime_hook.py",),
    ),
    Client(
        name="TRL, attested",
        package="trl",
        against="its own code",
        uses="its transfer to vLLM in one process and to a server, with an engine of ours",
        tests=("unit/integrations/test_trl_check.py",),
    ),
    Client(
        name="verl, attested",
        package="verl",
        against="its own code",
        uses="its configuration, manager and worker groups on CPUs, with a server of ours and "
        "`vllm serve`",
        tests=("clients/test_verl_attested.py",),
    ),
    Client(
        name="Megatron, attested",
        package="megatron-core",
        against="its own code",
        uses="Megatron Bridge 0.3.1: its names, and how it gathers tensor-parallel shards, on CPUs "
        "with a stand-in for transformer_engine",
        tests=("clients/test_megatron_attested.py",),
    ),
    Client(
        name="SkyRL, attested",
        repository="NovaSky-AI/SkyRL",
        commit="a956457",
        checked="2026-11-29",
        against="our imitation",
        uses="its dispatch of weight updates, its actors, its servers' `/collective_rpc`",
        named="skyrl",
        tests=("unit/integrations/test_ray_loops.py",),
    ),
    Client(
        name="NeMo-RL, attested",
        repository="NVIDIA-NeMo/RL",
        commit="7ea279a",
        checked="2026-11-29",
        against="our imitation",
        uses="its refit, its groups of workers",
        named="nemo_rl",
        tests=("unit/integrations/test_ray_loops.py",),
    ),
    Client(
        name="AReaL, attested",
        repository="inclusionAI/AReaL",
        commit="4aef98d",
        checked="2026-11-29",
        against="our imitation",
        uses="the update of its FSDP engine, the addresses of its servers",
        named="areal",
        tests=("unit/integrations/test_http_loops.py",),
    ),
    Client(
        name="prime-rl, attested",
        repository="PrimeIntellect-ai/prime-rl",
        commit="559b447",
        checked="2026-11-29",
        against="our imitation",
        uses="its pool of inference servers, its folders of broadcasts",
        named="prime_rl",
        tests=("unit/integrations/test_http_loops.py",),
    ),
    Client(
        name="slime, attested by its calls",
        repository="THUDM/slime",
        commit="624b824",
        checked="2026-11-29",
        against="our imitation",
        uses="its hook's arguments and folders, the addresses of its engines",
        named="slime",
        tests=("unit/integrations/test_http_loops.py",),
    ),
    Client(
        name="prime-rl",
        repository="PrimeIntellect-ai/prime-rl",
        commit="559b447",
        checked="2026-11-22",
        against="our imitation",
        uses="its folders of broadcasts",
        named="prime_rl",
        tests=("unit/sync/huggingface/test_watched_trainers.py",),
    ),
    Client(
        name="SkyRL",
        repository="NovaSky-AI/SkyRL",
        commit="a956457",
        checked="2026-11-22",
        against="our imitation",
        uses="its folders of exports",
        named="skyrl",
        tests=("unit/sync/huggingface/test_watched_trainers.py",),
    ),
)
"""In the order of the table."""


def release_of(client: Client) -> str:
    """Returns the installed release of a client's package; empty without a package. Raises
    `importlib.metadata.PackageNotFoundError` if it, or the source that would run, is not there."""
    if client.package:
        return importlib.metadata.version(client.package)
    if client.against == "its own code" and importlib.util.find_spec(client.name) is None:
        raise importlib.metadata.PackageNotFoundError(client.name)
    return ""


def run(client: Client) -> tuple[int, str]:
    """Runs the tests of a client in a process of their own; returns how many passed, and the end
    of the output if one did not."""
    paths = [str(TESTS / one) for one in client.tests]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", *paths]
    command += ["-k", client.named] if client.named else []
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=TESTS.parent)
    passed = re.search(r"(\d+) passed", done.stdout)
    if done.returncode or passed is None:
        return 0, f"{done.stdout[-3000:]}{done.stderr[-1000:]}"
    return int(passed[1]), ""


def table(clients: tuple[Client, ...], ran: dict[str, dict[str, str]]) -> str:
    """Returns the table of what ran, at which release, against what, and when."""
    lines = [
        "| client | release | ran against | what is used of it | ran |",
        "|---|---|---|---|---|",
    ]
    for client in clients:
        result = ran.get(client.name, {})
        where = f"{client.package} {result.get('release', '')}".strip()
        if not client.package:
            where = f"{client.repository} at `{client.commit}`, read on {client.checked}"
        count = "1 test" if result.get("passed") == "1" else f"{result.get('passed')} tests"
        outcome = f"{count} on {result['date']}" if result else "not yet"
        lines.append(f"| {client.name} | {where} | {client.against} | {client.uses} | {outcome} |")
    return "\n".join(lines)


def stored() -> dict[str, dict[str, str]]:
    """Returns the last results, by the names of clients."""
    found: dict[str, dict[str, str]] = json.loads(RAN.read_text())
    return found


def in_document(text: str, rows: str) -> str:
    """Returns a document with ``rows`` between the two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{rows}\n\n{END}{after}"
