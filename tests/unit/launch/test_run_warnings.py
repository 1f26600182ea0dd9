"""Warnings about a configuration that is allowed and probably a mistake."""

from deltawire.config import run_config
from deltawire.launch.checks import warnings_of


def test_another_precision_of_the_samplers_is_a_warning():
    def found(**values):
        return warnings_of(run_config({"name": "x", "model": {"build": {}}, **values}, url=""))

    assert found() == []
    (words,) = found(rollout={"precision": "bfloat16"})
    assert "workers sample in bfloat16" in words
    assert found(rollout={"precision": "bfloat16"}, train={"compute": "bfloat16"}) == []
