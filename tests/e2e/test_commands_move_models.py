"""Publish, pull and relay as separate processes, killed in between."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltawire.cli.main import main
from deltawire.wire.signing import Ed25519Signer

ROWS, COLUMNS = 256, 512


def write_checkpoint(path: Path, step: int) -> Path:
    """A directory of one BF16 matrix, of which about one in a hundred changes a step."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 16, ROWS * COLUMNS, np.uint16)
    for _ in range(step):
        bits[rng.integers(0, bits.size, bits.size // 100)] ^= 1
    entry = {"dtype": "BF16", "shape": [ROWS, COLUMNS], "data_offsets": [0, bits.nbytes]}
    text = json.dumps({"__metadata__": {"format": "pt"}, "weight": entry}).encode()
    path.mkdir(parents=True)
    data = len(text).to_bytes(8, "little") + text + bits.tobytes()
    (path / "model.safetensors").write_bytes(data)
    (path / "config.json").write_text(json.dumps({"step": step}))
    return path


def files_in(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def shown_in(link: Path) -> dict[str, bytes]:
    """The files that a pulled directory shows. ``deltawire pull`` keeps the version that it shows
    and one more, so a slow reader must look where the link points afterwards."""
    while True:
        target = link.resolve()
        try:
            found = files_in(target)
        except FileNotFoundError:
            continue
        if link.resolve() == target:
            return found


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_publish_pull_and_relay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [write_checkpoint(tmp_path / f"step-{n}", n) for n in range(4)]
    run, copy, out = (str(tmp_path / name) for name in ("run", "copy", "out"))
    names = [str(path) for path in paths]
    assert main(["publish", *names, "--to", run, "--dry-run", "--json"]) == 0
    assert [row["state"] for row in rows(capsys.readouterr().out)] == ["planned"] * 4
    assert not Path(run).exists()
    assert main(["publish", *names[:2], "--to", run, "--json"]) == 0
    assert main(["publish", *names, "--to", run, "--json"]) == 0
    found = rows(capsys.readouterr().out)
    assert [row["state"] for row in found] == ["published"] * 2 + ["there"] * 2 + ["published"] * 2
    assert found[-1]["delta_bytes"] < found[-1]["model_bytes"] / 50
    assert main(["relay", run, copy, "--start", "0", "--json"]) == 0
    assert [row["version"] for row in rows(capsys.readouterr().out)] == [0, 1, 2, 3]
    assert main(["pull", copy, out, "--version", "1", "--json"]) == 0
    assert files_in(Path(out)) == files_in(paths[1])
    assert main(["pull", copy, out, "--json"]) == 0
    assert files_in(Path(out)) == files_in(paths[3])
    pulled = rows(capsys.readouterr().out)
    assert [(row["base"], row["version"]) for row in pulled] == [(None, 1), (1, 3)]
    assert main(["fsck", copy]) == 0
    assert main(["pull", copy, out, "--version", "9"]) == 3
    assert "there is no such version" in capsys.readouterr().err


def test_a_signed_run_through_the_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keygen", str(tmp_path / "key")]) == 0
    public_key = capsys.readouterr().out.strip()
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    path = write_checkpoint(tmp_path / "step-0", 0)
    run, copy, out = (str(tmp_path / name) for name in ("run", "copy", "out"))
    key = ["--public-key", public_key]
    assert main(["publish", str(path), "--to", run, "--key", str(tmp_path / "key")]) == 0
    assert main(["publish", str(path), "--to", run]) == 2
    assert "pass its private key" in capsys.readouterr().err
    assert main(["relay", run, copy, *key]) == 0
    assert main(["pull", copy, out, *key]) == 0
    assert files_in(Path(out)) == files_in(path)
    assert main(["pull", copy, out, "--public-key", "0" * 64]) == 3


def test_a_key_is_never_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "key"
    assert main(["keygen", str(path), "--json"]) == 0
    shown, secret = json.loads(capsys.readouterr().out), path.read_bytes()
    assert Ed25519Signer.read(path).public_key == shown["public_key"]
    assert secret.strip().decode() not in json.dumps(shown)
    assert main(["keygen", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert path.read_bytes() == secret
    assert main(["keygen", str(tmp_path / "none" / "key")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_operators_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    run = str(tmp_path / "run")
    for arguments in (
        ["publish", "--to", run],
        ["publish", str(tmp_path / "none"), "--to", run],
        ["publish", str(tmp_path / "empty"), "--to", run],
        ["publish", "--to", run, "--watch", str(tmp_path / "empty"), "--key", "/none"],
        ["pull", str(tmp_path / "empty"), str(tmp_path / "out")],
        ["pull", str(tmp_path / "none"), str(tmp_path / "out")],
        ["pull", run, str(tmp_path / "out"), "--follow", "--version", "1"],
        ["relay", str(tmp_path / "empty"), str(tmp_path / "copy")],
    ):
        assert main(arguments) == 2, arguments
        assert capsys.readouterr().err.count("\n") == 1, arguments


@pytest.mark.parametrize(
    "arguments",
    [
        ["pull", "run", "out", "--version", "-1"],
        ["relay", "run", "copy", "--start", "-1"],
        ["relay", "run", "copy", "--grace", "-1"],
        ["relay", "run", "copy", "--grace", "nan"],
        ["publish", "step-0", "--to", "run", "--retain", "-1"],
        ["publish", "step-0", "--to", "run", "--anchor-every", "x"],
        ["publish", "step-0", "--to", "run", "--threads", "0"],
        ["log", "run", "--last", "0"],
    ],
    ids=lambda arguments: " ".join(arguments[-2:]),
)
def test_numbers_that_mean_nothing_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert f"argument {arguments[-2]}" in capsys.readouterr().err


def test_a_run_is_not_relayed_onto_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    path = write_checkpoint(tmp_path / "step-0", 0)
    assert main(["publish", str(path), "--to", str(run), "--compaction-strides", "3,5"]) == 2
    assert "not multiples of each other" in capsys.readouterr().err
    assert main(["publish", str(path), "--to", str(run)]) == 0
    assert main(["relay", str(run), str(tmp_path / "x" / ".." / "run")]) == 2
    assert main(["relay", str(run), f"file://{run}"]) == 2
    assert "the same bucket" in capsys.readouterr().err


def command(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "deltawire", *arguments, "--json"], stdout=subprocess.DEVNULL
    )


def test_watching_relaying_and_pulling_killed_again_and_again(tmp_path: Path) -> None:
    """Four processes over a folder that grows; each is killed at random; what the directory shows
    is whole at every look, and in the end the newest."""
    chance = random.Random(7)
    watched, run, copy, out = (tmp_path / name for name in ("w", "run", "copy", "out"))
    watched.mkdir()
    copy.mkdir()
    first = write_checkpoint(watched / "step-0", 0)
    assert main(["publish", str(first), "--to", str(run)]) == 0
    commands = {
        "publish": ["publish", "--to", str(run), "--watch", str(watched), "--settle", "0.2"],
        "relay": ["relay", str(run), str(copy), "--follow", "--start", "0"],
        "pull": ["pull", str(copy), str(out), "--follow"],
    }
    assert main(["relay", str(run), str(copy)]) == 0
    running = {name: command(*arguments) for name, arguments in commands.items()}
    whole = [files_in(first)]
    try:
        for step in range(1, 5):
            whole.append(files_in(write_checkpoint(watched / f"step-{step}", step)))
            time.sleep(chance.random() * 2)
            name = chance.choice(sorted(commands))
            running[name].kill()
            running[name].wait()
            if out.exists():
                assert shown_in(out) in whole
            running[name] = command(*commands[name])
        deadline = time.monotonic() + 120
        while not out.exists() or shown_in(out) != whole[-1]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    assert main(["fsck", str(run)]) == 0
    assert main(["fsck", str(copy)]) == 0
