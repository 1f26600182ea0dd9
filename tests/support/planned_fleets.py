"""A small plan as text, and the figures that tests compute it with."""

from pathlib import Path

from deltawire.plan.fleet.rates import CodecRates, CodedSize, CoreCost, Rates, ThreadSpeed

PLAN = """
name = "small"
goal_s = 30

[model]
config = "qwen3-30b-a3b"
precision = "fp8"
changed = 0.003

[trainer]
accelerator = "h100"
accelerators = 8
step_s = 60

[rollouts]
batch = 32
seconds = 40
tail = 2.0
per_engine = 8
max_staleness = 4

[[regions]]
name = "home"
accelerator = "h100"
accelerators = 32
tensor_parallel = 4

[[regions]]
name = "far"
away = true
accelerator = "h200"
accelerators = 16
tensor_parallel = 8
"""

SIZES = (CodedSize(0.001, 9.0), CodedSize(0.01, 7.0), CodedSize(0.1, 5.0))
RATES = Rates(
    machine="a test",
    measured="never",
    cores=2,
    speeds=(ThreadSpeed(2, 1.8), ThreadSpeed(8, 1.9)),
    copy_bytes_s=4e9,
    digest_bytes_s=2e9,
    quantise_value_s=4e-8,
    stage_change_s=1e-8,
    swap_change_s=1e-8,
    mirror_change_s=1e-8,
    publish_s=0.001,
    follow_s=0.001,
    codecs={
        "bf16": CodecRates(CoreCost(8e-10, 2e-8), CoreCost(5e-10, 1.5e-8), SIZES),
        "fp8": CodecRates(CoreCost(5e-10, 1.4e-8), CoreCost(4e-10, 1.3e-8), SIZES),
    },
)


def write_plan(folder: Path, *, old: str = "", new: str = "") -> Path:
    """Writes the plan, with one text replaced."""
    assert old in PLAN
    path = folder / "plan.toml"
    path.write_text(PLAN.replace(old, new) if old else PLAN)
    return path
