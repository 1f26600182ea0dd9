"""TRL's own class that moves weights to vLLM, with an engine of ours in vLLM's place."""

from types import SimpleNamespace

import pytest
import trl.generation.vllm_generation as vllm_generation
from loops import Policy, SmallEngine

import deltawire.integrations.trl as integration
from deltawire.errors import StoppedError

VLLMGeneration = vllm_generation.VLLMGeneration


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    monkeypatch.setattr(VLLMGeneration, "sync_weights", VLLMGeneration.sync_weights)


class Live:
    """The model in vLLM's process, as TRL reaches it."""

    def __init__(self, engine):
        self._engine = engine

    def load_weights(self, pairs):
        self._engine.update({name: held.bfloat16() for name, held in pairs})


class Llm(SmallEngine):
    """vLLM's offline engine, as TRL uses it."""

    def __init__(self, weights, drops=()):
        super().__init__(weights, drops)
        runner = SimpleNamespace(model=Live(self))
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(model_executor=executor)

    def reset_prefix_cache(self):
        pass


class Client:
    """TRL's client of a server; the transfer itself needs accelerators."""

    def __init__(self, url, engine):
        self.base_url, self._engine = url, engine

    def update_named_params(self, metadata, pairs):
        assert metadata
        self._engine.update({name: held.bfloat16() for name, held in pairs})

    def reset_prefix_cache(self):
        pass


def generation(policy, mode, **parts):
    """TRL's object without its constructor, which starts or awaits vLLM."""
    found = object.__new__(VLLMGeneration)
    accelerator = SimpleNamespace(unwrap_model=lambda model: model, is_main_process=True)
    found.__dict__.update(
        model=policy, mode=mode, accelerator=accelerator, enable_sleep_mode=False,
        tensor_parallel_size=1, _weight_metadata=None, **parts,
    )  # fmt: skip
    found._iter_named_params = lambda: iter(dict(policy.named_parameters()).items())
    return found


def test_the_engine_in_the_trainer_s_process_is_compared():
    policy = Policy()
    llm = Llm(policy.served())
    check = integration.verify("stop")
    own = generation(policy, "colocate", llm=llm)
    own.sync_weights()
    policy.step()
    own.sync_weights()
    assert check.last["the engine of rank 0"].equal
    assert check.updates == 2
    llm.drops = ("norm",)
    policy.step()
    with pytest.raises(StoppedError, match="norm"):
        own.sync_weights()


def test_a_server_is_asked_with_its_key(serve, caplog):
    policy = Policy()
    engine = SmallEngine(policy.served())
    server = serve(engine, token="secret")
    check = integration.verify("warn", token="secret")
    own = generation(policy, "server", vllm_client=Client(server.url, engine))
    own.sync_weights()
    assert check.last[server.url].equal
    engine.drops = ("q",)
    policy.step()
    own.sync_weights()
    assert "q (" in caplog.text
    again = integration.verify("warn")
    own.sync_weights()
    assert (again.updates, check.updates) == (1, 2), "the second verify takes the first's place"
    assert "is it the right token?" in caplog.text


def test_an_engine_without_the_method_ends_no_training(caplog):
    """As vLLM answers that was started without DELTAWIRE_ATTEST."""
    policy = Policy()
    llm = Llm(policy.served())
    check = integration.verify("stop")

    def missing(method, **_):
        raise NotImplementedError(f"{method} is not implemented")

    llm.collective_rpc = missing
    generation(policy, "colocate", llm=llm).sync_weights()
    assert "it was not asked: NotImplementedError" in caplog.text
    assert not check.last


def test_another_version_of_trl_ends_no_training(caplog):
    policy = Policy()
    integration.verify("stop")
    own = generation(policy, "server", vllm_client=Client("", SmallEngine(policy.served())))
    del own.vllm_client.base_url
    own.sync_weights()
    assert "nothing was compared: AttributeError" in caplog.text
