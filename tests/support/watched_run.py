"""Writes the bucket of a run as trainer, workers and evaluator would leave it, in a second or two.

Weights, manifests, groups and events go through the real encoders. Rewards rise, one worker dies
and comes back, another one falls silent.
"""

from __future__ import annotations

import math
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
from heartbeats import put_heartbeat

from deltawire import codec
from deltawire.events import (
    Evaluated,
    Event,
    Gaps,
    Generated,
    HeldoutScore,
    Life,
    Parity,
    Published,
    Span,
    Step,
    Swapped,
    encode_lines,
)
from deltawire.parity.routes import pack_routes
from deltawire.store import Bucket, open_bucket
from deltawire.sync import Mirror, Publisher, create_run, read_manifest
from deltawire.sync.chain.objects import put_blob
from deltawire.wire import keys
from deltawire.wire.ledger import CommitMetadata
from deltawire.wire.objects import encode_json
from deltawire.wire.reference_scores import ReferenceScores, encode_scores
from deltawire.wire.rollouts import Group, Trajectory, encode_group
from deltawire.wire.run import ModelFile, Run, TensorSpec, new_id
from deltawire.wire.status import Incident, TrainerStatus

LAYERS = 6
PARTS = {
    "self_attn.q_proj.weight": (32, 32),
    "self_attn.k_proj.weight": (16, 32),
    "self_attn.v_proj.weight": (16, 32),
    "self_attn.o_proj.weight": (32, 32),
    "mlp.gate_proj.weight": (64, 32),
    "mlp.up_proj.weight": (64, 32),
    "mlp.down_proj.weight": (32, 64),
    "input_layernorm.weight": (32,),
}
TENSORS = [
    TensorSpec("model.embed_tokens.weight", (256, 32), "BF16"),
    *(
        TensorSpec(f"model.layers.{layer}.{name}", shape, "BF16")
        for layer in range(LAYERS)
        for name, shape in PARTS.items()
    ),
    TensorSpec("model.norm.weight", (32,), "BF16"),
]
STEP_S = 6.0
GROUPS = 4
WORKERS = ("worker-a", "worker-b", "worker-c")
FAMILIES = ("arithmetic", "tools", "logic")
HOSTILE = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>'
HOSTILE_TASK = f"'\"--=1+1 \u202egnp.{HOSTILE}"
CONFIG: dict[str, Any] = {
    "name": "watched",
    "seed": 7,
    "model": {"path": "models/qwen3-tiny"},
    "task": {"heldout": 64},
    "rollout": {"group_size": 4, "max_tokens": 256, "context": 1024},
    "train": {"max_staleness": 4, "groups_per_step": GROUPS},
}


def tokenizer() -> Any:
    """A small BPE tokenizer with the special tokens of ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core: Any = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [text for number in range(60) for text in _texts(random.Random(number), number)]
    core.train_from_iterator(corpus, trainer)
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def _texts(rng: random.Random, number: int) -> tuple[str, str, str, str]:
    """A question, thinking, a call's answer, and an answer."""
    a, b = rng.randrange(10, 99), rng.randrange(10, 99)
    question = f"What is {a} × {b}? Show your work, then give the number — in one line."
    thought = (
        f"I need {a} times {b}. {a} × {b // 10 * 10} is {a * (b // 10 * 10)}, and "
        f"{a} × {b % 10} is {a * (b % 10)}. Together that makes {a * b}."
    )
    right = rng.random() < 0.2 + number / 400
    return question, thought, str(a * b), f"The answer is **{a * b if right else a * b + 10}**."


def write_run(
    place: Path | Bucket,
    *,
    versions: int = 300,
    name: str = "watched",
    seed: int = 7,
    hostile: bool = False,
    now: float | None = None,
    config: dict[str, Any] | None = None,
) -> Bucket:
    """Write a run of so many versions that ends ``now``, and return its bucket."""
    bucket = open_bucket(str(place), create=True) if isinstance(place, Path) else place
    writer = _Writer(bucket, versions, name, seed, hostile, now or time.time(), config or CONFIG)
    writer.write()
    return bucket


