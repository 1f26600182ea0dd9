"""verl, SkyRL and NeMo-RL by their interfaces: actors of Ray that hold trainers and engines."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from loops import Actor, AsyncEngine, Policy, SmallEngine, pretend

from deltawire.errors import InputError, StoppedError

pytestmark = pytest.mark.usefixtures("ray_here")


def fp32_export(policy):
    return ((name, held.detach().bfloat16()) for name, held in policy.named_parameters())


class VerlManager:
    """verl 0.9.1: ``verl.checkpoint_engine.base.CheckpointEngineManager``."""

    def __init__(self, policy, engine, *, adapter=None, awaits=False, colocated=False):
        export = SimpleNamespace(get_per_tensor_param=lambda: (fp32_export(policy), adapter))
        worker = SimpleNamespace(actor=SimpleNamespace(engine=export))
        held = SimpleNamespace(worker_dict={"actor_rollout": worker}) if colocated else worker
        self.actor_wg = SimpleNamespace(workers=[Actor(held)])
        self.replicas = [SimpleNamespace(servers=[Actor(SimpleNamespace(engine=engine))])]
        self.policy, self.engine, self.awaits = policy, engine, awaits

    def update_weights(self, global_steps=None):
        self.engine.update(self.policy.served())
        return self._later() if self.awaits else {"step": global_steps}

    async def _later(self):
        return {"step": "later"}


@pytest.fixture
def verl(monkeypatch, integration):
    kind = type("CheckpointEngineManager", (VerlManager,), {})
    pretend(monkeypatch, "verl.checkpoint_engine.base", CheckpointEngineManager=kind)
    return integration("verl"), kind


@pytest.mark.parametrize("colocated", [False, True])
def test_verl_is_compared_by_one_line_of_its_configuration(verl, caplog, colocated):
    _, manager = verl
    policy = Policy()
    own = manager(policy, SmallEngine(policy.served()), colocated=colocated)
    assert own.update_weights(global_steps=1) == {"step": 1}
    check = manager.update_weights._deltawire_check
    assert check.last["server 0.0"].equal
    own.engine.drops = ("norm",)
    policy.step()
    own.update_weights()
    assert "norm" in caplog.text


def test_verl_stops_where_its_update_is_awaited(verl):
    module, manager = verl
    module.verify("stop")
    policy = Policy()
    own = manager(policy, SmallEngine(policy.served()), awaits=True)
    assert asyncio.run(own.update_weights()) == {"step": "later"}
    own.engine.drops = ("norm",)
    policy.step()
    with pytest.raises(StoppedError, match="norm"):
        asyncio.run(own.update_weights())


def test_verl_s_adapters_are_said_not_to_be_compared(verl, caplog):
    _, manager = verl
    policy = Policy()
    own = manager(policy, SmallEngine(policy.served()), adapter=object())
    own.update_weights()
    assert "adapters" in caplog.text
    assert not manager.update_weights._deltawire_check.last


def test_an_actor_of_verl_without_a_trainer_is_an_error(verl):
    module, _ = verl
    with pytest.raises(InputError, match="no trainer"):
        module.trainer_of(SimpleNamespace())


class SkyDispatch:
    """SkyRL at a956457: ``WorkerDispatch`` of ``skyrl_train.workers.worker_dispatch``."""

    def __init__(self, policy, engine, url, *, lora=False, megatron=False):
        engine_cfg = SimpleNamespace(model_dtype="bfloat16")
        self.cfg = SimpleNamespace(generator=SimpleNamespace(inference_engine=engine_cfg))
        chunks = lambda dtype: [  # noqa: E731
            SimpleNamespace(names=[name], tensors=[held.detach().to(dtype)])
            for name, held in policy.named_parameters()
        ]
        held = None if megatron else policy
        extractor = SimpleNamespace(model=held, extract_weights=chunks)
        worker = SimpleNamespace(
            _is_lora=lora, model=SimpleNamespace(model=held), weight_extractor=extractor
        )
        self._actor_groups = {"policy": SimpleNamespace(_actor_handlers=[Actor(worker)])}
        self._inference_engine_client = SimpleNamespace(server_urls=[url])
        self.policy, self.engine = policy, engine

    async def save_weights_for_sampler(self, model_id=None):
        self.engine.update(self.policy.served())


@pytest.mark.parametrize("megatron", [False, True])
def test_skyrl_s_servers_are_compared(monkeypatch, integration, serve, megatron):
    kind = type("WorkerDispatch", (SkyDispatch,), {})
    module = "skyrl.backends.skyrl_train.workers.worker_dispatch"
    pretend(monkeypatch, module, WorkerDispatch=kind)
    check = integration("skyrl").verify("stop")
    policy = Policy()
    engine = SmallEngine(policy.served())
    own = kind(policy, engine, serve(engine).url, megatron=megatron)
    asyncio.run(own.save_weights_for_sampler())
    assert all(one.equal for one in check.last.values())
    engine.drops = ("embed",)
    policy.step()
    with pytest.raises(StoppedError, match="embed"):
        asyncio.run(own.save_weights_for_sampler())


def test_skyrl_s_adapters_are_said_not_to_be_compared(monkeypatch, integration, serve, caplog):
    kind = type("WorkerDispatch", (SkyDispatch,), {})
    module = "skyrl.backends.skyrl_train.workers.worker_dispatch"
    pretend(monkeypatch, module, WorkerDispatch=kind)
    check = integration("skyrl").verify("stop")
    policy = Policy()
    own = kind(policy, SmallEngine(policy.served()), "http://127.0.0.1:1", lora=True)
    asyncio.run(own.save_weights_for_sampler())
    assert "adapters" in caplog.text
    assert not check.last


class Group(list):
    """NeMo-RL's group of workers."""

    dp_size = 1

    @property
    def workers(self):
        return list(self)

    def get_dp_leader_worker_idx(self, shard):
        return shard


