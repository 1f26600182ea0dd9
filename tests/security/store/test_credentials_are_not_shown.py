"""Credentials in URLs are refused, and credentials in settings are shown nowhere."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import types
from pathlib import Path

import pytest
from rich.console import Console

from deltawire.cli.main import build_parser, main
from deltawire.config import parse_config
from deltawire.dashboard.report import write_report
from deltawire.dashboard.state import RunState
from deltawire.display import REDACTED, has_credentials, looks_secret, redact
from deltawire.errors import InputError
from deltawire.events import Life
from deltawire.launch.branches.fork_copy import check_place
from deltawire.launch.metrics import Destination, forward_metrics
from deltawire.launch.watching import Watcher, summary_of
from deltawire.runtime.supervisor import Child, Supervisor
from deltawire.store import open_bucket
from deltawire.sync import create_run
from deltawire.wire import keys
from deltawire.wire.objects import encode_json
from deltawire.wire.run import Run, TensorSpec
from deltawire.wire.status import TrainerStatus

EXAMPLES = Path(__file__).parents[3] / "examples"
SECRET = "hunter2hunter2"
URLS = [
    f"s3://user:{SECRET}@bucket/prefix",
    f"s3://{SECRET}@bucket/prefix",
    f"s3://user:{SECRET}/with-a-slash@bucket",
    f"s3:/user:{SECRET}@bucket",
    f"S3://user:{SECRET}@bucket",
    f"gs://user:{SECRET}@bucket",
    f"https://user:{SECRET}@bucket",
    f"abfss://container:{SECRET}@account.dfs.core.windows.net/run",
    f"az://container/run?sv=2024&sig={SECRET}",
    f"az://container/run?sv=2024;SIG={SECRET}",
    f"s3://bucket/run?X-Amz-Signature={SECRET}",
    f"s3://bucket/run?X%2DAmz%2DSecurity%2DToken={SECRET}",
    f"s3://bucket/run?region=x&AWSAccessKeyId={SECRET}",
    f"s3://bucket/run#secret_access_key={SECRET}",
    f"s3://[bucket/run?password={SECRET}",
    f"s3://user%3A{SECRET}%40bucket/run",
    f"s3:\\\\user:{SECRET}@bucket\\run",
]
COMMANDS = [
    ["status"],
    ["log"],
    ["fsck"],
    ["probes"],
    ["worker"],
    ["replay"],
    ["pull", "{}", "elsewhere"],
    ["relay", "{}", "elsewhere"],
    ["run", "{config}", "--bucket"],
    ["fork", "{bucket}", "name", "--to", "{}/forks/other"],
]


@pytest.mark.parametrize("url", URLS)
def test_a_bucket_url_with_credentials_is_refused_without_repeating_them(url) -> None:
    with pytest.raises(InputError) as caught:
        open_bucket(url)
    assert SECRET not in f"{caught.value} {caught.value.__dict__}"
    assert "environment" in str(caught.value) or "unknown scheme" in str(caught.value)


@pytest.mark.parametrize("url", URLS)
def test_the_place_of_a_fork_is_not_repeated_with_its_credentials(url, tmp_path) -> None:
    with pytest.raises(InputError) as caught:
        check_place(open_bucket(str(tmp_path)), f"{url}/forks/other")
    assert SECRET not in f"{caught.value} {caught.value.__dict__}"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_no_command_repeats_the_credentials_of_a_url(command, tmp_path, capfd) -> None:
    config = tmp_path / "config.toml"
    config.write_text('name = "demo"\n[task]\n')
    url = URLS[0]
    bucket = open_bucket(str(tmp_path / "run"), create=True)
    create_run(bucket, Run(id="5e" * 16, name="demo", created_at=0.0, digest="0" * 32, tensors=[]))
    words = [word.format(url, config=config, bucket=f"{bucket.url}@0") for word in command]
    words += [] if any(url in word for word in words) else [url]
    if command[0] == "run":
        words += ["--out", str(tmp_path / "out")]
    try:
        code = main(words)
    except SystemExit as stopped:
        code = stopped.code
    captured = capfd.readouterr()
    assert code == 2
    assert captured.err
    assert SECRET not in captured.out + captured.err


WITHOUT_A_URL = {"bench", "shapes"}


def _positionals(parser):
    return [one for one in parser._actions if not one.option_strings and one.nargs != 0]


def _commands():
    for action in build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def test_every_command_refuses_a_url_with_credentials_in_every_place(
    tmp_path, capfd, monkeypatch
) -> None:
    """Also where a path belongs: a path of a URL has one slash less."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = tmp_path / "config.toml"
    config.write_text('name = "demo"\n[task]\n')
    tried = set()
    for name, parser in _commands():
        if name in WITHOUT_A_URL:
            continue
        needed = [one for one in parser._actions if one.option_strings and one.required]
        places = [*_positionals(parser), *needed]
        for place in places:
            words = [name]
            for one in places:
                text = str(config) if "config" in one.dest else str(tmp_path / "none")
                words += [*one.option_strings[-1:], URLS[0] if one is place else text]
            with contextlib.suppress(SystemExit):
                assert main(words) == 2, words
            captured = capfd.readouterr()
            assert SECRET not in captured.out + captured.err, words
            tried.add(name)
    assert {"run", "midtrain", "reference", "rollouts", "grant", "gateway", "publish"} <= tried


