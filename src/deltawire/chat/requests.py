"""Builds requests to a model: prompt tokens, tools, sampling settings, bounds of thinking.

Training, evaluation and the gateway all build their requests here, so that users ask the policy as
it was trained and measured::

    environment ─▶ episode of training or evaluation ─────────────▶ RequestBuilder ─▶ engine
    client ─▶ gateway: RequestDefaults ─▶ replica's endpoint ─▶ RequestBuilder ─▶ engine
                                       └▶ vLLM, which renders its own chat template
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from deltawire.chat.messages import Message, Tool, shorten
from deltawire.chat.text import Text
from deltawire.chat.thinking import ThinkingLimits, limits_of
from deltawire.config import RolloutConfig, RunConfig, ThinkingConfig
from deltawire.config.machine import machine_policy
from deltawire.engines.base import EVERYTHING, Sampling, Truncation

EMPTY_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
"""The schema of a function without parameters."""


@dataclass(frozen=True)
class RequestSettings:
    """The sampling settings and limits of a run's requests.

    ``max_tokens`` bounds the drawn tokens of a turn, ``context`` prompt and answer together, and
    ``characters`` the length of a message that the model reads.

    Example::

        RequestSettings(max_tokens=64, context=1024, temperature=0.7)
    """

    max_tokens: int
    context: int
    temperature: float = 1.0
    truncation: Truncation = EVERYTHING
    characters: int = 1_000_000
    thinking: ThinkingConfig | None = None

    @classmethod
    def of(cls, rollout: RolloutConfig) -> RequestSettings:
        """Returns the settings of a configuration."""
        return cls(
            max_tokens=rollout.max_tokens,
            context=rollout.context,
            temperature=rollout.temperature,
            truncation=Truncation(rollout.top_p, rollout.top_k, rollout.min_p),
            characters=rollout.max_characters,
            thinking=rollout.thinking,
        )

    @property
    def largest_budget(self) -> int:
        """The largest budget of thinking, in tokens; 0 without budgets."""
        return 0 if self.thinking is None else self.thinking.largest


def text_of(config: RunConfig, tokenizer: Any, *, bucket: str) -> Text:
    """Returns the text of a run: its tokenizer, system prompt, chat template and its variables.

    ``bucket`` is the address that configuration and tokenizer were read from, empty if they are
    files of this machine; the chat template of a bucket is untrusted, unless this machine's policy
    trusts it.
    """
    chat = config.chat
    trusted = not bucket or machine_policy().trusted_templates
    return Text(
        tokenizer,
        system=chat.system,
        template=chat.template,
        template_kwargs=chat.template_kwargs,
        origin="" if trusted else f"the run in {bucket}",
    )


class RequestBuilder:
    """Builds the requests of one conversation whose turns have one ``budget`` of thinking.

    Example::

        builder = RequestBuilder(text, RequestSettings.of(config.rollout))
        prompt = builder.prompt([Message("user", "What is 2 + 3?")])
        completion = await engine.generate(prompt, builder.sampling(len(prompt)))
    """

    def __init__(self, text: Text, settings: RequestSettings, *, budget: int = 0) -> None:
        self.settings = settings
        self._text = text
        self._budget = budget

    @cached_property
    def bounds(self) -> ThinkingLimits | None:
        """The bounds of a turn's thinking; None if the settings have no budgets. Raises
        `InputError` if they have, and the model has no marks of thinking."""
        thinking = self.settings.thinking
        return None if thinking is None else limits_of(self._text, thinking, self._budget)

    def shortened(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Returns the messages, none of them longer than the settings allow."""
        return tuple(shorten(message, self.settings.characters) for message in messages)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Returns the tokens that begin a conversation; they tell the budget if the run does.

        Raises `InputError` if the chat template refuses the messages.
        """
        tokens = self._text.prompt(self._told(messages), tools)
        return [*tokens, *self._control_tokens()]

    def bridge(self, messages: Sequence[Message], *, after: Sequence[int]) -> list[int]:
        """Returns the tokens between the model's last token ``after[-1]`` and its next turn.

        Raises `InputError` if the chat template refuses the messages.
        """
        return self._text.bridge(messages, after=after)

    def room(self, length: int, *, reserve: int = 0) -> int:
        """Returns how many tokens may follow ``length`` tokens of context; it may be negative."""
        return self.settings.context - length - reserve

    def sampling(
        self,
        length: int,
        *,
        max_tokens: int = 0,
        reserve: int = 0,
        think: bool = True,
        seed: int | None = None,
    ) -> Sampling:
        """Returns the sampling settings of the turn after ``length`` tokens of context.

        ``max_tokens`` replaces the settings'; ``reserve`` tokens of the context stay free. Tokens
        that close thinking by force are not drawn, so they come on top.
        """
        settings = self.settings
        wanted = max_tokens or settings.max_tokens
        if think and self.bounds is not None:
            wanted += len(self.bounds.format.forced)
        room = self.room(length, reserve=reserve)
        most = max(1, min(wanted, room))
        return Sampling(most, settings.temperature, settings.truncation, seed)

    def _told(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages, the last of which says the budget."""
        config, told = self.settings.thinking, list(messages)
        if config is None or not config.tell or config.tell_as != "message" or not told:
            return told
        said = config.tell.replace("{budget}", str(self._budget))
        told[-1] = replace(told[-1], content=f"{told[-1].content}{said}")
        return told

    def _control_tokens(self) -> list[int]:
        """Returns the tokens that say the budget at the start of the turn."""
        config = self.settings.thinking
        if config is None or not config.tell or config.tell_as != "tokens":
            return []
        return self._text.spell(config.tell.replace("{budget}", str(self._budget)))