@pytest.mark.parametrize("export", ["_iter_params_with_optional_kv_scales",
                                    "_checkpoint_engine_params"])  # fmt: skip
def test_nemo_rl_s_workers_are_compared(monkeypatch, integration, export):
    """NeMo-RL at 7ea279a: ``refit_policy_generation`` of two modules, one of which imported it."""

    def refit_policy_generation(policy, policy_generation, colocated_inference):
        policy_generation.engine.update(policy.held.served())
        return {"refit": 1.0}

    grpo = pretend(
        monkeypatch, "nemo_rl.algorithms.grpo", refit_policy_generation=refit_policy_generation
    )
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    check = integration("nemo_rl").verify("stop")
    held = Policy()
    worker = SimpleNamespace(**{export: lambda: fp32_export(held)})
    policy = SimpleNamespace(worker_group=Group([Actor(worker)]), held=held)
    engine = SmallEngine(held.served())
    generation = SimpleNamespace(
        worker_group=Group([Actor(SimpleNamespace(llm=engine))]), engine=engine
    )
    assert grpo.refit_policy_generation(policy, generation, True) == {"refit": 1.0}
    assert check.last["engine 0"].equal
    engine.drops = ("down",)
    held.step()
    with pytest.raises(StoppedError, match="down"):
        grpo.refit_policy_generation(policy, generation, True)


@pytest.mark.drills
@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_engines_in_ray_s_own_actors_are_asked(monkeypatch):
    """An actor whose engine answers at once, and an asynchronous one."""
    monkeypatch.undo()  # Ray itself.
    ray = pytest.importorskip("ray")
    from deltawire.attest import digests
    from deltawire.attest.engine import compare_engine
    from deltawire.attest.sides import Side
    from deltawire.integrations.asking import in_actor

    class Holder:
        def __init__(self, engine):
            self.llm = engine

    class AsyncHolder(Holder):
        async def generate(self):  # Makes Ray run the actor in a loop.
            return None

    policy = Policy()
    side = Side("the trainer", digests(policy, dtype="bfloat16"))
    paths = {"env_vars": {"PYTHONPATH": ":".join(__import__("sys").path)}}
    ray.init(address="local", num_cpus=2, include_dashboard=False, runtime_env=paths)
    try:
        for holder, kind in ((Holder, SmallEngine), (AsyncHolder, AsyncEngine)):
            actor = ray.remote(num_cpus=0)(holder).remote(kind(policy.served()))
            parts = in_actor(actor, "llm", "an actor")(side)
            assert compare_engine("an actor", parts, side).equal
    finally:
        ray.shutdown()
