"""verl, SkyRL and NeMo-RL by their interfaces: actors of Ray that hold trainers and engines."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from loops import Actor, Policy, SmallEngine, pretend

from deltawire.attest import digests
from deltawire.attest.engine import compare_engine
from deltawire.attest.sides import Side
from deltawire.errors import InputError, StoppedError

pytestmark = pytest.mark.usefixtures("ray_here")


def fp32_export(policy):
    return ((name, held.detach().bfloat16()) for name, held in policy.named_parameters())


class VerlManager:
    """verl 0.9.1: ``verl.checkpoint_engine.base.CheckpointEngineManager``."""

    def __init__(self, policy, engine, address="", *, adapter=None, awaits=False, colocated=""):
        export = SimpleNamespace(get_per_tensor_param=lambda: (fp32_export(policy), adapter))
        worker = SimpleNamespace(actor=SimpleNamespace(engine=export))
        several = {"reference": SimpleNamespace(actor=None), "actor_rollout": worker}
        held = SimpleNamespace(**{colocated: several}) if colocated else worker
        self.actor_wg = SimpleNamespace(workers=[Actor(held)])
        self.replicas = [SimpleNamespace(server_address=address)]
        self.export = export
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


@pytest.mark.parametrize("colocated", ["", "worker_dict", "fused_worker_dict"])
def test_verl_is_compared_by_one_line_of_its_configuration(verl, serve, caplog, colocated):
    _, manager = verl
    policy = Policy()
    engine = SmallEngine(policy.served())
    own = manager(policy, engine, serve(engine).address, colocated=colocated)
    assert own.update_weights(global_steps=1) == {"step": 1}
    check = manager.update_weights._deltawire_check
    assert check.last[own.replicas[0].server_address].equal
    own.engine.drops = ("norm",)
    policy.step()
    own.update_weights()
    assert "norm" in caplog.text


def test_a_tied_head_that_verl_exports_twice_is_equal(verl, serve, caplog):
    module, manager = verl
    check = module.verify("stop")
    policy = Policy()
    engine = SmallEngine(policy.served())
    own = manager(policy, engine, serve(engine).address)
    exported = lambda: ({**policy.served(), "head": policy.served()["embed"]}.items(), None)  # noqa: E731
    own.export.get_per_tensor_param = exported
    own.update_weights()
    assert check.last[own.replicas[0].server_address].equal
    assert not caplog.records
    policy.step()
    engine.drops = ("embed",)
    with pytest.raises(StoppedError, match="embed"):
        own.update_weights()


def test_verl_stops_where_its_update_is_awaited(verl, serve):
    module, manager = verl
    module.verify("stop", token="key")
    policy = Policy()
    engine = SmallEngine(policy.served())
    own = manager(policy, engine, serve(engine, token="key").address, awaits=True)
    assert asyncio.run(own.update_weights()) == {"step": "later"}
    own.engine.drops = ("norm",)
    policy.step()
    with pytest.raises(StoppedError, match="norm"):
        asyncio.run(own.update_weights())


def test_the_variables_of_verl_s_processes_are_read(monkeypatch, integration):
    kind = type("CheckpointEngineManager", (VerlManager,), {})
    pretend(monkeypatch, "verl.checkpoint_engine.base", CheckpointEngineManager=kind)
    integration("verl")
    assert kind.update_weights._deltawire_check.on_mismatch == "warn"
    monkeypatch.setenv("DELTAWIRE_ON_MISMATCH", "stop")
    monkeypatch.setenv("DELTAWIRE_CHECK_EVERY", "3")
    integration("verl")
    check = kind.update_weights._deltawire_check
    assert check.on_mismatch == "stop"
    assert [check.due() for _ in range(4)] == [True, False, False, True]


def test_an_update_of_verl_that_is_not_due_exports_nothing(verl, serve):
    module, manager = verl
    module.verify("stop", every=2)
    policy = Policy()
    engine = SmallEngine(policy.served())
    own = manager(policy, engine, serve(engine).address)
    own.update_weights()
    own.export.get_per_tensor_param = lambda: 1 / 0
    engine.drops = ("norm",)
    policy.step()
    own.update_weights()


def test_the_digests_of_verl_come_from_whichever_worker_has_them(verl):
    module, _ = verl
    actors = [SimpleNamespace(__ray_call__=SimpleNamespace(remote=lambda *_: None))]
    export = SimpleNamespace(get_per_tensor_param=lambda: ([("w", torch.ones(2))], None))
    actors.append(Actor(SimpleNamespace(actor=SimpleNamespace(engine=export))))
    assert list(module.exported(actors, "bfloat16").by_name) == ["w"]


def test_another_version_of_verl_ends_no_training(verl, caplog):
    _, manager = verl
    policy = Policy()
    own = manager(policy, SmallEngine(policy.served()))
    del own.replicas
    assert own.update_weights(global_steps=1) == {"step": 1}
    del own.actor_wg
    assert own.update_weights(global_steps=2) == {"step": 2}
    assert "has no attribute 'replicas'" in caplog.text
    assert "has no attribute 'actor_wg'" in caplog.text


def test_an_error_in_verl_s_export_leaves_no_rank_in_it(verl, monkeypatch):
    """Exporting is collective: the other ranks wait for each tensor."""
    module, _ = verl
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    read = []

    def stream():
        for number in range(4):
            read.append(number)
            yield str(number), torch.ones(2, dtype=torch.complex64 if number == 1 else None)

    engine = SimpleNamespace(get_per_tensor_param=lambda: (stream(), None))
    worker = SimpleNamespace(actor=SimpleNamespace(engine=engine))
    assert "nothing was compared" in module.digest_trainer(worker, "bfloat16")
    assert read == [0, 1, 2, 3]


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
    """NeMo-RL's group of workers, two of which hold one engine together."""

    dp_size = 1

    @property
    def workers(self):
        return list(self)

    def get_dp_leader_worker_idx(self, shard):
        return 2 * shard