class _Writer:
    def __init__(self, bucket, versions, name, seed, hostile, now, config) -> None:
        self.bucket = bucket
        self.versions, self.hostile, self.now = versions, hostile, now
        self.rng = random.Random(seed)
        self.noise = np.random.default_rng(seed)
        self.begins = now - STEP_S * (versions + 2)
        self.tokenizer = tokenizer()
        self.values = {
            spec.name: (0.02 * self.noise.standard_normal(spec.count)).astype(np.float32)
            for spec in TENSORS
        }
        flat = {key: _bf16(value) for key, value in self.values.items()}
        settings = config | {"name": name, "seed": seed}
        settings["train"] = settings["train"] | {"versions": versions + 20}
        self.pairs = "preference" in settings["train"].get("loss", {})
        run = Run(
            id=new_id(),
            name=HOSTILE[:64] if hostile else name,
            created_at=self.begins,
            tensors=TENSORS,
            digest=codec.digest_model(flat).hex(),
            model_files=self._files(),
            config=settings,
        )
        self.run = create_run(self.bucket, run)
        blank = {spec.name: np.zeros(spec.count, np.uint16) for spec in TENSORS}
        self.publisher = Publisher(
            self.bucket, self.run, Mirror(blank, -1, codec.ZERO), epoch=0, threads=1
        )
        self.sequences = dict.fromkeys(WORKERS, 0)
        self.trainer: list[Event] = []
        self.workers: dict[str, list[Event]] = {worker: [] for worker in WORKERS}
        self.evaluator: list[Event] = []

    def _files(self) -> list[ModelFile]:
        import tempfile

        with tempfile.TemporaryDirectory() as place:
            self.tokenizer.save_pretrained(place)
            found = []
            for path in sorted(Path(place).glob("*.json")):
                ref = put_blob(self.bucket, path.read_bytes())
                found.append(ModelFile(name=path.name, blob=ref.hash, bytes=ref.bytes))
        return found

    def write(self) -> None:
        """Publish every version, with its groups and events."""
        self._life("trainer", self.begins, "trainer", self.trainer)
        for worker in WORKERS:
            self._life(worker, self.begins + 1, "worker", self.workers[worker])
        self._life("evaluator", self.begins + 1, "evaluator", self.evaluator)
        self.publisher.publish(self._bits())
        for version in range(1, self.versions + 1):
            self._version(version)
        self.publisher.close()
        self._store()

    def _bits(self) -> dict[str, Any]:
        return {spec.name: _bf16(self.values[spec.name]).reshape(spec.shape) for spec in TENSORS}

    def _life(self, process, at, role, events, what="started", detail="") -> None:
        events.append(
            Life(process=process, at=at, role=role, what=what, host="gpu-1", detail=detail)
        )

    def _version(self, version: int) -> None:
        at = self.begins + STEP_S * version
        share = version / self.versions
        level = 0.15 + 0.7 * (1 - math.exp(-3 * share))
        groups = [self._group(version, number, level, at) for number in range(GROUPS)]
        for spec in TENSORS:
            step = (
                2e-4 * (1 + 0.4 * math.sin(version / 17)) * self.noise.standard_normal(spec.count)
            )
            moved = self.noise.random(spec.count) < 0.05
            self.values[spec.name] += np.where(moved, step, 0).astype(np.float32)
        consumed = [(worker, sequence) for worker, sequence, _ in groups]
        metadata = CommitMetadata(step=version, consumed=consumed).to_dict()
        self.publisher.publish(self._bits(), metadata=metadata)
        self.publisher.flush()
        manifest = read_manifest(self.bucket, self.run, version)
        assert manifest is not None
        rewards = [reward for _, _, reward in groups]
        self._trainer_events(version, at, sum(rewards) / len(rewards), manifest)
        if version % 20 == 0 or version == 1:
            self._evaluation(version, at, level)
        if version == self.versions // 2:
            dead = "worker-b"
            detail = "killed: no sign of life for 31 s"
            self._life(dead, at, "worker", self.workers[dead], "died", detail)
            self._life(dead, at + 4, "worker", self.workers[dead], "restarted")

    def _trainer_events(self, version: int, at: float, reward: float, manifest: Any) -> None:
        ages = [self.rng.choice((0, 0, 1, 1, 1, 2, 3)) for _ in range(GROUPS)]
        queued = [max(0, age - self.rng.randrange(2)) for age in ages]
        elements = sum(spec.count for spec in TENSORS)
        busy = STEP_S * (0.55 + 0.1 * math.sin(version / 9))
        self.trainer += [
            Span(process="trainer", activity="wait", start=at - STEP_S, end=at - busy),
            Span(process="trainer", activity="train", start=at - busy, end=at - 0.4),
            Span(process="trainer", activity="publish", start=at - 0.4, end=at),
            Step(
                process="trainer",
                at=at,
                version=version,
                groups=GROUPS,
                dropped=int(version % 9 == 0),
                reward_mean=reward,
                loss=self.rng.gauss(0.0, 0.02),
                grad_norm=0.3 + self.rng.random() / 5,
                k3=abs(self.rng.gauss(2e-4, 5e-5)),
                ratio_max=1.2 + self.rng.random() / 3,
                clipped=0.01,
                staleness=ages,
                queued=queued,
                tokens=1200 + self.rng.randrange(400),
                seconds=busy,
                entropy=1.1 - 0.5 * version / self.versions,
                completion_length=140 + 60 * version / self.versions + self.rng.gauss(0, 6),
                truncated=0.02,
                reward_spread=0.4,
                zero_advantage=0.25,
                pairs=self.rng.randrange(4, 9) if self.pairs else None,
                causes={"stale": 1} if version % 9 == 0 else {},
            ),
            Published(
                process="trainer",
                at=at,
                version=version,
                bytes_delta=manifest.delta.bytes,
                bytes_full=2 * elements,
                bytes_anchor=manifest.anchor.bytes if manifest.anchor else 0,
                changed=int(0.031 * elements),
                elements=elements,
                blocked_ms=12.0 + self.rng.random(),
                encode_ms=30.0,
                upload_ms=80.0,
            ),
            Parity(
                process="trainer",
                at=at,
                version=version,
                numeric=_gaps(self.rng),
                drift=_gaps(self.rng),
                flipped=[0.01 + 0.002 * layer for layer in range(4)],
                warnings=["mean_gap 0.02 > 0.01"] if version == self.versions - 3 else [],
                masked=[f"worker-a/{self.sequences['worker-a'] - 1}#1"]
                if version % 50 == 0
                else [],
            ),
        ]
        for worker in WORKERS:
            self.workers[worker] += [
                Span(process=worker, activity="sample", start=at - STEP_S + 0.6, end=at - 0.2),
                Span(process=worker, activity="swap", start=at - 0.2, end=at),
                Span(process=worker, activity="wait", start=at - STEP_S, end=at - STEP_S + 0.6),
                Swapped(
                    process=worker, at=at, version=version, running=6, swap_ms=3.5, prepare_ms=40.0
                ),
            ]

    def _evaluation(self, version: int, at: float, level: float) -> None:
        def score(accuracy: float) -> HeldoutScore:
            return HeldoutScore(
                accuracy=accuracy,
                greedy=min(1, accuracy + 0.03),
                reward=accuracy,
                samples=4,
                problems=64,
            )

        sets = {"arithmetic": score(min(1, level + 0.05)), "logic": score(level * 0.8)}
        if self.hostile:
            sets[HOSTILE] = score(0.5)
        self.evaluator += [
            Span(process="evaluator", activity="evaluate", start=at - 9, end=at),
            Evaluated(
                process="evaluator",
                at=at,
                version=version,
                accuracy=level,
                greedy=level,
                problems=128,
                samples=4,
                seconds=9.0,
                reward=level,
                sets=sets,
            ),
        ]

    def _group(self, version: int, number: int, level: float, at: float) -> tuple[str, int, float]:
        worker = WORKERS[(version * GROUPS + number) % len(WORKERS)]
        sequence = self.sequences[worker]
        self.sequences[worker] += 1
        kind = FAMILIES[number % len(FAMILIES)]
        problem = (version * 3 + number) % 24
        sampled = max(0, version - 1 - number % 3)
        failed = version % 13 == 0 and number == 3
        prompt, trajectories = self._episodes(kind, problem, sampled, level, failed)
        task = HOSTILE_TASK if self.hostile and number == 0 else f"{kind}/problem-{problem:03}"
        group = Group(
            worker, f"n{sequence}", task, 1.0, np.array(prompt, np.int32), trajectories, kind
        )
        data = encode_group(group)
        self.bucket.put(keys.rollout(worker, sequence), data)
        if number == 0 and version % 10 == 0:
            self._reference(worker, sequence, data, group)
        rewards = [t.reward for t in trajectories if not t.cause]
        mean = sum(rewards) / len(rewards)
        self.workers[worker].append(
            Generated(
                process=worker,
                at=at - 1.0 + 0.1 * number,
                sequence=sequence,
                versions=[sampled],
                reward_mean=mean,
                tokens=group.tokens,
                failed=int(failed),
                cause="the scorer took longer than 5 s" if failed else "",
            )
        )
        return worker, sequence, mean

    def _episodes(self, kind, problem, sampled, level, failed):
        encode = self.tokenizer.encode
        rng = random.Random(problem)
        question, thought, result, answer = _texts(rng, problem)
        system = "You are a careful assistant."
        prompt = encode(
            f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        trajectories = []
        for index in range(4):
            right = self.rng.random() < level
            parts = [(1, f"<think>\n{thought}\n</think>\n\n")]
            if kind == "tools":
                arguments = '{"name": "multiply", "arguments": {"a": 12, "b": 34}}'
                call = f"<tool_call>\n{arguments}\n</tool_call>"
                parts[0] = (1, parts[0][1] + call + "<|im_end|>")
                told = f"<tool_response>\n{result}\n</tool_response>"
                turn = f"\n<|im_start|>user\n{told}<|im_end|>\n<|im_start|>assistant\n"
                parts.append((0, turn))
            text = answer if right else "I think it is **41**, but I am not sure."
            if self.hostile:
                text += f" {HOSTILE} <|im_end|> javascript:alert(1) \u202eabc"
            parts.append((1, text))
            tokens, mask = [], []
            for drawn, part in parts:
                ids = encode(part)
                tokens += ids
                mask += [drawn] * len(ids)
            tokens.append(self.tokenizer.eos_token_id)
            mask.append(1)
            mask_T = np.array(mask, np.uint8)
            logprobs = -self.noise.exponential(0.35, len(tokens)).astype(np.float32)
            versions_T = np.full(len(tokens), sampled, np.int32)
            versions_T[len(tokens) // 2 :] += 1
            broken = failed and index == 0
            trajectories.append(
                Trajectory(
                    np.array(tokens, np.int32),
                    np.where(mask_T == 1, logprobs, 0).astype(np.float32),
                    np.where(mask_T == 1, versions_T, 0).astype(np.int32),
                    mask_T,
                    0.0 if broken else float(right),
                    "error" if broken else "stop",
                    index,
                    None,
                    2 if kind == "tools" else 1,
                    "the scorer took longer than 5 s" if broken else "",
                    {"short": 0.5},
                    self._routes(len(prompt) + len(tokens) - 1) if kind == "logic" else b"",
                )
            )
        return prompt, trajectories

    def _routes(self, positions: int) -> bytes:
        choices = np.argsort(self.noise.random((positions, 4, 8)), axis=2)[:, :, :2]
        return pack_routes(choices.astype(np.int32), experts=8)

    def _reference(self, worker: str, sequence: int, data: bytes, group: Group) -> None:
        from blake3 import blake3

        key = keys.reference(worker, sequence)
        trained = {place for place, _, _ in group.trained()}
        shifted = [
            (
                np.minimum(t.logprobs_T - 0.05 * self.noise.standard_normal(len(t.mask_T)), 0)
                * t.mask_T
            )
            .astype("<f4")
            .tobytes()
            if place in trained
            else b""
            for place, t in enumerate(group.trajectories)
        ]
        scores = ReferenceScores(
            run=self.run.id,
            worker=worker,
            sequence=sequence,
            group=blake3(data).hexdigest()[:32],
            model=self.run.digest,
            logprobs=shifted,
        )
        self.bucket.put(key, encode_scores(scores, key=key))

    def _shifted(self, trajectory: Trajectory) -> bytes:
        moved = trajectory.logprobs_T - 0.05 * self.noise.standard_normal(len(trajectory.mask_T))
        return bytes((np.minimum(moved, 0) * trajectory.mask_T).astype("<f4").tobytes())

    def _store(self) -> None:
        streams = {"trainer-1": self.trainer, "evaluator-1": self.evaluator}
        streams |= {f"{worker}-1": events for worker, events in self.workers.items()}
        for stream, events in streams.items():
            for number in range(0, len(events), 400):
                lines = encode_lines(events[number : number + 400])
                self.bucket.put(keys.events(stream, number // 400), lines)
        newest = self.versions
        put_heartbeat(self.bucket, "trainer", "trainer", at=self.now, doing="train")
        put_heartbeat(self.bucket, "evaluator", "evaluator", at=self.now, doing="evaluate")
        for place, worker in enumerate(WORKERS):
            late = 400.0 if place == 2 else 0.5
            put_heartbeat(
                self.bucket,
                worker,
                at=self.now - late,
                version=newest - place,
                lag=place,
                stored=self.sequences[worker],
                host=f"gpu-{place + 1}",
            )
        detail = HOSTILE if self.hostile else "a group with a nonce of another lease"
        status = TrainerStatus(
            phase="training",
            version=newest,
            digest="",
            epoch=1,
            at=self.now,
            credits={worker: count + 2 for worker, count in self.sequences.items()},
            incidents=[Incident(worker="worker-c", kind="forged group", count=2, detail=detail)],
        )
        self.bucket.put(keys.TRAINER, encode_json(status))


def _gaps(rng: random.Random) -> Gaps:
    k3 = abs(rng.gauss(2e-4, 5e-5))
    return Gaps(
        tokens=900,
        k1=k3,
        k3=k3,
        k1_reverse=k3,
        k3_reverse=k3,
        k3_swapped=k3,
        mean_gap=0.004,
        largest_gap=0.1 + rng.random() / 10,
        ratio_max=1.3,
        extreme_share=0.0,
        effective_share=0.99,
    )


def _bf16(values: np.ndarray) -> np.ndarray:
    """Round float32 to the bits of bf16."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
