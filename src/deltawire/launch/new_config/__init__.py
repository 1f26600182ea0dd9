"""Writes the first configuration of a run: commented, for a model, a task and a machine."""

from deltawire.launch.new_config.document import Document
from deltawire.launch.new_config.new_run import Wishes, new_config, write_new
from deltawire.launch.new_config.size import this_machine

__all__ = ["Document", "Wishes", "new_config", "this_machine", "write_new"]
