"""``deltawire`` whose environment, engine or main loop hangs or breaks when it is told to.

SIGUSR1 chooses the environment's next step, SIGUSR2 the engine's; which of the hangs it is goes by
turns. Everything else is as it is.
"""

import itertools
import signal
import sys
import threading
import time

from deltawire.cli import main as cli

due = {"environment": 0, "engine": 0}


def raise_error():
    raise RuntimeError("broken on purpose")


def deadlock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


WAYS = itertools.cycle([lambda: time.sleep(3600), raise_error, deadlock])


def strike(what):
    if due[what]:
        due[what] -= 1
        next(WAYS)()


def plant():
    from deltawire.engines.transformers import TransformersEngine
    from deltawire.envs import reasoning

    env = next(
        value
        for value in vars(reasoning).values()
        if isinstance(value, type) and hasattr(value, "step") and hasattr(value, "solved")
    )
    step, decode = env.step, TransformersEngine.step

    async def faulty_step(self, *arguments, **named):
        strike("environment")
        return await step(self, *arguments, **named)

    def faulty_decode(self, *arguments, **named):
        strike("engine")
        return decode(self, *arguments, **named)

    env.step, TransformersEngine.step = faulty_step, faulty_decode


def on_signal(number, frame):
    due["environment" if number == signal.SIGUSR1 else "engine"] += 1


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, on_signal)
    signal.signal(signal.SIGUSR2, on_signal)
    if sys.argv[1:2] == ["worker"]:
        plant()
    sys.exit(cli.main())