@dataclass(frozen=True)
class RequestDefaults:
    """A run's settings as options of OpenAI's requests, for a replica behind HTTP.

    Requests that leave them out get them. Without ``settings`` tokens are drawn from the whole
    distribution at temperature 1. ``system`` and ``variables`` are those of `ChatConfig`.

    Example::

        defaults = RequestDefaults.of(config)
        body = defaults.filled_in(body, chat=True)
    """

    settings: RequestSettings | None = None
    system: str = ""
    variables: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: RunConfig) -> RequestDefaults:
        """Returns the defaults of a run."""
        settings = RequestSettings.of(config.rollout)
        return cls(settings, config.chat.system, config.chat.template_kwargs)

    def sampling(self) -> dict[str, float | int]:
        """Returns the settings that decide which tokens are drawn, by the names of requests."""
        settings = self.settings
        temperature = 1.0 if settings is None else settings.temperature
        truncation = EVERYTHING if settings is None else settings.truncation
        return {"temperature": temperature, **truncation._asdict()}

    def filled_in(self, body: Mapping[str, Any], *, chat: bool) -> dict[str, Any]:
        """Returns a request with what it leaves out. Chats get the run's system prompt and template
        variables, and tools in the form in which training renders them; malformed members stay as
        they are, for the replica to refuse."""
        found = dict(body)
        for name, value in self.sampling().items():
            if found.get(name) is None:
                found[name] = value
        stated = (found.get("max_tokens"), found.get("max_completion_tokens"))
        if self.settings is not None and stated == (None, None):
            found["max_tokens"] = self.settings.max_tokens
        if not chat:
            return found
        messages = found.get("messages")
        if self.system and isinstance(messages, list) and not _begins_with_system(messages):
            found["messages"] = [{"role": "system", "content": self.system}, *messages]
        if isinstance(found.get("tools"), list):
            found["tools"] = [_as_rendered(tool) for tool in found["tools"]]
        own = found.get("chat_template_kwargs")
        if self.variables and (own is None or isinstance(own, dict)):
            found["chat_template_kwargs"] = {**self.variables, **(own or {})}
        return found


def _begins_with_system(messages: list[Any]) -> bool:
    first = messages[0] if messages else None
    return isinstance(first, dict) and first.get("role") in ("system", "developer")


def _as_rendered(tool: Any) -> Any:
    """Returns a tool of a request as `Tool.schema` spells it."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return tool
    description = function.get("description") or ""
    parameters = function.get("parameters") or EMPTY_PARAMETERS
    if not isinstance(description, str) or not isinstance(parameters, dict):
        return tool
    return Tool(function["name"], description, parameters).schema
