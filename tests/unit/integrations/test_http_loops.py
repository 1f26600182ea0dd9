"""AReaL and prime-rl by their interfaces, and slime's hook with an endpoint that scores."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from loops import Policy, SmallEngine, pretend
from safetensors.torch import save_file

from deltawire.errors import StoppedError


class ArealEngine:
    """AReaL at 4aef98d: ``areal.engine.fsdp_engine.FSDPEngine``."""

    rank = 0

    def __init__(self, policy, engine, addresses, *, lora=False):
        self.config = SimpleNamespace(use_lora=lora)
        self.model, self.engine = policy, engine
        inner = SimpleNamespace(addresses=addresses)
        self.rollout_engine = SimpleNamespace(_engine=inner)

    def update_weights(self, meta):
        assert meta.type == "xccl"
        self.engine.update(self.model.served())


META = SimpleNamespace(type="xccl")


@pytest.fixture
def areal(monkeypatch, integration):
    kind = type("FSDPEngine", (ArealEngine,), {})
    pretend(monkeypatch, "areal.engine.fsdp_engine", FSDPEngine=kind)
    return integration("areal"), kind


def test_areal_s_servers_are_compared(areal, serve):
    module, kind = areal
    check = module.verify("stop", token="key")
    policy = Policy()
    engine = SmallEngine(policy.served())
    server = serve(engine, token="key")
    own = kind(policy, engine, [server.address])
    own.update_weights(META)
    assert check.last[server.address].equal
    engine.drops = ("gate",)
    policy.step()
    with pytest.raises(StoppedError, match="gate"):
        own.update_weights(META)


def test_areal_s_adapters_are_said_not_to_be_compared(areal, caplog):
    module, kind = areal
    check = module.verify("stop")
    policy = Policy()
    kind(policy, SmallEngine(policy.served()), [], lora=True).update_weights(META)
    assert "adapters" in caplog.text
    assert not check.last


def test_an_update_of_areal_that_is_not_due_asks_nobody(areal):
    module, kind = areal
    check = module.verify("stop", every=2)
    check.due()
    policy = Policy()
    own = kind(policy, SmallEngine(policy.served()), [])
    own.config = None
    own.update_weights(META)
    assert check.updates == 2
    assert not check.last


class PrimePool:
    """prime-rl at 559b447: ``prime_rl.utils.client.InferencePool``."""

    def __init__(self, engine, url, token):
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.admin_clients = [SimpleNamespace(base_url=f"{url}/", headers=headers)]
        self.engine = engine

    async def update_weights(self, weight_dir, lora_name=None, step=0):
        from safetensors.torch import load_file

        if weight_dir is not None:
            self.engine.update(load_file(weight_dir / "model.safetensors"))


def test_prime_rl_s_servers_are_compared_with_the_files_of_the_step(
    monkeypatch, integration, serve, tmp_path, caplog
):
    kind = type("InferencePool", (PrimePool,), {})
    pretend(monkeypatch, "prime_rl.utils.client", InferencePool=kind)
    check = integration("prime_rl").verify("stop")
    policy = Policy()
    engine = SmallEngine(policy.served())
    server = serve(engine, token="key")
    pool = kind(engine, server.url, "key")

    def step(number, **options):
        folder = tmp_path / f"step_{number}"
        folder.mkdir()
        save_file(policy.served(), folder / "model.safetensors")
        policy.step()
        asyncio.run(pool.update_weights(folder, step=number, **options))

    step(1)
    assert check.last[server.url].equal
    step(2, lora_name="adapter")
    asyncio.run(pool.update_weights(None))
    assert caplog.text.count("are compared") == 1
    engine.drops = ("up",)
    with pytest.raises(StoppedError, match=r"step_3 in 1 of 12 tensors: up \("):
        step(3)


def test_files_that_are_replaced_meanwhile_end_no_training_of_prime_rl(
    monkeypatch, integration, tmp_path, caplog
):
    class Pool(PrimePool):
        async def update_weights(self, weight_dir, lora_name=None, step=0, wait=True):
            (weight_dir / "model.safetensors").write_bytes(b"half")

    pretend(monkeypatch, "prime_rl.utils.client", InferencePool=Pool)
    check = integration("prime_rl").verify("stop")
    pool = Pool(SmallEngine(Policy().served()), "http://127.0.0.1:1", "")
    asyncio.run(pool.update_weights(tmp_path, step=1, wait=False))
    assert "nothing was compared" in caplog.text
    assert not check.last


def test_an_update_of_prime_rl_that_is_not_due_reads_no_files(monkeypatch, integration, caplog):
    class Pool(PrimePool):
        async def update_weights(self, weight_dir, lora_name=None, step=0):
            pass

    pretend(monkeypatch, "prime_rl.utils.client", InferencePool=Pool)
    check = integration("prime_rl").verify("stop", every=2)
    pool = Pool(None, "http://127.0.0.1:1", "")
    check.due()
    asyncio.run(pool.update_weights(None))
    assert not caplog.records
    asyncio.run(pool.update_weights(None))
    assert "through files" in caplog.text


def slime_hook(monkeypatch, tmp_path, verdict="same", **options):
    """slime's hook with an endpoint that gives a verdict, and a call of it with a new version."""
    import deltawire.integrations.slime as slime
    from deltawire.integrations.checking import WeightCheck

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    pretend(monkeypatch, "ray", get=lambda found: found)
    asked = []

    class Box:
        def __init__(self, options, _):
            assert (options.also, options.error) == ([], 0.001)
            asked.append((options.url, options.against.rpartition("_")[2]))

        def check(self):
            return SimpleNamespace(verdict=verdict)

    monkeypatch.setattr(slime, "BlackBox", Box)
    hook = slime.Hook(WeightCheck("stop", **options))
    (tmp_path / "hf" / "folder").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "old.bin", "x.safetensors.index.json"):
        (tmp_path / "hf" / name).write_text("of the model")
    args = SimpleNamespace(hf_checkpoint=str(tmp_path / "hf"))
    urls = ["http://engine", None]  # An engine that serves nothing has no address.
    engines = [SimpleNamespace(get_url=SimpleNamespace(remote=lambda url=url: url)) for url in urls]

    def update(number, engines=engines):
        folder = tmp_path / f"weight_{number}"
        folder.mkdir()
        (folder / "a.safetensors").write_bytes(b"x")
        (folder / "config.json").write_text("of the version")
        hook(args, str(folder), engines)
        return tmp_path / slime.KEPT

    return update, asked, slime


