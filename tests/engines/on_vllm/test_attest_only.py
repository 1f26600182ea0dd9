"""vLLM in attest-only mode: weights that it loaded and changed itself, read where they lie."""

import msgspec
import pytest
from shapes import build

from deltawire.attest.engine import compare_engine
from deltawire.attest.sides import Side, folder_side
from deltawire.engines.live_parts import METHOD, AttestRequest, RankParts

pytestmark = pytest.mark.filterwarnings("default")

WORKER = "deltawire.engines.vllm.attesting.AttestWorker"


@pytest.fixture(scope="module")
def folders(tmp_path_factory, family):
    """Two checkpoints of one model, with other bits."""
    folder = tmp_path_factory.mktemp("models")
    return build(family, folder / "old", seed=0), build(family, folder / "new", seed=1)


@pytest.fixture(scope="module")
def engine(folders, ranks, family):
    from vllm import LLM

    llm = LLM(
        str(folders[0]),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        tensor_parallel_size=ranks,
        max_model_len=256,
        kv_cache_memory_bytes=64 << 20,
        max_num_seqs=16,
        seed=0,
        disable_log_stats=True,
        worker_extension_cls=WORKER,
    )
    yield llm
    llm.llm_engine.engine_core.shutdown()


def attested(engine, reference, *others):
    request = AttestRequest([one.spec for one in reference.digests.tensors])
    answers = engine.collective_rpc(METHOD, args=(msgspec.json.encode(request).decode(),))
    parts = [msgspec.convert(one, RankParts) for one in answers]
    assert not [one.failure for one in parts if one.failure]
    report = compare_engine("vLLM", parts, reference, lambda: others)
    return report, {one.name: one for one in report.tensors if one.verdict != "equal"}


def test_it_holds_its_own_checkpoint_and_no_other(engine, folders):
    old, new = map(folder_side, folders)
    report, odd = attested(engine, old)
    assert report.equal, odd
    digests_only = Side("digests", old.digests)
    assert attested(engine, digests_only)[0].equal
    report, odd = attested(engine, new, old)
    assert report.differs
    assert {one.cause for one in odd.values()} == {"version"}


def test_weights_that_vllm_reloads_are_those_of_the_other_checkpoint(engine, folders):
    old, new = map(folder_side, folders)
    engine.collective_rpc(
        "reload_weights", kwargs={"weights_path": str(folders[1]), "is_checkpoint_format": True}
    )
    report, odd = attested(engine, new, old)
    assert report.equal, odd
    engine.collective_rpc(
        "reload_weights", kwargs={"weights_path": str(folders[0]), "is_checkpoint_format": True}
    )
    assert attested(engine, old)[0].equal
