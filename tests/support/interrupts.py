"""Ctrl-C in a session of tests that runs in the background."""

import signal


def hear_interrupts():
    """Lets Ctrl-C interrupt again where a shell made a background job of this session: children
    inherit that, and tests interrupt theirs."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
