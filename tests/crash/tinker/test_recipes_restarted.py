"""The cookbook's own recipes, unmodified, against a server that is killed in the middle.

Needs an environment with tinker-cookbook; `make drills` runs it where there is one.
"""

import time

import pytest
from tinker_recipes import figures, make_everything, start_recipe
from tinker_serving import PATIENCE_S, ServerProcess

from deltawire.store import open_bucket
from deltawire.sync.maintain.fsck import check_run

pytest.importorskip("tinker_cookbook.recipes.math_rl", reason="tinker-cookbook is not installed")
pytestmark = pytest.mark.drills

STEPS = 12


def finish(recipe, server, log, *, kill_at):
    """Waits for a recipe, and kills the server once; returns the recipe's figures."""
    deadline, killed = time.monotonic() + 2 * PATIENCE_S, False
    try:
        while recipe.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
            if not killed and len(figures(log)) >= kill_at:
                server.kill()
                server.start()
                killed = True
    finally:
        recipe.kill()
        recipe.wait()
    assert killed
    assert recipe.returncode == 0, log.with_suffix(".txt").read_text()[-2000:]
    return figures(log)


def test_a_supervised_start_and_reinforcement_survive_a_kill(tmp_path):
    model = make_everything(tmp_path, conversations=64 * STEPS)
    server = ServerProcess(tmp_path / "bucket", model, "--context", "128").start()
    try:
        supervised = finish(
            start_recipe(
                "chat_sl", server.url, tmp_path, tmp_path / "sl", "dataset=sums.jsonl",
                "batch_size=64", "learning_rate=5e-3", "save_every=0",
            ),
            server, tmp_path / "sl", kill_at=STEPS // 2,
        )  # fmt: skip
        assert supervised[-1]["train_mean_nll"] < supervised[0]["train_mean_nll"] / 2
        lines = (tmp_path / "sl" / "checkpoints.jsonl").read_text().splitlines()
        path = lines[-1].partition('"state_path": "')[2].partition('"')[0]
        reinforced = finish(
            start_recipe(
                "math_rl", server.url, tmp_path, tmp_path / "rl", "env=arithmetic",
                "loss_fn=importance_sampling", "group_size=8", "groups_per_batch=8",
                "max_tokens=6", f"max_steps={STEPS}", "save_every=0", "learning_rate=1e-3",
                f"load_checkpoint_path={path}",
            ),
            server, tmp_path / "rl", kill_at=STEPS // 2,
        )  # fmt: skip
    finally:
        server.kill()
    rewards = [one["env/all/reward/total"] for one in reinforced if "env/all/reward/total" in one]
    assert sum(rewards[-3:]) > sum(rewards[:3])
    for one in reinforced:
        assert abs(one.get("optim/kl_sample_train_v1", 0.0)) < 1e-6
    for run in (tmp_path / "bucket", *(tmp_path / "bucket" / "models").iterdir()):
        found = check_run(open_bucket(str(run)))
        assert found.whole, found.faults
