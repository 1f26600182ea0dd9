"""A wrong model path is reported before any process starts."""

import pytest

from deltawire.config import parse_config
from deltawire.errors import InputError
from deltawire.launch.session import Job, _make_model


def test_a_model_path_that_is_no_directory_is_named(tmp_path):
    raw = {"name": "wrong", "model": {"path": str(tmp_path / "nothing")}}
    job = Job(parse_config(raw, source="test"), tmp_path / "c.toml", None, tmp_path / "out", None)
    with pytest.raises(InputError, match="nothing is not a directory"):
        _make_model(job, None, None, [])
