"""Settings of a workspace: ``task.options`` of a configuration."""

from __future__ import annotations

import math
import os
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from deltawire.config.machine import MachinePolicy
from deltawire.envs.sandbox.box import CommandLimits, Isolation
from deltawire.errors import InputError

Loophole = Literal["none", "editable_tests", "readable_answers", "printed_ok"]

_MIB = 1 << 20


class WorkspaceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The limits of a workspace and the rules that end its episodes.

    An episode ends after ``idle_turns`` turns in a row without a call. ``loophole`` plants a way to
    earn the reward without solving the task, for tests of the probes.

    Example::

        settings = WorkspaceSettings.of({"turns": 20, "wall_s": 5.0})
    """

    turns: Annotated[int, Meta(ge=1, le=10_000)] = 50
    idle_turns: Annotated[int, Meta(ge=1, le=10_000)] = 3
    describe_tools: bool = False
    """True to explain the tools in the prompt, for models without a chat template."""
    broken_call_cost: Annotated[float, Meta(ge=0, le=1)] = 0.02
    isolation: Isolation = "namespaces"
    at_once: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Commands that one worker runs at a time; 0 for four a processor."""
    wall_s: Annotated[float, Meta(gt=0, le=3600)] = 20.0
    cpu_s: Annotated[float, Meta(gt=0, le=3600)] = 20.0
    cores: Annotated[int, Meta(ge=1, le=1024)] = 1
    memory_mib: Annotated[int, Meta(ge=32, le=1 << 20)] = 512
    processes: Annotated[int, Meta(ge=1, le=1 << 15)] = 32
    disk_mib: Annotated[int, Meta(ge=1, le=1 << 14)] = 16
    files: Annotated[int, Meta(ge=16, le=100_000)] = 1000
    output_kib: Annotated[int, Meta(ge=1, le=1024)] = 16
    loophole: Loophole = "none"

    @property
    def limits(self) -> CommandLimits:
        """The limits of each command."""
        return CommandLimits(
            wall_s=self.wall_s,
            cpu_s=self.cpu_s,
            cores=self.cores,
            memory_bytes=self.memory_mib * _MIB,
            processes=self.processes,
            disk_bytes=self.disk_mib * _MIB,
            files=self.files,
            output_bytes=self.output_kib << 10,
        )

    def within(self, policy: MachinePolicy) -> WorkspaceSettings:
        """These settings, within what this machine allows. Raises `InputError` for isolation that
        is weaker than that."""
        policy.require_isolation(self.isolation)
        names = msgspec.structs.fields(policy.ceilings)
        bounded = {
            field.name: type(getattr(self, field.name))(
                policy.at_most(field.name, getattr(self, field.name) or math.inf)
            )
            for field in names
            if field.name != "at_once"
        }
        # 0 asks for a number that follows from the processors; the ceiling holds for that too.
        at_once = self.at_once or 4 * (os.cpu_count() or 1)
        bounded["at_once"] = int(policy.at_most("at_once", at_once))
        return msgspec.structs.replace(self, **bounded)

    @classmethod
    def of(cls, options: dict[str, Any]) -> WorkspaceSettings:
        """Parses ``task.options``; raises `InputError` that names the option."""
        try:
            return msgspec.convert(options, cls)
        except msgspec.ValidationError as error:
            raise InputError(f"task.options of a workspace: {error}") from error
