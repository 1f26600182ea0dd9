"""A plugin that takes away what deltawire hooks into, as a version would that has renamed it."""


def register():
    """Called by SGLang in each of its processes."""
    import sglang.srt.managers.schedule_batch as module

    del module.Req.init_next_round_input
