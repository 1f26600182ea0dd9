"""A replay says before its first step whether it can come out with the same bits."""

import pytest
from forgotten_users import train
from granted_groups import start_with_groups

from deltawire.cli.main import main
from deltawire.rl.trainer import trainer, verify_training
from deltawire.train.arithmetic import arithmetic_of
from deltawire.wire.ledger import CommitMetadata

TRAIN = {"groups_per_step": 2, "max_staleness": 99, "versions": 1}


@pytest.fixture
def started(tmp_path):
    return start_with_groups(tmp_path, groups=2, train=TRAIN)


def test_the_same_kernels_are_expected_to_be_exact(started, capsys, monkeypatch):
    train(started, to=1)
    assert main(["replay", started.url]) == 0
    assert "exactness is expected" in capsys.readouterr().err
    monkeypatch.setattr(verify_training, "arithmetic_of", lambda _: "torch 9, ABACUS")
    said = []
    found = verify_training.verify_training(started, expect=said.append)
    assert said == [found.doubts]
    assert "torch 9, ABACUS" in found.doubts[0]
    assert main(["replay", started.url]) == 0  # The bits decide, not the expectation.
    assert "exactness cannot be expected: version 1: they were computed with torch" in (
        capsys.readouterr().err
    )


def test_versions_that_do_not_say_are_named(started, monkeypatch):
    monkeypatch.setattr(trainer, "arithmetic_of", lambda _: "")
    train(started, to=1)
    (doubt,) = verify_training.verify_training(started).doubts
    assert "version 1: their manifests do not say with which kernels" in doubt


def test_processors_with_other_kernels_have_other_names(monkeypatch):
    """Both have AVX-512 for torch, and oneDNN multiplies bf16 by other instructions."""
    import torch

    told = {"cpu_name": "Xeon", "avx512_bf16": True, "amx_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: told)
    assert arithmetic_of(torch.device("cpu")).endswith(", avx512_bf16, amx_bf16, Xeon")
    told["amx_bf16"] = False
    assert arithmetic_of(torch.device("cpu")).endswith(", avx512_bf16, Xeon")
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # An earlier release.
    assert arithmetic_of(torch.device("cpu")).count(",") == 1


def test_limits_of_kernels_are_part_of_the_name(monkeypatch):
    import torch

    plain = arithmetic_of(torch.device("cpu"))
    assert plain.startswith(f"torch {torch.__version__}, ")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert arithmetic_of(torch.device("cpu")) == f"{plain}, ONEDNN_MAX_CPU_ISA=AVX2"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "x" * 1000)
    assert len(arithmetic_of(torch.device("cpu"))) <= 256
    assert CommitMetadata().arithmetic == ""
