"""Runs the command blocks of the README and the tutorial, in order, in an empty environment.

    .venv/bin/python scripts/first_hour.py --limit 900

The environment holds a wheel of this checkout with the extras that the documents name, and nothing
else; the folder holds what a checkout has for ``make demo``. Commands are run as they are written.
Only these differ from a user's first hour: runs are small (`SMALLER`), ``s3://bucket`` is a server
on a loopback port, `prepare` makes what the documents take for granted, and commands that run until
they are interrupted (`run_command`) are, once they have done what they promise. The first command
that fails ends the script with its output. Every process is ended by its id at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from documents import Block, blocks, commands  # noqa: E402

DOCUMENTS = ("README.md", "docs/TUTORIAL.md")
SKIPPED = {
    "make real": "runs for half an hour; .ci/run fetches its model, and tests take its first steps",
    "make test": "runs for many minutes, and is what calls this script",
}
LONG_RUN = """
deltawire init spoiled.toml --yes
sed -i 's/^versions = 100/versions = 86/' spoiled.toml
deltawire run spoiled.toml
sed -i 's/^versions = 86/versions = 87/; \
s/learning_rate = 0.0003/learning_rate = 0.03/' spoiled.toml
sed -i 's/^versions = 87/versions = 120/; \
s/learning_rate = 0.03/learning_rate = 0.0003/' spoiled.toml
deltawire bisect runs/spoiled/bucket --good 40 --bad 120 --noisy --serve -- python ask.py
deltawire show runs/spoiled/bucket@87
deltawire diff runs/spoiled/bucket@86 runs/spoiled/bucket@87 --answers --page diff.html
deltawire why runs/spoiled/bucket@80..95 --on answers.jsonl
deltawire fork runs/spoiled/bucket@86 repaired
mkdir runs/repaired
cp -r runs/spoiled/model runs/spoiled/warm_start.json runs/repaired/
deltawire run spoiled.toml --bucket runs/spoiled/bucket/forks/repaired --out runs/repaired
deltawire log runs/spoiled/bucket --graph
deltawire compare runs/spoiled/bucket runs/spoiled/bucket/forks/repaired
deltawire tag runs/spoiled/bucket/forks/repaired good
deltawire rescore runs/spoiled/bucket --reward stricter.py --from 88 --to 92 --to-run stricter
deltawire diff runs/spoiled/bucket@92 runs/spoiled/bucket/forks/stricter@92 --on answers.jsonl
"""
"""Commands on a run of 120 versions, which is made by hand: tests/unit/launch/branches and
tests/crash/rl run the same commands. Here those of deltawire are parsed."""
SKIPPED |= dict.fromkeys(LONG_RUN.strip().splitlines(), "parsed only: needs a run of 120 versions")
SMALLER = {
    "versions": "2",
    "max_steps": "4",
    "heldout": "4",
    "group_size": "4",
    "groups_per_step": "2",
    "max_tokens": "8",
    "every": "2",
    "samples": "1",
}
"""Settings of a run that are replaced before it starts, so that it takes seconds."""
CHECKOUT = [
    "Makefile",
    "pyproject.toml",
    "CMakeLists.txt",
    "native",
    "scripts/setup.sh",
    "examples",
]
STOP_WITHIN_S = 60.0
FOLLOWED_FOR_S = 5.0
"""How long a reader follows a run at least: its directory may be up to date at the start."""
INTERRUPTED = (0, 130)
"""Exit codes of a command that was interrupted."""


class FirstHourError(Exception):
    """A documented command did not do what the document says."""


@dataclass
class Hour:
    """The state of the user's terminals: a folder, the environment, and what runs in it."""

    home: Path
    deadline: float
    environment: dict[str, str]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    logs: dict[str, Path] = field(default_factory=dict)

    def left(self) -> float:
        """Seconds until the limit; raises `FirstHourError` once there are none."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise FirstHourError("the limit of this script is reached; LIMIT sets another")
        return left

    def start(self, words: list[str]) -> str:
        """Starts a command with its own log; returns its name in `running`."""
        name = f"{len(self.logs)}: {shlex.join(words)}"
        self.logs[name] = self.home / f"log-{len(self.logs)}"
        with self.logs[name].open("wb") as log:
            self.running[name] = subprocess.Popen(  # noqa: S603 - what the documents say
                words,
                cwd=self.home,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return name

    def finish(self, name: str, *, allowed: tuple[int, ...] = (0,)) -> None:
        """Waits for a command; raises `FirstHourError` with its output unless it succeeds."""
        process = self.running[name]
        try:
            code = process.wait(timeout=self.left())
        except subprocess.TimeoutExpired as error:
            raise FirstHourError(f"{name}: not done at the limit\n{self.output(name)}") from error
        del self.running[name]
        if code not in allowed:
            raise FirstHourError(f"{name}: exit code {code}\n{self.output(name)}")

    def run(self, words: list[str]) -> None:
        """Runs a command to its end."""
        self.finish(self.start(words))

    def run_until(self, words: list[str], done: Callable[[str], bool]) -> None:
        """Runs a command until ``done`` holds of its output, and interrupts it."""
        name = self.start(words)
        self.await_(name, lambda: done(self.output(name)))
        self.interrupt(name)

    def await_(self, name: str, done: Callable[[], bool]) -> None:
        """Waits until ``done`` holds, while a command runs."""
        while not done():
            if self.running[name].poll() is not None:
                raise FirstHourError(f"{name}: ended early\n{self.output(name)}")
            if time.monotonic() > self.deadline:
                raise FirstHourError(f"{name}: not done at the limit\n{self.output(name)}")
            time.sleep(0.2)

    def interrupt(self, name: str) -> None:
        """Interrupts a command as Ctrl-C does, and waits for its end."""
        os.killpg(self.running[name].pid, signal.SIGINT)
        self.finish(name, allowed=INTERRUPTED)

    def output(self, name: str) -> str:
        """The end of what a command printed."""
        return self.logs[name].read_text(errors="replace")[-4000:]

    def close(self) -> None:
        """Ends whatever still runs, with its children."""
        for process in self.running.values():
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, number)
                    process.wait(timeout=STOP_WITHIN_S)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    continue
        self.running.clear()


def main() -> int:
    """Builds the wheel, makes the environment, runs the documents."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit", type=float, default=900.0, metavar="S")
    parser.add_argument("--wheel", type=Path, help="a wheel that is built already")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="first-hour-") as folder:
        hour = Hour(Path(folder), time.monotonic() + given.limit, dict(os.environ))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            install(hour, given.wheel)
            with s3_server(hour):
                run_documents(hour)
        except FirstHourError as error:
            sys.stderr.write(f"first hour: FAILED: {error}\n")
            return 1
        finally:
            hour.close()
    say("every command of the README and the tutorial works")
    return 0