@pytest.mark.parametrize("command", ["trainer", "relay"])
def test_a_url_in_the_place_of_a_key_is_not_repeated(command, tmp_path, capfd) -> None:
    words = [command, *[str(tmp_path / "none")] * (1 + (command == "relay")), "--key", URLS[0]]
    assert main(words) == 2
    captured = capfd.readouterr()
    assert "cannot read the key" in captured.err
    assert SECRET not in captured.err


def test_a_wrong_argument_is_not_repeated_with_its_credentials(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["status", "folder", URLS[0]])
    assert SECRET not in capsys.readouterr().err


@pytest.mark.parametrize(
    "url", ["abfss://container@account.dfs.core.windows.net/run", "s3://bucket/a@b", "s3://b/r"]
)
def test_urls_without_credentials_are_still_opened(url) -> None:
    assert not has_credentials(url)


def test_an_option_of_a_store_is_not_in_its_error() -> None:
    with pytest.raises(InputError) as caught:
        open_bucket("s3://bucket/run", secret_access_key=SECRET, no_such_option=SECRET)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("api_key", True),
        ("apiKey", True),
        ("OPENAI_API_KEY", True),
        ("aws_secret_access_key", True),
        ("hub_token", True),
        ("password", True),
        ("AWSAccessKeyId", True),
        ("max_tokens", False),
        ("public_key", False),
        ("token_file", False),
        ("api_key_var", False),
        ("keyboard", False),
        ("monkey", False),
        ("KeyError", False),
        ("learning_rate", False),
    ],
)
def test_which_names_look_like_keys(name, secret) -> None:
    assert looks_secret(name) is secret


def test_nested_settings_and_text_are_redacted_and_the_rest_is_kept() -> None:
    settings = {
        "model": {"path": "models/tiny", "lr": 0.1},
        "task": {"options": {"judge": [{"api_key": SECRET, "max_tokens": 5}], "keys": ["a"]}},
        "command": ["serve", f"--api-key {SECRET}", f"--hub-token={SECRET}"],
        "note": f"see https://user:{SECRET}@host/x?sig={SECRET}&page=2",
        "form": "hf_" + "a" * 30,
        "flag": True,
        "token": "",
    }
    found = redact(settings)
    assert SECRET not in json.dumps(found)
    assert found["model"] == settings["model"]
    assert found["flag"] is True
    assert found["form"] == REDACTED
    assert found["task"]["options"]["judge"] == [{"api_key": REDACTED, "max_tokens": 5}]
    assert found["note"] == f"see https://{REDACTED}@host/x?sig={REDACTED}&page=2"
    assert f"judge at x?token={SECRET}" not in redact(f"judge at x?token={SECRET}")


