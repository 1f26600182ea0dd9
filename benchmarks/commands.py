"""The arguments of ``deltawire bench WHAT``; each benchmark is imported when it is run."""

from __future__ import annotations

import argparse
from importlib import import_module


def add_parsers(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares every benchmark."""
    for add in (
        _add_loop,
        _add_codec,
        _add_deltas,
        _add_swap,
        _add_sync,
        _add_train,
        _add_clients,
        _add_peers,
        _add_adapters,
        _add_live,
        _add_budget,
        _add_scale,
        _add_hops,
        _add_branches,
        _add_attest,
        _add_rounding,
    ):
        add(benches)


def run(arguments: argparse.Namespace) -> int:
    """Runs the benchmark that was chosen; returns its exit code."""
    return int(import_module(f"benchmarks.reports.{arguments.benchmark}").run(arguments))


def _add_loop(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = benches.add_parser("loop", help="alternating against pipelined, on the same two cores")
    parser.add_argument("--config", default="examples/bench_loop.toml")
    parser.add_argument("--out", default="runs/bench-loop")
    parser.add_argument(
        "--seeds",
        type=int,
        default=3,
        help="seeds for each mode; 0 takes only the measurements that need no run",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def _add_codec(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = benches.add_parser("codec", help="the codec against others, on the same weights")
    parser.add_argument(
        "--corpus",
        nargs="+",
        default=[],
        metavar="PLACE",
        help="folders of .npz pairs, or such files (default: synthetic weights)",
    )
    parser.add_argument(
        "--synthetic",
        type=int,
        metavar="WEIGHTS",
        help="synthetic weights to generate (default: 2^28)",
    )
    parser.add_argument(
        "--density", default="0.01,0.03", help="shares of the synthetic weights that change"
    )
    parser.add_argument("--peers", default="all", help="all, none, or names: arc-v3,xor-zstd1")
    parser.add_argument("--threads", default="1,2", help="threads for deltawire's own codings")
    parser.add_argument("--repeats", type=int, default=9, help="runs that medians are taken over")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="stop repeating after this time"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument(
        "--plot", default="", metavar="FILE", help="draw ratio against speed: .svg, .png"
    )


def _add_deltas(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = benches.add_parser("deltas", help="train, and keep pairs of weights to measure on")
    parser.add_argument("config", metavar="CONFIG.toml", help="such as examples/deltas_dense.toml")
    parser.add_argument("--out", required=True, help="the folder for the .npz files")
    parser.add_argument("--kind", choices=("rl", "sft"), default="rl", help="how the model trains")
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[1e-6, 3e-6],
        metavar="RATE",
        help="learning rates",
    )
    parser.add_argument(
        "--strides",
        type=int,
        nargs="+",
        default=[1, 8, 32],
        metavar="STEPS",
        help="steps between the two models of a pair",
    )
    parser.add_argument(
        "--settle", type=int, default=32, metavar="STEPS", help="steps of warm-up for Adam"
    )
    parser.add_argument("--seed", type=int, help="replace the configuration's seed")


def _add_swap(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = benches.add_parser(
        "swap", help="the pause of a swap in vLLM, compared with vLLM's loaders; or a swap on a GPU"
    )
    parser.add_argument(
        "--parameters", type=float, default=100.0, metavar="MILLIONS", help="of the smaller model"
    )
    parser.add_argument("--density", type=float, default=0.01, help="share of weights that change")
    parser.add_argument("--repeats", type=int, default=7, help="swaps that medians are taken over")
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        help="time a swap without an engine on this device: cpu, cuda, cuda:1",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def _add_sync(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = benches.add_parser(
        "sync", help="publishing, following and relaying, compared with other formats"
    )
    parser.add_argument("--size", type=float, default=0.5, metavar="GB", help="of the model")
    parser.add_argument(
        "--region-size", type=float, default=0.032, metavar="GB", help="of the relayed model"
    )
    parser.add_argument(
        "--density", type=float, default=0.01, help="share of the weights that a step changes"
    )
    parser.add_argument("--repeats", type=int, default=5, help="steps that medians are taken over")
    parser.add_argument(
        "--rivals", default="sparse-int32,xor-zstd1", help="formats, named as in bench codec"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--bucket", default="", help="a folder or URL to use (default: temporary)")
    where.add_argument("--s3", action="store_true", help="start an S3 server on loopback")
    parser.add_argument("--threads", type=int, help="threads of the codec (default: all cores)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def _add_keys(
    benches: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    text: str,
    *,
    seed: str,
    repeats: int = 5,
    repeated: str = "steps that medians are taken over",
) -> argparse.ArgumentParser:
    """Declares a benchmark that measures keys, each with a floor."""
    parser = benches.add_parser(name, help=text)
    parser.add_argument("--keys", default="all", help="all, or keys of the table: KEY,KEY")
    parser.add_argument("--seed", type=int, default=0, help=seed)
    parser.add_argument("--repeats", type=int, default=repeats, help=repeated)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    return parser


def _add_train(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_keys(
        benches,
        "train",
        "memory and speed of training steps, each against its floor and its peers",
        seed="the seed of lengths and cases",
    )
    parser.add_argument(
        "--cases", type=int, default=8, help="memory_error_max: steps to draw from the grid"
    )
    parser.add_argument(
        "--real", action="store_true", help="memory_error_max: two more with real allocations"
    )


def _add_clients(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    _add_keys(
        benches,
        "clients",
        "the trainers and SDKs people already have, over a run",
        seed="the seed of weights and data",
        repeats=7,
    )


def _add_peers(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = benches.add_parser("peers", help="the same GRPO job in TRL and in deltawire")
    parser.add_argument(
        "--out", default="runs/bench-peers", help="jobs measured there are not repeated"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--save", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument(
        "--target", type=float, default=0.3, help="the accuracy to which time is measured"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def _add_adapters(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_keys(
        benches,
        "adapters",
        "packed experts and their adapters: memory, speed, bytes, proofs",
        seed="the seed of weights and data",
    )
    parser.add_argument(
        "--cases", type=int, default=1, help="adapter_bytes_growth: GB of the largest adapters"
    )


def _add_live(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_keys(
        benches,
        "live",
        "serving users and learning from them",
        seed="the seed of arrivals and kills",
        repeated="rounds of each measurement, and seeds of satisfaction_gain to measure now",
    )
    parser.add_argument(
        "--out",
        default="runs/bench-live",
        help="the folder of measured seeds and worlds, which are not measured again (%(default)s)",
    )
    parser.add_argument(
        "--canaries",
        type=int,
        default=2000,
        help="canaries of each kind in each world (%(default)s: half an hour of one core)",
    )
    parser.add_argument(
        "--worlds", default="all", help="all, or worlds of simulated canaries: seasons,bursts"
    )


def _add_budget(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = benches.add_parser(
        "budget", help="where compute goes: completions, thinking tokens, steps"
    )
    parser.add_argument("--keys", default="all", help="all, or keys of the table: KEY,KEY")
    parser.add_argument("--seed", type=int, default=0, help="the first seed to measure, of 0 to 4")
    parser.add_argument(
        "--cases", type=int, default=5, help="seeds to measure now; stored ones are not repeated"
    )
    parser.add_argument("--out", default="runs/bench-budget", help="the folder of stored cells")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def _add_scale(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    _add_keys(
        benches,
        "scale",
        "costs that grow with ranks, readers and versions",
        seed="the seed of the weights",
        repeats=1,
        repeated="rounds of commit and fetch that medians are taken over",
    )


def _add_branches(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    _add_keys(
        benches,
        "branches",
        "tools over the versions of a run",
        seed="the seed of the simulated tests",
    )


def _add_attest(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_keys(
        benches,
        "attest",
        "attested weights: bugs named, false alarms, costs, errors of the black box",
        seed="the seed of weights and tokens",
        repeated="steps that medians are taken over",
    )
    parser.add_argument(
        "--out",
        default="runs/bench-attest",
        help="the folder of stored scores, which are not computed again (%(default)s)",
    )


def _add_hops(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = benches.add_parser(
        "hops", help="the rates of every hop of a version, as a file for deltawire plan"
    )
    parser.add_argument("--out", default="", metavar="FILE.json", help="write the rates there")
    parser.add_argument(
        "--precisions", default="bf16,fp8", help="precisions of the codec (%(default)s)"
    )
    parser.add_argument(
        "--stores", default="folder,s3", help="folder, s3 (a local server), URLs (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds that medians are taken over")
    parser.add_argument(
        "--fastest",
        action="store_true",
        help="take the fastest round instead of the median: on a machine with other work",
    )
    parser.add_argument("--seed", type=int, default=0, help="the seed of the values")
    parser.add_argument("--json", action="store_true", help="print the rates as JSON")


def _add_rounding(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = benches.add_parser(
        "rounding", help="which part of an update reaches 16-, 8- and 4-bit weights"
    )
    parser.add_argument(
        "--model", default="models/smollm2-135m", metavar="DIR", help="a bf16 model (%(default)s)"
    )
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[1e-6, 3e-6, 1e-5],
        metavar="RATE",
        help="learning rates",
    )
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[1, 5, 20, 50], help="steps to look after"
    )
    parser.add_argument("--matrices", type=int, default=30, help="matrices to look at")
    parser.add_argument("--seed", type=int, default=0, help="the seed of gradients and dither")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