def say(text: str) -> None:
    """Prints a line at once."""
    sys.stdout.write(f"first hour: {text}\n")
    sys.stdout.flush()


def build_wheel(hour: Hour) -> Path:
    """Builds a wheel of this checkout, with the tools and the objects that ``make setup`` left."""
    say("building the wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    if importlib.util.find_spec("scikit_build_core") and importlib.util.find_spec("nanobind"):
        pip.append("--no-build-isolation")
    hour.run([*pip, "--wheel-dir", str(hour.home / "wheels"), str(ROOT)])
    (wheel,) = (hour.home / "wheels").glob("*.whl")
    return wheel


def install(hour: Hour, wheel: Path | None) -> None:
    """Makes the environment as the documents say, with the wheel in place of the published one.

    PyTorch is its CPU build where that can be had, as in ``scripts/setup.sh``.
    """
    wheel = wheel or build_wheel(hour)
    hour.run([sys.executable, "-m", "venv", str(hour.home / ".venv")])
    locked = hour.home / "constraints.txt"
    locked.write_text("\n".join(locks()))
    told = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.constraint"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    given = os.environ.get("PIP_CONSTRAINT", told)
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME"):
        hour.environment.pop(name, None)
    hour.environment |= {
        "PATH": f"{hour.home}/.venv/bin:{os.environ['PATH']}",
        "PIP_CONSTRAINT": f"{given} {locked}".strip(),
        "PIP_COMPILE": "0",  # Few of the modules are imported; Python compiles these then.
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "XDG_CACHE_HOME": str(hour.home / "cache"),
        "PIP_CACHE_DIR": os.environ.get("PIP_CACHE_DIR", str(Path.home() / ".cache" / "pip")),
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
    }
    install_torch(hour)
    hour.run(["pip", "install", "--quiet", "--no-deps", str(wheel)])  # Then it is not looked for.
    for block in documented("sh"):
        for command in commands(block.text):
            if command[:2] == ["pip", "install"]:  # Prerequisites of both documents.
                say(shlex.join(command))
                hour.run(command)
    imitate_checkout(hour.home)


def locks() -> Iterator[str]:
    """The locked versions, where the lock fits; without hashes, since the wheel has none."""
    fits = (sys.version_info[:2], sys.platform, os.uname().machine) == ((3, 11), "linux", "x86_64")
    for name in ("core", "rl") if fits else ():
        for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines():
            if not line.startswith("#"):
                yield line.split(" ")[0]


def install_torch(hour: Hour) -> None:
    """Installs PyTorch's CPU build, or leaves the choice to pip where there is none."""
    text = (ROOT / "requirements" / "torch.txt").read_text()
    found = re.search(r"^torch==([0-9.]+)", text, re.MULTILINE)
    if found is None or shutil.which("nvidia-smi"):
        return
    name = hour.start(["pip", "install", "--quiet", "--no-deps", f"torch=={found[1]}+cpu"])
    hour.finish(name, allowed=(0, 1))


def imitate_checkout(home: Path) -> None:
    """Copies what ``make demo`` reads, with a demo that is small and an environment that is
    ready."""
    for name in CHECKOUT:
        place = home / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place, ignore=shutil.ignore_patterns("*.whl"))
        else:
            shutil.copy2(ROOT / name, place)
    shrink(home / "examples" / "demo.toml")
    (home / ".venv" / ".ready").touch()


