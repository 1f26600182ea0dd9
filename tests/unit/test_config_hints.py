"""Hints of the configuration's errors never suggest what is already set."""

import re

import msgspec
import pytest

from deltawire.config import RunConfig, flatten, parse_config
from deltawire.errors import InputError

OLD = {"ratio_base": "old", "corrections": []}
MASK = {"weigh": False, "action": "mask"}
ASSIGNED = re.compile(r"([\w.]+) = (\"[^\"]*\"|[\d.]+|true|false)")

CONTRADICTIONS = {
    "two corrections of one ratio": {
        "train.loss": {"ratio_base": "rollout", "corrections": [{"weigh": True}]}
    },
    "truncate without a bound": {
        "train.loss": {
            "ratio_base": "old", "corrections": [{"weigh": True, "action": "truncate", "low": 0.5}]
        }
    },
    "nothing to truncate": {
        "train.loss": {"corrections": [{"weigh": False, "action": "truncate"}]}
    },
    "uncorrected, old": {"train.loss": OLD, "train": {"max_staleness": 9}},
    "uncorrected, no ratio": {
        "train.loss": {"surrogate": "reinforce", "ratio_base": "rollout", "corrections": []},
        "train": {"max_staleness": 9},
    },
    "dual_clip": {"train.loss": {"dual_clip": 0.5}},
    "clip_low": {"train.loss": {"clip_low": 1.5}},
    "minibatches": {"train": {"minibatches": 9, "groups_per_step": 2}},
    "windowed, none stale": {
        "train": {"max_staleness": 0}, "train.staleness": {"policy": "windowed_fifo"}
    },
    "requeue_age": {
        "train": {"max_staleness": 4}, "train.staleness": {"policy": "requeue", "requeue_age": 2}
    },
    "requeue, old, uncorrected": {
        "train": {"max_staleness": 2}, "train.staleness": {"policy": "requeue"}, "train.loss": OLD,
    },
    "requeue, rollout, corrected": {
        "train": {"max_staleness": 2}, "train.staleness": {"policy": "requeue"},
        "train.loss": {"ratio_base": "rollout", "corrections": [MASK]},
    },
    "requeue, rollout, uncorrected": {
        "train": {"max_staleness": 2}, "train.staleness": {"policy": "requeue"},
        "train.loss": {"ratio_base": "rollout"},
    },
    "retain and kl": {"retain": {"versions": 5}, "train.loss": {"kl": "k3"}},
    "vllm, top_p": {"rollout": {"engine": "vllm", "temperature": 0.7, "top_p": 0.9}},
    "workers": {"workers": {"allow": ["other*"]}, "rollout": {"workers": 2}},
}  # fmt: skip


def raw_of(sections):
    raw = {"name": "x", "model": {"path": "m"}}
    for dotted, values in sections.items():
        place = raw
        for name in dotted.split("."):
            place = place.setdefault(name, {})
        place.update(values)
    return raw


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_hint_suggests_no_value_that_is_set(what):
    raw = raw_of(CONTRADICTIONS[what])
    with pytest.raises(InputError) as caught:
        parse_config(raw, source="test")
    assert caught.value.hint
    present = flatten(msgspec.convert(raw, RunConfig))
    for key, value in ASSIGNED.findall(caught.value.hint):
        places = [name for name in present if f".{name}".endswith(f".{key}")]
        for name in places:
            now = msgspec.json.encode(present[name]).decode()
            assert now != value, f"{name} is {value} already: {caught.value.hint}"


@pytest.mark.parametrize("base", ["old", "rollout"])
@pytest.mark.parametrize("corrected", [True, False])
def test_requeue_names_what_is_missing(base, corrected):
    corrections = [{"weigh": False, "action": "mask"}] if corrected else []
    sections = {
        "train": {"max_staleness": 2},
        "train.staleness": {"policy": "requeue"},
        "train.loss": {"ratio_base": base, "corrections": corrections},
    }
    if base == "old" and corrected:
        parse_config(raw_of(sections), source="test")
        return
    with pytest.raises(InputError) as caught:
        parse_config(raw_of(sections), source="test")
    assert ("ratio_base" in caught.value.hint) == (base == "rollout")
    assert ("corrections" in caught.value.hint) == (not corrected)
