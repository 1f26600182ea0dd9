"""``deltawire init`` and ``completion``: what they print and refuse."""

import contextlib
import json
import os
import pty
import subprocess
import sys
import tomllib

import pytest

from deltawire.cli.main import main


def test_json_tells_every_setting(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    assert main(["init", str(path), "--versions", "7", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], found["settings"]["train.versions"]) == ("mine", 7)
    assert tomllib.loads(path.read_text())["name"] == "mine"


def test_what_to_do_next_is_printed_and_a_second_time_is_refused(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    assert main(["init", str(path), "--yes"]) == 0
    assert "--dry-run" in capsys.readouterr().out
    assert main(["init", str(path), "--yes"]) == 2
    assert "exists already" in capsys.readouterr().err


def test_without_the_package_of_a_task_it_names_the_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "deltawire.envs.reasoning", raising=False)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    path = tmp_path / "mine.toml"
    assert main(["init", str(path), "--yes", "--task", "reasoning_gym:nope"]) == 2
    needed = "error: this command needs reasoning_gym; install deltawire[rl]\n"
    assert capsys.readouterr().err == needed
    assert not path.exists()


def test_a_dash_prints_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "-", "--yes"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["name"] == "first"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_options(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "doctor" in script
    assert "conformance" in script


def test_bash_completes_a_command_an_option_and_a_choice(tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)

    def completed(*words):
        line = " ".join(f"'{word}'" for word in words)
        find = "complete -p deltawire | sed 's/.*-F \\([^ ]*\\) .*/\\1/'"
        words_of = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}"
        code = f'source {script}; {words_of}; $({find}); echo "${{COMPREPLY[@]}}"'
        run = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
        return run.stdout.split()

    assert "doctor" in completed("deltawire", "do")
    assert "--conformance" in completed("deltawire", "doctor", "--c")
    assert set(completed("deltawire", "completion", "")) >= {"bash", "fish"}


def test_on_a_terminal_it_asks_for_what_no_option_says(tmp_path):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "deltawire", "init", "mine.toml", "--versions", "9"],
        cwd=tmp_path,
        stdin=theirs,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    # Model, task, reward: an empty line takes the default.
    os.write(ours, b"\nreasoning_gym:leg_counting\n\n")
    shown = b""
    with contextlib.suppress(OSError):  # The terminal is gone once the process has ended.
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    assert process.wait(timeout=120) == 0
    assert shown.count(b"Model:") == 1
    raw = tomllib.loads((tmp_path / "mine.toml").read_text())
    assert (raw["task"]["dataset"], raw["train"]["versions"]) == ("leg_counting", 9)
