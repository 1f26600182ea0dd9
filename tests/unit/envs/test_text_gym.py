"""Text environments of SkyRL-Gym and Gymnasium."""

import asyncio
import json
from pathlib import Path

import pytest
from scripted_agent import play, played

from deltawire.config import DataConfig, TaskConfig
from deltawire.config.machine import POLICY, TRUSTED
from deltawire.envs import open_tasks
from deltawire.envs.registry import require_tasks
from deltawire.errors import InputError

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/text_gym"
PEERS = ROOT / ".venv-skyrl-gym/bin/python"


def tasks_of(data=None, **options):
    config = TaskConfig(environment="text_gym", heldout=2, options=options, data=data)
    return open_tasks(config, seed=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "task.options of text_gym"),
        ({"id": "module:Name-v0"}, "task.options of text_gym"),
        ({"id": "a", "kind": "other"}, "task.options of text_gym"),
        ({"id": "a"}, "module skyrl_gym, which this machine does not trust"),
        ({"id": "a", "kind": "gymnasium", "modules": ["mine"]}, "module mine, which this machine"),
    ],
)
def test_wrong_options_and_untrusted_modules_are_refused(monkeypatch, options, message):
    monkeypatch.setenv(TRUSTED, "gymnasium")
    with pytest.raises(InputError, match=message):
        tasks_of(**options)
    with pytest.raises(InputError, match=message):
        require_tasks(TaskConfig(environment="text_gym", options=options))


def test_skyrl_gym_needs_rows(monkeypatch):
    monkeypatch.setenv(TRUSTED, "skyrl_gym")
    with pytest.raises(InputError, match="need rows"):
        tasks_of(id="gsm8k")


def test_gymnasium_plays_the_example(monkeypatch, byte_tokenizer):
    """Seeds are tasks, observations are texts, and a number is an action where actions are."""
    pytest.importorskip("gymnasium", reason="gymnasium comes with ray[rllib] only")
    monkeypatch.setenv(TRUSTED, "gymnasium,guess_gym")
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE))
    tasks = tasks_of(
        id="Guess-v0", kind="gymnasium", modules=["guess_gym"], prompt="Guess.", probes=["guesses"]
    )
    assert [task.data for task in tasks.heldout()] == [0, 1]
    assert min(tasks.draw("w", n).data for n in range(50)) >= 2
    said = ["hello", *map(str, range(9))]
    episode, text = play(tasks.open(tasks.heldout()[1]), byte_tokenizer, *said, max_turns=12)
    assert episode.cause == ""
    assert episode.trajectory.reward == 1.0
    assert text.startswith("Guess.I think of a number from 0 to 8.")
    assert "error: 'hello' is no action" in text
    assert "larger" in text
    assert episode.trajectory.probes == {"guesses": episode.trajectory.turns - 1}
    episode, _ = play(tasks.open(tasks.heldout()[1]), byte_tokenizer, "hello", max_turns=2)
    assert (episode.cause, episode.trajectory.probes) == ("", {}), (
        "what the model does fails nothing"
    )


@pytest.mark.drills
def test_the_package_skyrl_gym_plays_rows(monkeypatch, tmp_path, byte_tokenizer):
    if not PEERS.exists():
        pytest.skip("no .venv-skyrl-gym: sh scripts/peer_environments.sh skyrl-gym makes it")
    policy = tmp_path / "policy.toml"
    policy.write_text(f'interpreters = {{ skyrl_gym = "{PEERS}" }}')
    monkeypatch.setenv(POLICY, str(policy))
    monkeypatch.setenv(TRUSTED, "skyrl_gym")
    monkeypatch.setenv("DELTAWIRE_DATA_DIRS", str(EXAMPLE))
    data = DataConfig(path=str(EXAMPLE / "sums.jsonl"), messages="prompt")
    answer = json.loads((EXAMPLE / "sums.jsonl").read_text().splitlines()[0])
    assert set(answer) == {"prompt", "reward_spec", "max_turns"}

    async def every():
        once, often = tasks_of(data, id="gsm8k"), tasks_of(data, id="gsm8k_multi_turn")
        task = once.heldout()[0]
        right = f"#### {task.data['reward_spec']['ground_truth']}"
        return [
            await played(once.open(task), byte_tokenizer, right),
            await played(once.open(task), byte_tokenizer, "#### 0"),
            await played(often.open(task), byte_tokenizer, "#### 0", "hm", right),
        ]

    found = asyncio.run(every())
    assert [episode.cause for episode, _ in found] == ["", "", ""]
    rewards = [episode.trajectory.reward for episode, _ in found]
    assert rewards[:2] == [1.0, 0.0]
    assert rewards[2] == pytest.approx(1.0 + 0.2 / 3)
    assert "tentative numeric answer" in found[2][1]