def test_slime_keeps_only_what_the_next_look_needs(monkeypatch, tmp_path):
    update, asked, _ = slime_hook(monkeypatch, tmp_path, every=3)
    assert not update(1).exists()
    assert not update(2).exists()
    kept = update(3) / "weight_3"
    found = {path.name: path.read_text() for path in kept.iterdir()}
    assert found.keys() == {"a.safetensors", "config.json", "tokenizer.json"}
    assert found["config.json"] == "of the version"
    assert not asked
    assert not update(4).exists(), "the files are gone once they were compared"
    assert asked == [("http://engine", "3")]


def test_only_rank_0_of_slime_compares(monkeypatch, tmp_path):
    update, asked, _ = slime_hook(monkeypatch, tmp_path, every=1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert not update(1).exists()
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    assert update(2).exists()
    assert not asked


def test_engines_of_slime_that_cannot_be_asked_end_no_training(monkeypatch, tmp_path, caplog):
    update, asked, slime = slime_hook(monkeypatch, tmp_path, every=1)
    update(1)
    update(2)
    assert not caplog.records, "an engine that serves its version is not warned of"
    assert asked.pop() == ("http://engine", "1")
    update(3, engines=[object()])
    assert "nothing was compared: AttributeError" in caplog.text
    assert not asked

    def refuse(*_):
        raise OSError("it is away")

    monkeypatch.setattr(slime, "BlackBox", refuse)
    update(4)
    assert "http://engine was not compared: OSError: it is away" in caplog.text


def test_the_variables_of_slime_are_read(monkeypatch):
    import deltawire.integrations.slime as slime

    assert slime._from_environment()._check.on_mismatch == "warn"
    monkeypatch.setenv("DELTAWIRE_ON_MISMATCH", "stop")
    monkeypatch.setenv("DELTAWIRE_CHECK_EVERY", "2")
    check = slime._from_environment()._check
    assert check.on_mismatch == "stop"
    assert [check.due() for _ in range(3)] == [True, False, True]


def test_files_of_slime_that_cannot_be_linked_end_no_training(monkeypatch, tmp_path, caplog):
    import deltawire.integrations.slime as slime
    from deltawire.integrations.checking import WeightCheck

    def refuse(*_, **__):
        raise OSError("no links here")

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(slime.os, "link", refuse)
    folder = tmp_path / "weight_v1"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(b"x")
    hook = slime.Hook(WeightCheck("stop", every=1))
    for _ in range(2):
        hook(SimpleNamespace(hf_checkpoint=str(tmp_path)), str(folder), [])
    (record,) = caplog.records
    assert "no links here" in record.getMessage()


def test_slime_s_engines_are_scored_against_the_version_before(monkeypatch, tmp_path, caplog):
    """slime at 624b824: ``--custom-update-weight-post-write-path``."""
    import deltawire.integrations.slime as slime
    from deltawire.integrations.checking import WeightCheck

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    pretend(monkeypatch, "ray", get=lambda found: found)
    asked = []

    class Box:
        def __init__(self, options, trust):
            asked.append((options.url, sorted(p.name for p in _files(options.against))))

        def check(self):
            return SimpleNamespace(verdict=verdicts.pop(0))

    monkeypatch.setattr(slime, "BlackBox", Box)
    hook = slime.Hook(WeightCheck("stop", every=1))
    args = SimpleNamespace(hf_checkpoint=str(tmp_path / "hf"))
    (tmp_path / "hf").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "hf" / name).write_text("{}")
    engine = SimpleNamespace(get_url=SimpleNamespace(remote=lambda: "http://engine"))
    verdicts = ["same", "cannot tell", "different"]
    for version in range(1, 5):
        folder = tmp_path / f"weight_v{version:06d}"
        folder.mkdir()
        (folder / f"{version}.safetensors").write_bytes(b"x")
        if version == 4:
            with pytest.raises(StoppedError, match="other weights than weight_v000003"):
                hook(args, str(folder), [engine])
        else:
            hook(args, str(folder), [engine])
        (folder / f"{version}.safetensors").unlink()  # slime removes what its engines have read.
    expected = [[f"{version}.safetensors", "config.json"] for version in (1, 2, 3)]
    assert [files for _, files in asked] == expected
    assert "cannot tell" in caplog.text
    assert sorted(p.name for p in (tmp_path / slime.KEPT).iterdir()) == ["weight_v000004"]


def _files(folder):
    from pathlib import Path

    return list(Path(folder).iterdir())


def test_another_module_runs_with_the_check(monkeypatch, integration, tmp_path):
    from deltawire.integrations.__main__ import main

    kind = type("InferencePool", (PrimePool,), {})
    pretend(monkeypatch, "prime_rl.utils.client", InferencePool=kind)
    integration("prime_rl")
    place = tmp_path / "seen_arguments.py"
    place.write_text("import pathlib, sys\npathlib.Path(sys.argv[1]).write_text(repr(sys.argv))\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "out"
    monkeypatch.setattr("sys.argv", ["x"])
    command = ["prime_rl", "--on-mismatch", "stop", "--every", "2", "seen_arguments"]
    main([*command, str(out), "@", "a.toml"])
    assert out.read_text() == repr([str(place), str(out), "@", "a.toml"])
    check = kind.update_weights._deltawire_check
    assert check.on_mismatch == "stop"
    assert [check.due() for _ in range(3)] == [True, False, True]
    for wrong in (["slime", "x"], ["prime_rl", "--on-mismatch", "ignore", "x"], ["prime_rl"]):
        with pytest.raises(SystemExit):
            main(wrong)