def shrink(path: Path) -> None:
    """Replaces the settings of a run's configuration by `SMALLER`."""
    text = path.read_text()
    for key, value in SMALLER.items():
        text = re.sub(rf"(?m)^{key} = \d+", f"{key} = {value}", text)
    path.write_text(text)


def documented(language: str) -> list[Block]:
    """The blocks of a language in the README, then in the tutorial."""
    places = [ROOT / name for name in DOCUMENTS]
    found = [block for block in blocks(language) if block.path in places]
    return sorted(found, key=lambda block: (places.index(block.path), block.line))


class s3_server:  # noqa: N801 - a context
    """Serves the bucket that the documents name, on a loopback port."""

    def __init__(self, hour: Hour) -> None:
        self._hour = hour

    def __enter__(self) -> None:
        from deltawire.testing.s3_server import S3Server

        self._server = S3Server()
        self._server.make_bucket("bucket")
        self._hour.environment |= self._server.environment

    def __exit__(self, *_: object) -> None:
        self._server.close()


def run_documents(hour: Hour) -> None:
    """Runs every block of both documents, in order."""
    kinds = [*documented("sh"), *documented("python")]
    places = [ROOT / name for name in DOCUMENTS]
    for block in sorted(kinds, key=lambda block: (places.index(block.path), block.line)):
        if block.language == "python":
            run_python(hour, block)
            continue
        for command in commands(block.text):
            started = time.monotonic()
            try:
                told = run_command(hour, command)
            except FirstHourError as error:
                raise FirstHourError(f"{block.place}: {error}") from error
            took = time.monotonic() - started
            say(f"{block.place}: {shlex.join(command)}: {told or f'{took:.0f} s'}")
    for name in list(hour.running):
        hour.finish(name, allowed=INTERRUPTED)


