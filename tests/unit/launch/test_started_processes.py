"""The processes that ``deltawire run`` starts, by its configuration."""

from types import SimpleNamespace

import pytest

from deltawire.config import parse_config
from deltawire.launch import session
from deltawire.store import open_bucket


class Recording:
    """A supervisor that starts nothing."""

    def __init__(self):
        self.names = []

    def add(self, name, role, arguments):
        del role, arguments
        self.names.append(name)


@pytest.mark.parametrize(
    ("settings", "others"),
    [
        ({}, ["w0", "w1", "evaluator"]),
        ({"evaluate": {"every": 0}}, ["w0", "w1"]),
        ({"rollout": {"workers": 0}}, ["evaluator"]),
        ({"reference": {"mode": "process"}, "train": {"loss": {"kl": "k3"}}},
         ["w0", "w1", "reference", "evaluator"]),
    ],
)  # fmt: skip
def test_each_process_is_started_only_if_it_is_configured(tmp_path, settings, others):
    config = parse_config({"name": "x", **settings}, source="test")
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    job = session.Job(config, tmp_path / "x.toml", None, tmp_path, bucket)
    supervisor = Recording()
    session._start_all(job, supervisor, SimpleNamespace(tick=lambda: None), [])
    assert supervisor.names == ["trainer", *others]
