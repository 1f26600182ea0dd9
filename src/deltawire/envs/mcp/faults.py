"""The ways in which a server of tools fails: in one call, or for the whole episode."""


class CallFaultError(Exception):
    """One call failed; the message is for the model, and the episode goes on."""


class UnreadableAnswerError(CallFaultError):
    """The server answered, with something that the model cannot read: an image, or too much."""


class ToolServerError(Exception):
    """The server cannot be used any more; the episode has failed."""