def run_python(hour: Hour, block: Block) -> None:
    """Runs a block, from the file that the text before it names, if it names one."""
    before = "\n".join(block.path.read_text().splitlines()[: block.line - 1])[-300:]
    named = re.search(r"to `(\w+\.py)`:\s*(<!-- run -->\s*)?$", before)
    path = hour.home / (named[1] if named else "block.py")
    path.write_text(block.text)
    try:
        hour.run(["python", str(path)])
    except FirstHourError as error:
        raise FirstHourError(f"{block.place}: {error}") from error
    say(f"{block.place}: python {path.name}")


def run_command(hour: Hour, command: list[str]) -> str:
    """Runs one documented command; returns a remark instead of its time, if there is one."""
    line = shlex.join(command)
    if line in SKIPPED:
        if command[0] == "deltawire":
            check_arguments(command[1:])
        return f"skipped: {SKIPPED[line]}"
    if command[0] == "export":
        hour.environment |= dict(word.split("=", 1) for word in command[1:])
        return "set"
    prepare(hour, command)
    words = command[1:]
    match words:
        case ["demo"]:
            name = hour.start(command)  # The README's next command joins it.
            hour.await_(name, (hour.home / "runs/demo/bucket/run.json").is_file)
            return "started"
        case ["watch", *_]:
            hour.run_until(command, page_is_served)
        case ["publish", "--watch", *_]:
            name = hour.start(command)
            # Steps of a small run may leave its weights as they are: one version, named twice.
            hour.await_(name, lambda: "checkpoint-1: version" in hour.output(name))
            return "published two checkpoints"
        case ["pull", _, folder, "--follow"]:
            began = time.monotonic()
            there = (hour.home / folder / "config.json").is_file
            hour.run_until(command, lambda _: there() and time.monotonic() > began + FOLLOWED_FOR_S)
            stop_publishers(hour)
        case _:
            hour.run(command)
    if words[:1] == ["worker"]:
        finish_runs(hour)
    return ""


def check_arguments(words: list[str]) -> None:
    """Raises `FirstHourError` for arguments that ``deltawire`` would refuse."""
    from deltawire.cli.main import build_parser

    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            build_parser().parse_args(words)
    except SystemExit as error:
        raise FirstHourError(f"deltawire {shlex.join(words)}: {told.getvalue()}") from error


def page_is_served(output: str) -> bool:
    """Asks for the page whose link a command printed."""
    found = re.search(r"http://127\.0\.0\.1:\d+/", output)
    if found is None:
        return False
    with urllib.request.urlopen(found[0], timeout=30) as page:  # noqa: S310 - loopback
        return b"<html" in page.read().lower()


def finish_runs(hour: Hour) -> None:
    """Waits for the runs that a worker has joined."""
    for name in [name for name in hour.running if "make demo" in name]:
        hour.finish(name)


def stop_publishers(hour: Hour) -> None:
    """Interrupts those that watch a folder."""
    for name in [name for name in hour.running if "publish --watch" in name]:
        hour.interrupt(name)


def prepare(hour: Hour, command: list[str]) -> None:
    """Makes runs small, and what a document takes for granted: a model, and checkpoints."""
    words = command[1:]
    if words[:1] == ["run"]:
        shrink(hour.home / words[1])
    elif "models/my-model" in words:
        hour.run(["deltawire", "pull", "runs/demo/bucket", "models/my-model"])
    elif words[:2] == ["publish", "--watch"]:
        for version in (0, 1):
            place = hour.home / words[2] / f"checkpoint-{version}"
            pulled = hour.home / f"pulled-{version}"
            at = ["--version", str(version)]
            hour.run(["deltawire", "pull", "runs/demo/bucket", str(pulled), *at])
            shutil.copytree(pulled, place)


if __name__ == "__main__":
    sys.exit(main())