@pytest.mark.parametrize(
    ("export", "call"),
    [
        ("_iter_params_with_optional_kv_scales", "checkpoint_engine_rpc"),
        ("_checkpoint_engine_params", "checkpoint_engine_rpc_async"),
    ],
)
def test_nemo_rl_s_workers_are_compared(monkeypatch, integration, export, call):
    """NeMo-RL at 7ea279a: ``refit_policy_generation`` of two modules, one of which imported it."""

    def refit_policy_generation(policy, policy_generation, colocated_inference):
        policy_generation.engine.update(policy.held.served())
        return {"refit": 1.0}

    members = {"refit_policy_generation": refit_policy_generation}
    other = pretend(monkeypatch, "nemo_rl.algorithms.distillation", **members)
    elsewhere = pretend(monkeypatch, "elsewhere.loop", **members)
    plain = pretend(monkeypatch, "nemo_rl.algorithms.utils")
    grpo = pretend(monkeypatch, "nemo_rl.algorithms.grpo", **members)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    check = integration("nemo_rl").verify("stop")
    assert other.refit_policy_generation._deltawire_check is check
    assert elsewhere.refit_policy_generation is refit_policy_generation
    assert not hasattr(plain, "refit_policy_generation")
    held = Policy()
    worker = SimpleNamespace(**{export: lambda: fp32_export(held)})
    policy = SimpleNamespace(worker_group=Group([Actor(worker)]), held=held)
    engine = SmallEngine(held.served())
    remote = lambda method, args: engine.collective_rpc(method, args=args)  # noqa: E731
    owner = SimpleNamespace(**{call: SimpleNamespace(remote=remote)})
    asynchronous = call.endswith("_async")
    generation = SimpleNamespace(
        worker_group=Group([owner]), engine=engine,
        cfg={"vllm_cfg": {"async_engine": asynchronous}},
    )  # fmt: skip
    assert grpo.refit_policy_generation(policy, generation, True) == {"refit": 1.0}
    assert check.last["engine 0"].equal
    engine.drops = ("down",)
    held.step()
    with pytest.raises(StoppedError, match="down"):
        grpo.refit_policy_generation(policy, generation, True)


def test_each_engine_of_nemo_rl_is_asked_by_the_worker_that_owns_it(monkeypatch, integration):
    pretend(monkeypatch, "nemo_rl.algorithms.grpo")
    module = integration("nemo_rl")
    engines = [SmallEngine(Policy(seed).served()) for seed in (1, 2)]
    owners = []
    for engine in engines:
        remote = lambda method, args, engine=engine: engine.collective_rpc(method, args=args)  # noqa: E731
        owners += [SimpleNamespace(checkpoint_engine_rpc=SimpleNamespace(remote=remote)), None]
    group = Group(owners)
    group.dp_size = 2
    cfg = {"vllm_cfg": {"async_engine": False}}
    asks = module.engines_of(SimpleNamespace(worker_group=group, cfg=cfg))
    side = Side("the policy", digests(Policy(2), dtype="bfloat16"))
    equal = [compare_engine(name, ask(side), side).equal for name, ask in asks.items()]
    assert dict(zip(asks, equal, strict=True)) == {"engine 0": False, "engine 1": True}


def test_an_update_of_nemo_rl_that_is_not_due_exports_nothing(monkeypatch, integration):
    members = {"refit_policy_generation": lambda policy, generation: "refit"}
    grpo = pretend(monkeypatch, "nemo_rl.algorithms.grpo", **members)
    check = integration("nemo_rl").verify("stop", every=2)
    check.due()
    assert grpo.refit_policy_generation(None, None) == "refit"


@pytest.mark.parametrize("kept", ["", "model", "extractor"])
def test_skyrl_exports_unless_the_model_itself_is_transferred(monkeypatch, integration, kept):
    """Such as when a strategy wraps or converts it."""
    module = "skyrl.backends.skyrl_train.workers.worker_dispatch"
    pretend(monkeypatch, module, WorkerDispatch=type("WorkerDispatch", (SkyDispatch,), {}))
    digest_policy = integration("skyrl").digest_policy
    policy = Policy()
    chunk = SimpleNamespace(names=["exported"], tensors=[torch.ones(2)])
    extractor = SimpleNamespace(model=policy, extract_weights=lambda _: [chunk])
    worker = SimpleNamespace(model=SimpleNamespace(model=policy), weight_extractor=extractor)
    assert "norm" in digest_policy(worker, "bfloat16").by_name
    if kept == "model":
        extractor.model = object()
    elif kept == "extractor":
        worker.model.model = extractor.model = object()  # Nothing that has parameters.
    else:
        worker.model = extractor.model = None
    assert list(digest_policy(worker, "bfloat16").by_name) == ["exported"]


def test_an_update_of_skyrl_that_is_not_due_exports_nothing(monkeypatch, integration):
    kind = type("WorkerDispatch", (SkyDispatch,), {})
    module = "skyrl.backends.skyrl_train.workers.worker_dispatch"
    pretend(monkeypatch, module, WorkerDispatch=kind)
    check = integration("skyrl").verify("stop", every=2)
    check.due()
    policy = Policy()
    own = kind(policy, SmallEngine(policy.served()), "http://127.0.0.1:1")
    own._actor_groups = None
    asyncio.run(own.save_weights_for_sampler())
    assert not check.last
