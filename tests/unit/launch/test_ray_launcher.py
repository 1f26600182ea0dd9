"""A run's demands on a Ray cluster, and the actor's side of a child, without a cluster."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltawire.cli.main import main
from deltawire.config import parse_config
from deltawire.errors import InputError
from deltawire.launch import ray_launcher
from deltawire.launch.ray_launcher import (
    KEY_FILE,
    LOST,
    RayRanks,
    _Host,
    _is_forwarded,
    bundles_of,
    without_key,
)


def test_every_process_has_a_bundle_and_gpus_only_where_there_are_some() -> None:
    raw: dict[str, Any] = {
        "name": "x",
        "threads": 3,
        "rollout": {"workers": 2},
        "reference": {"mode": "process", "device": "cpu"},
        "train": {"loss": {"kl": "k2"}},
    }
    config = parse_config(raw, source="test")
    assert list(bundles_of(config, gpus=False)) == [
        "trainer",
        "w0",
        "w1",
        "reference",
        "evaluator",
    ]
    with_gpus = bundles_of(config, gpus=True)
    assert with_gpus["trainer"] == {"CPU": 3.0, "GPU": 1.0}
    assert with_gpus["reference"] == {"CPU": 3.0}, "its device is the CPU"
    assert all("GPU" not in bundle for bundle in bundles_of(config, gpus=False).values())
    ranks = parse_config({**raw, "train": {**raw["train"], "ranks": 4}}, source="test")
    bundles = bundles_of(ranks, gpus=True)
    places = ["trainer", "trainer.1", "trainer.2", "trainer.3"]
    assert [name for name in bundles if name.startswith("trainer")] == places
    assert all(bundles[name] == {"CPU": 3.0, "GPU": 1.0} for name in places)
    assert bundles_of(ranks, gpus=True)["w0"] == {"CPU": 3.0, "GPU": 1.0}
    quiet = parse_config({**raw, "evaluate": {"every": 0}}, source="test")
    assert "evaluator" not in bundles_of(quiet, gpus=False)


def test_settings_are_passed_on_and_credentials_are_not() -> None:
    """Each variable of the program is in one of both lists, also one that is new."""
    source = Path(ray_launcher.__file__).parents[1]
    texts = [path.read_text(encoding="utf-8") for path in source.rglob("*.py")]
    names = {name for text in texts for name in re.findall(r"\bDELTAWIRE_[A-Z_]+", text)}
    kept = {
        *(
            "DELTAWIRE_TOKEN",
            "DELTAWIRE_ADMIN_TOKEN",
            "DELTAWIRE_REPLICA_KEY",
            "DELTAWIRE_UPSTREAM_KEY_",
        ),
        "DELTAWIRE_UPSTREAM_KEY_NAME",
        *("DELTAWIRE_EPISODE", "DELTAWIRE_EPISODE_KEY_", "DELTAWIRE_RUN", "DELTAWIRE_LIVE_SECRET"),
        *("DELTAWIRE_VERSION", "DELTAWIRE_VERSION_DIR"),
        # Those of another framework's loop, which deltawire starts no process of.
        *("DELTAWIRE_ATTEST", "DELTAWIRE_CHECK_EVERY", "DELTAWIRE_DIGEST", "DELTAWIRE_ON_MISMATCH"),
        *("DELTAWIRE_EVENT", "DELTAWIRE_REASON", "DELTAWIRE_FOLLOW", "DELTAWIRE_URL"),
    }
    assert {name for name in names if not _is_forwarded(name)} <= kept
    for name in (
        *kept,
        "AWS_SECRET_ACCESS_KEY",
        "VLLM_API_KEY",
        "HF_TOKEN",
        "DELTAWIRE_EPISODE_KEY_1",
    ):
        assert not _is_forwarded(name)


@pytest.fixture
def host() -> Iterator[_Host]:
    made = _Host()
    yield made
    made.kill()


def command(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def drain(host: _Host) -> tuple[bytes, int]:
    data, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        more, code = host.output(1.0)
        data += more
        if code is not None:
            return data, code
    pytest.fail("the child did not end")


def test_output_and_exit_code_are_carried(host: _Host) -> None:
    code = (
        "import os, sys; print('out', os.environ['MARK']); sys.stderr.write('err\\n'); sys.exit(7)"
    )
    assert host.start(command(code), {"MARK": "here"}, "/nowhere") > 0
    data, exit_code = drain(host)
    assert sorted(data.splitlines()) == [b"err", b"out here"]
    assert exit_code == 7


def test_a_child_is_asked_to_stop_and_its_group_is_killed(host: _Host) -> None:
    code = (
        "import signal, subprocess, sys, time\n"
        "nested = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
        "print(nested.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    host.start(command(code), {}, ".")
    nested = b""
    while not nested.endswith(b"\n"):
        nested += host.output(1.0)[0]
    host.stop()
    assert drain(host)[1] == 3
    deadline = time.monotonic() + 60
    while _runs(int(nested)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(int(nested)), "what the child left was killed"


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_killed_child_has_the_signal_as_its_code(host: _Host) -> None:
    pid = host.start(command("import time; time.sleep(600)"), {}, ".")
    os.kill(pid, signal.SIGKILL)
    assert drain(host)[1] == -signal.SIGKILL


def test_an_endless_output_takes_bounded_memory(host: _Host, monkeypatch) -> None:
    monkeypatch.setattr(ray_launcher, "MAX_OUTPUT", 1 << 17)
    host.start(command("import sys; sys.stdout.write('x' * (1 << 20) + 'end')"), {}, ".")
    deadline = time.monotonic() + 60
    while host._code is None and time.monotonic() < deadline:
        time.sleep(0.02)
    data, _ = drain(host)
    assert len(data) <= (1 << 17) + (1 << 16)
    assert data.endswith(b"end")


def test_without_ray_the_error_says_what_to_install(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    config = tmp_path / "run.toml"
    config.write_text('name = "x"\n[model.build]\nlayers = 1\n')
    start = ["run", str(config), "--out", str(tmp_path / "out"), "--launcher", "ray"]
    assert main(start) == 2
    assert "pip install 'deltawire[ray]'" in capsys.readouterr().err
    with pytest.raises(InputError, match="needs the package ray"):
        ray_launcher._ray()


def test_a_key_goes_to_a_private_file_of_the_childs_machine(host: _Host, tmp_path) -> None:
    (tmp_path / "w0.key").write_bytes(b"a private key")
    code = (
        "import os, pathlib, stat, sys; path = pathlib.Path(sys.argv[2])\n"
        "mode, folder = (stat.S_IMODE(os.stat(p).st_mode) for p in (path, path.parent))\n"
        "print(path, path.read_text() == 'a private key', oct(mode), oct(folder))\n"
    )
    asked = [*command(code), "--key", str(tmp_path / "w0.key")]
    words, key = without_key(asked)
    assert words == [*asked[:-1], KEY_FILE]
    assert str(tmp_path) not in " ".join(words)
    host.start(words, {}, ".", key)
    data, code_ = drain(host)
    path, *found = data.decode().split()
    assert (code_, found) == (0, ["True", "0o600", "0o700"])
    assert not Path(path).exists(), "it is gone with the child"
    assert without_key(command("pass")) == (command("pass"), b"")


class _Child:
    """A rank that ends when it is told to."""

    def __init__(self) -> None:
        self.returncode: int | None = None
        self.pid = 7
        self.stopped = False

    def ended(self) -> bool:
        return self.returncode is not None

    def ask_to_stop(self) -> None:
        self.stopped = True

    def kill(self) -> None:
        self.returncode = LOST


def _ranks(count: int) -> tuple[RayRanks, list[Any]]:
    made: RayRanks = object.__new__(RayRanks)
    children: list[Any] = [_Child() for _ in range(count)]
    made.children, made.returncode, made._failed = children, None, None
    return made, children


def test_the_first_rank_that_fails_ends_the_others_and_gives_the_exit_code() -> None:
    ranks, children = _ranks(3)
    assert not ranks.ended()
    assert ranks.pid == 7
    children[1].returncode = 2
    assert not ranks.ended(), "the others are killed, and end by the next look"
    assert ranks.ended()
    assert ranks.returncode == 2
    assert [one.returncode for one in children] == [LOST, 2, LOST]


def test_ranks_end_in_order_together() -> None:
    ranks, children = _ranks(2)
    ranks.ask_to_stop()
    assert all(one.stopped for one in children)
    children[0].returncode = 0
    assert not ranks.ended()
    children[1].returncode = 0
    assert ranks.ended()
    assert ranks.returncode == 0
