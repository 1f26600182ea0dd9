"""One episode of an agent in a workspace: its tool calls, and the final reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deltawire.chat.messages import Message, Tool, ToolCall
from deltawire.envs.base import Action, Environment, Turn
from deltawire.envs.sandbox.box import Outcome, Sandbox
from deltawire.envs.workspace import tools
from deltawire.envs.workspace.grader import grade
from deltawire.envs.workspace.problems import Problem
from deltawire.envs.workspace.settings import WorkspaceSettings

PROMPT = """\
The Python package {package} in this workspace has a fault: some of its tests fail. Find the \
fault and repair it in the package. Each function must do what its docstring says, for other \
inputs than those in the tests, too; you are graded by tests that you do not see. The tests are \
run by `python -m unittest -q`. Call submit when you are done; you have {turns} turns.
"""
NO_CALL = "Nothing was done: call one of the tools, or submit.\n"
LAST = "The turns are used up; the workspace is graded as it is."


class Workspace(Environment):
    """One episode. The reward comes at the end: 1 if every hidden case passes, else 0, minus a
    fixed cost for each broken call.

    The files are a value of this object; each command runs over a copy of it in a fresh sandbox.

    Example::

        episode = Workspace(problem("heldout/0"), Sandbox(), WorkspaceSettings())
        prompt = await episode.reset()
    """

    def __init__(self, problem: Problem, sandbox: Sandbox, settings: WorkspaceSettings) -> None:
        self.problem = problem
        self.settings = settings
        self.files = dict(problem.files)
        self._sandbox = sandbox
        self._turns = 0
        self._idle = 0
        self._broken = 0
        self._paid = 0.0
        self._score: float | None = None
        self._probes: dict[str, float] = {}

    @property
    def tools(self) -> Sequence[Tool]:
        """The tools: list, read, search, edit, run, submit."""
        return tools.TOOLS

    def prompt(self) -> str:
        """The prompt of the agent."""
        text = PROMPT.format(package=self.problem.package, turns=self.settings.turns)
        return text + tools.described() if self.settings.describe_tools else text

    async def reset(self) -> Turn:
        """Describes the task; the agent reads the files by its tools."""
        return Turn(self.prompt())

    async def step(self, action: Action) -> Turn:
        """Runs the calls in order; a broken call has a cost, and is answered."""
        self._turns += 1
        said: list[Message] = []
        cost = self._charge(len(action.broken))
        said += [
            Message("user", f"This is not a valid tool call: {piece[:200]}")
            for piece in action.broken
        ]
        for call in action.calls:
            if call.name == tools.SUBMIT.name:
                return await self._end("Submitted.", cost)
            text, fault = await self._do(call)
            cost += self._charge(int(fault))
            said.append(Message("tool", f"{text}\n", name=call.name, call=call.identity))
        self._idle = 0 if action.calls else self._idle + 1
        if self._turns >= self.settings.turns or self._idle >= self.settings.idle_turns:
            return await self._end(LAST, cost)
        return Turn(said or NO_CALL, -cost)

    async def _do(self, call: ToolCall) -> tuple[str, bool]:
        """The tool's answer, and whether the call named no tool."""
        arguments, limits = call.arguments, self.settings.limits
        try:
            if call.name == tools.LIST.name:
                return tools.list_files(self.files), False
            if call.name == tools.READ.name:
                return self._read(arguments), False
            if call.name == tools.SEARCH.name:
                return tools.search(self.files, arguments), False
            if call.name == tools.EDIT.name:
                return tools.edit_file(self.files, arguments, limits), False
            if call.name == tools.RUN.name:
                return await self._run(tools.text_argument(arguments, "command")), False
        except tools.Refused as refusal:
            return f"error: {refusal}", False
        return f"error: there is no tool {call.name[:80]!r}", True

    def _read(self, arguments: Mapping[str, object]) -> str:
        return tools.read_file(self.files, arguments)

    async def _run(self, command: str) -> str:
        if "\0" in command or len(command) > tools.MAX_COMMAND:
            raise tools.Refused("such a command cannot be run")
        outcome = await self._sandbox.run(command, self.files, limits=self.settings.limits)
        self.files = outcome.files
        return describe_outcome(outcome)

    def _charge(self, calls: int) -> float:
        """The cost of broken calls; in total at most half of the reward for solving."""
        self._broken += calls
        cost = min(calls * self.settings.broken_call_cost, 0.5 - self._paid)
        self._paid += cost
        return cost

    async def _end(self, text: str, cost: float) -> Turn:
        self._score, self._probes = await self.evaluate()
        return Turn(text, self._score - cost, done=True)

    async def evaluate(self) -> tuple[float, dict[str, float]]:
        """Grades the workspace: the score, 0 to 1, and the probes."""
        graded = await grade(
            self._sandbox,
            self.files,
            [self.problem.hidden, self.problem.heldout],
            self.settings.limits,
        )
        score = float(graded.all_right(0))
        return score, {"heldout_tests": float(graded.all_right(1)), **self.alarms(score)}

    def alarms(self, score: float) -> dict[str, float]:
        """Signs of cheating, 1 each: tests of the package changed, broken calls in more than half
        of the turns, a reward for an untouched package."""
        package = f"{self.problem.package}/"
        same = all(
            self.files.get(path) == data
            for path, data in self.problem.files.items()
            if path.startswith(package)
        )
        return {
            "alarm.tests_edited": float(self.tests_edited()),
            "alarm.broken_calls": float(2 * self._broken > max(1, self._turns)),
            "alarm.nothing_done": float(same and score > 0),
        }

    def tests_edited(self) -> bool:
        """Returns whether one of the package's tests was changed or removed."""
        tests = {p: d for p, d in self.problem.files.items() if p.startswith("tests/")}
        return any(self.files.get(path) != data for path, data in tests.items())

    async def probes(self) -> Mapping[str, float]:
        """The probes of `evaluate`; empty if the episode ended before it was graded."""
        return self._probes

    def solved(self, total_reward: float) -> bool:
        """Returns whether every hidden case passed, regardless of the cost of broken calls."""
        del total_reward
        return self._score is not None and self._score >= 1.0


def describe_outcome(outcome: Outcome) -> str:
    """Describes a command's outcome for the model."""
    text = outcome.output.decode(errors="replace")
    if outcome.printed > len(outcome.output):
        text += f"\n(only part of the {outcome.printed} bytes that it printed)"
    if outcome.cause:
        return f"{text}\n(ended: it exceeded the limit of {outcome.cause})"
    return f"{text}\n(exit code {outcome.status})"
