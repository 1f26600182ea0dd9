"""Trainers of several ranks: all of them stop, one of them speaks, none waits for another."""

import logging
import threading
from types import SimpleNamespace

import peft
import pytest
import torch
import trl.generation.vllm_generation as vllm_generation
from loops import Policy, SmallEngine, pretend
from thread_ranks import on_ranks

import deltawire.integrations.trl as trl
from deltawire.attest import digests
from deltawire.errors import StoppedError
from deltawire.integrations import sharing
from deltawire.integrations.checking import WeightCheck
from deltawire.integrations.sharing import MAX_TEXT, act_together, digest_export


@pytest.fixture
def ranks(monkeypatch):
    """Calls ``work(number)`` on ranks that are threads; returns what each returned or raised."""
    here = threading.local()
    for module in (sharing, trl):  # Each rank digests by itself what it holds.
        monkeypatch.setattr(module, "torch_ranks", lambda _: getattr(here, "ranks", None))

    def run(work, count=2):
        def on_rank(ranks):
            here.ranks = ranks
            try:
                return work(ranks.number)
            except StoppedError as error:
                return error

        return on_ranks(on_rank, count)

    return run


def test_all_ranks_stop_for_what_the_first_one_found(ranks):
    found = ranks(lambda rank: act_together(WeightCheck("stop"), "" if rank else "norm differs"))
    assert ["norm differs" in str(one) for one in found] == [True, True]
    assert (
        ranks(lambda rank: act_together(WeightCheck("stop"), "mine" if rank else "")) == [None] * 2
    )
    long = ranks(lambda rank: act_together(WeightCheck("stop"), "" if rank else "é" * 99_999))
    assert len(str(long[1])) < MAX_TEXT + 200
    assert type(long[0]) is type(long[1])


def test_one_rank_warns(ranks, caplog):
    ranks(lambda rank: act_together(WeightCheck("warn"), "" if rank else "norm differs"), 3)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "norm differs" in record.getMessage()


def test_a_rank_alone_acts_by_itself():
    with pytest.raises(StoppedError, match="norm"):
        act_together(WeightCheck("stop"), "norm differs")


def test_the_first_rank_digests_what_all_export(ranks):
    read = [[], []]

    def stream(rank):
        for name in "abc":
            read[rank].append(name)
            yield name, torch.ones(2)

    found = ranks(lambda rank: digest_export(stream(rank), "bfloat16"))
    assert found[0] == digests({name: torch.ones(2) for name in "abc"}, dtype="bfloat16")
    assert found[1] is None
    assert read == [list("abc")] * 2


class PartOfEngine:
    """vLLM on one rank of TRL, which answers for its own part of the engine."""

    def __init__(self, engine, ranks):
        self._engine, self._ranks = engine, ranks

    def collective_rpc(self, method, args):
        found = self._engine.collective_rpc(method, args=args)
        return [found[number] for number in self._ranks]


def generations(monkeypatch, engines, size):
    """TRL's object on two ranks, whose transfer does nothing."""
    monkeypatch.setattr(vllm_generation.VLLMGeneration, "sync_weights", lambda _: None)
    policy = Policy()
    own = SimpleNamespace(unwrap_model=lambda model: model)
    return policy, [
        SimpleNamespace(model=policy, mode="colocate", accelerator=own, llm=one,
                        tensor_parallel_size=size)
        for one in engines
    ]  # fmt: skip


def synced(ranks, made):
    call = vllm_generation.VLLMGeneration.sync_weights
    return ranks(lambda rank: call(made[rank]))


@pytest.mark.parametrize(
    ("size", "names"),
    [(2, ["the engine of rank 0"]), (1, ["the engine of rank 0", "the engine of rank 1"]),
     (None, ["the engine of rank 0", "the engine of rank 1"])],
)  # fmt: skip
def test_trl_s_engines_of_several_processes_are_put_together(monkeypatch, ranks, size, names):
    weights = Policy().served()
    engine = SmallEngine(weights)
    parts = [(0,), (1,)] if size == 2 else [(0, 1), (0, 1)]
    policy, made = generations(monkeypatch, [PartOfEngine(engine, one) for one in parts], size)
    check = trl.verify("stop")
    assert synced(ranks, made) == [None, None]
    assert sorted(check.last) == names
    assert all(one.equal for one in check.last.values())
    policy.step()
    found = synced(ranks, made)
    assert all(isinstance(one, StoppedError) for one in found)


def test_a_rank_of_trl_that_cannot_ask_ends_no_training(monkeypatch, ranks, caplog):
    engine = SmallEngine(Policy().served())
    _, made = generations(monkeypatch, [PartOfEngine(engine, (0,)), None], 2)
    check = trl.verify("stop")
    assert synced(ranks, made) == [None, None]
    assert "the engine of rank 0 was not compared: it was not asked: AttributeError" in caplog.text
    assert not check.last


def test_a_rank_of_trl_without_weights_takes_part(monkeypatch, ranks, caplog):
    """The others wait for it where they share their answers, and the verdict."""
    engine = SmallEngine(Policy().served())
    _, made = generations(monkeypatch, [PartOfEngine(engine, (0,)), PartOfEngine(engine, (1,))], 2)
    check = trl.verify("stop")
    made[1].accelerator = None
    assert synced(ranks, made) == [None, None]
    assert "its rank has no weights to compare with" in caplog.text
    made[0].accelerator, made[1].accelerator = None, made[0].accelerator
    assert synced(ranks, made) == [None, None]
    assert not check.last


def test_trl_s_adapters_are_compared_merged(monkeypatch):
    """TRL adds them to the base for the transfer."""

    class Tiny(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.out = torch.nn.Linear(4, 4, bias=False)

        def forward(self, given):
            return self.out(given)

    config = peft.LoraConfig(target_modules=["out"], init_lora_weights=False)
    model = peft.get_peft_model(Tiny(), config)
    own = SimpleNamespace(unwrap_model=lambda one: one)
    found = trl._digests(SimpleNamespace(accelerator=own, model=model), WeightCheck())
    assert list(found.by_name) == ["out.weight"]
    assert found == digests(model, dtype="bfloat16", merged=True)


def test_all_ranks_of_areal_stop(monkeypatch, integration, ranks):
    class Engine:
        def update_weights(self, meta):
            return meta

    pretend(monkeypatch, "areal.engine.fsdp_engine", FSDPEngine=Engine)
    module = integration("areal")
    check = module.verify("stop")
    policy = Policy()
    monkeypatch.setattr(module, "digests", lambda *_, **__: digests(policy.served()))
    engine = SmallEngine(policy.served(), drops=("norm",))
    compared = []

    def compare(reference, engines):
        compared.append(list(engines()))
        return "norm differs"

    monkeypatch.setattr(check, "compare", compare)
    own = Engine()
    own.config, own.model = SimpleNamespace(use_lora=False), policy
    own.rollout_engine = SimpleNamespace(addresses=["127.0.0.1:1"])
    found = ranks(lambda _: own.update_weights(engine))
    assert all("norm differs" in str(one) for one in found)
    assert compared == [["127.0.0.1:1"]], "the first rank only asks"
