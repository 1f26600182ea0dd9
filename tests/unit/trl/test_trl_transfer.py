"""TRL's AsyncGRPOTrainer, unmodified, with `Transfer`: engines follow, and nothing is paused."""

import queue
import threading
import time
import types

import numpy as np
import pytest
import torch

pytest.importorskip("trl")

from following_server import FollowingServer
from tiny_trainers import SETTINGS, Recorder, rows, tiny_model, tokenizer

import deltawire
from deltawire import codec
from deltawire.errors import CorruptError, InputError, ResyncError, RetryError
from deltawire.export.models import save_model
from deltawire.store import open_bucket
from deltawire.sync import committed_versions, load_mirror, read_run
from deltawire.trl import Transfer

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


@pytest.fixture
def model_folder(tmp_path):
    save_model(tiny_model(), tokenizer(), tmp_path / "model")
    return str(tmp_path / "model")


def flash_attention(q, k, v, cu_q, cu_k, *_, softmax_scale, causal, **__):
    """Computes what the kernel of TRL's tree attention does, which exists for GPUs only."""
    parts = []
    for i in range(len(cu_q) - 1):
        one = [t.transpose(0, 1) for t in (q[cu_q[i] : cu_q[i + 1]], k[cu_k[i] : cu_k[i + 1]])]
        values = v[cu_k[i] : cu_k[i + 1]].transpose(0, 1)
        assert causal
        rows, columns = one[0].shape[1], one[1].shape[1]
        mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        made = torch.nn.functional.scaled_dot_product_attention(
            *(t[None] for t in one), values[None], attn_mask=mask, scale=softmax_scale,
            enable_gqa=True,
        )  # fmt: skip
        parts.append(made[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture
def trainer_class(monkeypatch):
    """The real trainer; only what needs a GPU is replaced: a kernel, and the name of the device."""
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    kernel = types.SimpleNamespace(flash_attn_varlen_func=flash_attention)
    monkeypatch.setattr(packing, "_flash_attn", lambda: kernel)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    return async_grpo_trainer.AsyncGRPOTrainer


class Rollouts:
    """TRL's protocol of a rollout worker: random completions, and what each update found served."""

    def __init__(self, server):
        self.rollout_buffer, self.metrics_queue = queue.Queue(maxsize=8), queue.Queue()
        self.server, self.served_at = server, {}
        self._version, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._draw, name="rollouts")

    def start(self):
        self._thread.start()

    def stop(self):
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def update_model_version(self, model_version):
        self._version = model_version
        self.served_at[model_version] = self.server.status()

    def check_health(self, stale_after_s):
        pass

    def _draw(self):
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        rng = np.random.default_rng(0)
        for number in range(10**6):
            sample = RolloutSample(
                prompt=[], completion=[],
                input_ids=rng.integers(0, 256, 12), completion_mask=np.array([0] * 4 + [1] * 8),
                old_log_probs=np.full(12, -5.0), advantage=float(rng.normal()),
                model_version=self._version, group_id=number // 2, metrics={},
                enqueued_at=time.time(),
            )  # fmt: skip
            while not self._ended.is_set():
                try:
                    self.rollout_buffer.put(sample, timeout=0.05)
                    break
                except queue.Full:
                    continue
            if self._ended.is_set():
                return


def trainer(trainer_class, folder, model, server, transfer, worker, *callbacks, **settings):
    from trl.experimental.async_grpo import AsyncGRPOConfig

    options = {"max_steps": 3, "learning_rate": 1e-2, **SETTINGS, **settings}
    return trainer_class(
        model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=AsyncGRPOConfig(
            output_dir=str(folder), vllm_server_base_url=server.url, max_staleness=100, **options
        ),
        train_dataset=rows().rename_column("text", "prompt"),
        rollout_worker=worker,
        weight_transfer=transfer,
        callbacks=list(callbacks),
    )


def test_a_run_from_nothing_with_a_server_that_waits_for_it(tmp_path, trainer_class, model_folder):
    """`token_budget` is unset: TRL waits for the server before its first transfer, and the server
    waits for the run."""
    url = str(tmp_path / "run")
    recorder = Recorder()
    with FollowingServer(url) as server:
        assert server.status()["version"] == -1
        worker = Rollouts(server)
        transfer = Transfer(url, server=server.url, model=model_folder, timeout_s=60)
        assert transfer.version == 0
        trainer(
            trainer_class, tmp_path / "out", model_folder, server, transfer, worker, recorder
        ).train()
        assert max(server.health_asked) == 0, "TRL asked before its first transfer"
        bucket = open_bucket(url)
        run = read_run(bucket)
        assert committed_versions(bucket) == [0, 1, 2, 3], "the cold sync is version 0 itself"
        for version in range(4):
            mirror = load_mirror(bucket, run, at=version)
            expected = recorder.at[version]
            assert mirror.tensors.keys() == expected.keys()
            for name, tensor in expected.items():
                assert (codec.bits_of(tensor, "BF16").reshape(-1) == mirror.tensors[name]).all()
            # TRL counts from 1; when it says so, the engine has attested the version.
            status = worker.served_at[version + 1]
            assert (status["version"], status["digest"]) == (version, mirror.digest.hex())
        assert {file.name for file in run.model_files} >= {"config.json", "tokenizer.json"}


def test_a_run_is_continued_without_the_model(tmp_path, model_folder):
    url = str(tmp_path / "run")
    model = tiny_model()
    stream = lambda: ((n, p) for n, p in model.named_parameters())  # noqa: E731
    with FollowingServer(url, follows=False) as server:
        first = Transfer(url, server=server.url, model=model_folder, timeout_s=60)
        first.destroy()
        again = Transfer(url, server=server.url, timeout_s=60)
        again.init_weight_transfer()
        again.pause()
        again.send_weights(stream())
        again.resume()  # A server that does not follow by itself is asked to.
        assert again.version == 0
        assert server.status()["version"] == 0
        with torch.no_grad():
            model.model.norm.weight.add_(1)
        again.send_weights(stream())
        again.resume()
        assert server.served == [0, 1]
        again.destroy()
        again.destroy()
        with pytest.raises(InputError, match="closed"):
            again.send_weights(stream())
        again.init_weight_transfer()
        assert again.version == 1
        again.destroy()


def test_experts_are_sent_under_the_names_of_checkpoints(tmp_path):
    from deltawire.config import BuildConfig
    from deltawire.train.build import build_model

    sizes = BuildConfig(
        family="qwen3_moe", experts=4, hidden_size=32, layers=2, head_size=16,
        feed_forward_size=48, context=64,
    )  # fmt: skip
    model = build_model(sizes, seed=1)
    save_model(model, tokenizer(), tmp_path / "model")
    transfer = Transfer(
        str(tmp_path / "run"), server="http://localhost:1", model=str(tmp_path / "model")
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    transfer.send_weights(iter(model.named_parameters()))
    transfer.destroy()
    bucket = open_bucket(str(tmp_path / "run"))
    mirror = load_mirror(bucket, read_run(bucket), at=1)
    expected = deltawire.tensors_of(model)
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in mirror.tensors
    for name, tensor in expected.items():
        assert (codec.bits_of(tensor, "BF16").reshape(-1) == mirror.tensors[name]).all(), name


def test_what_would_wait_for_ever_is_an_error(tmp_path, model_folder):
    url = str(tmp_path / "run")
    with pytest.raises(InputError, match="there is no run yet") as refused:
        Transfer(url, server="http://localhost:8000")
    assert "model=" in str(refused.value)
    with pytest.raises(InputError, match="no server's URL"):
        Transfer(url, server="localhost:8000", model=model_folder)
    with pytest.raises(InputError, match="cannot load"):
        Transfer(url, server="http://localhost:8000", model=str(tmp_path / "none"))
    model = tiny_model()
    with FollowingServer(url) as server:
        transfer = Transfer(url, server=server.url, model=model_folder, timeout_s=60)
        transfer.send_weights(iter(model.named_parameters()))
        server.wrong_digest = True
        with pytest.raises(CorruptError, match="the manifest states"):
            transfer.resume()
        server.wrong_digest = False
        server.failure = "out of memory"
        with torch.no_grad():
            model.model.norm.weight.add_(1)
        transfer.send_weights(iter(model.named_parameters()))
        with pytest.raises(ResyncError, match="out of memory"):
            transfer.resume()
        transfer.destroy()
    silent = Transfer(url, server=server.url, timeout_s=0.2)
    silent.send_weights(iter(model.named_parameters()))
    with pytest.raises(RetryError):
        silent.resume()
    silent.destroy()


def test_other_ranks_do_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    transfer = Transfer(str(tmp_path / "run"), server="http://localhost:8000")
    assert transfer.version == -1
    transfer.destroy()
    assert not (tmp_path / "run").exists()