CONFIG = {
    "name": "demo",
    "task": {
        "environment": "deltawire.envs.reasoning",
        "options": {"judge_api_key": SECRET, "size": 3},
    },
}


def test_the_configuration_in_reports_is_redacted(tmp_path) -> None:
    config = parse_config(CONFIG, source="test")
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    watcher = Watcher(config, bucket, Console(), plain=True)
    write_report(summary_of(config, bucket, watcher, []), RunState(), tmp_path)
    for name in ("report.json", "report.html"):
        text = (tmp_path / name).read_text()
        assert SECRET not in text
        assert "judge_api_key" in text
        assert "redacted" in text


def test_a_dry_run_shows_the_configuration_redacted(tmp_path, capsys, monkeypatch) -> None:
    # The dataset has no such option; environments that have one are not opened.
    monkeypatch.setattr("deltawire.envs.registry.open_tasks", lambda task, *, seed: None)
    text = (EXAMPLES / "bench_loop.toml").read_text()
    options = f'options = {{ min_word_len = 3, judge_api_key = "{SECRET}"'
    (tmp_path / "config.toml").write_text(text.replace("options = { min_word_len = 3", options))
    for more in ([], ["--json"]):
        assert main(["run", str(tmp_path / "config.toml"), "--dry-run", *more]) == 0
        shown = capsys.readouterr().out
        assert SECRET not in shown
        assert "judge_api_key" in shown


def test_trackers_get_the_configuration_redacted(tmp_path, monkeypatch) -> None:
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    run = Run(
        id="ab" * 16,
        name="demo",
        created_at=1.0,
        tensors=[TensorSpec("a", (2,), "BF16")],
        digest="0" * 32,
        config=CONFIG,
    )
    create_run(bucket, run)
    status = TrainerStatus(
        phase="finished", epoch=1, version=0, digest="0" * 32, credits={}, at=1.0
    )
    bucket.put(keys.TRAINER, encode_json(status))
    given: dict = {}
    fake = types.ModuleType("trackio")
    fake.init = lambda **settings: given.update(settings)
    fake.finish = lambda: None
    monkeypatch.setitem(sys.modules, "trackio", fake)
    forward_metrics(str(tmp_path / "bucket"), Destination(kind="trackio"))
    assert given["config"]["task"]["options"] == {"judge_api_key": REDACTED, "size": 3}
    assert SECRET not in str(given)


def test_events_and_errors_hold_no_credentials(tmp_path) -> None:
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    (tmp_path / "logs").mkdir()
    supervisor = Supervisor(bucket, tmp_path / "logs")
    child = Child("worker-0", "worker", [])
    supervisor._record(child, "died", f"judge https://me:{SECRET}@host refused --token {SECRET}")
    supervisor.stop()
    stored = b"".join(bucket.get(key, limit=1 << 20) for key in bucket.list(keys.EVENTS))
    assert Life.__struct_config__.tag.encode() in stored
    assert SECRET.encode() not in stored
    error = InputError(f"cannot reach https://me:{SECRET}@host", hint=f"api_key={SECRET}")
    assert SECRET not in str(error)
    console = Console()
    with console.capture() as capture:
        console.print(str(error), markup=False)
    assert SECRET not in capture.get()


@pytest.mark.parametrize(
    "hint",
    [
        "give --key or --state DIR",
        "set --admin-token-file, or give --token FILE",
        "use --key with the key that the run's owner granted",
        "omit --key for an unsigned run",
        "give --learner-key NAME=FILE.",
    ],
)
def test_sentences_about_options_are_not_redacted(hint) -> None:
    """A hint once read: give --key [redacted] --state DIR."""
    assert redact(hint) == hint


def test_a_value_after_an_option_is_redacted_whatever_its_case() -> None:
    for value in (SECRET, SECRET.upper(), "ORAND", "File", "ofthe"):
        assert value not in redact(f"deltawire run --key {value} or")
