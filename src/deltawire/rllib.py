"""Publishes the policy of an RLlib algorithm at each of its iterations.

::

    from functools import partial
    from deltawire.rllib import Publish

    config.callbacks(callbacks_class=partial(Publish, "s3://bucket/run"))

RLlib has no path for language models: it trains PyTorch modules for control, games and robots. Any
process with the bucket's address follows those modules, without a connection to the Ray cluster.

Importing this module needs ``ray[rllib]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from ray.rllib.callbacks.callbacks import RLlibCallback
from torch import Tensor

from deltawire.errors import InputError
from deltawire.sync import open_publisher
from deltawire.sync.publish.commit import STEP_RECORD

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm import Algorithm

    from deltawire.sync.publish.publisher import Publisher

MAX_MODULES = 16
"""The most module ids that an error names."""


class Publish(RLlibCallback):  # type: ignore[misc]
    """A callback that publishes an algorithm's modules to the run at ``run``.

    Version 0 of a new run holds the initial weights; every ``every`` iterations add a version,
    whose metadata states the iteration. An existing run of the same modules is continued. Tensors
    have the names that the modules give them; with several modules, each name begins with the
    module's id and a dot. ``module`` names the only one to publish. ``dtype`` is what
    floating-point weights are rounded to; None keeps float32, of which an iteration changes nearly
    every weight, while most bfloat16 weights stay.

    RLlib makes an instance for the algorithm and for each process that samples; only the
    algorithm's publishes. The commit of a version goes on while RLlib samples the next iteration;
    `close` waits for the last one, and so does the end of the process. While the store is away,
    training goes on, and the next version supersedes one that could not be committed; with
    ``max_outage`` for that many seconds.

    Raises `InputError` where the algorithm has no such module, or uses RLlib's old API stack.

    Example::

        callback = partial(Publish, "s3://bucket/run", every=5, dtype="bfloat16")
        config.callbacks(callbacks_class=callback)
    """

    def __init__(
        self,
        run: str,
        *,
        every: int = 1,
        module: str | None = None,
        dtype: str | None = None,
        max_outage: float | None = None,
    ) -> None:
        super().__init__()
        if every < 1:
            raise InputError(f"every = {every}: a version needs at least one iteration")
        if dtype is not None and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise InputError(f"there is no dtype {dtype[:40]!r}", hint='for example "bfloat16"')
        self.run = run
        self.every = every
        self.module = module
        self.max_outage = max_outage
        self.dtype: torch.dtype | None = getattr(torch, dtype) if dtype else None
        self._publisher: Publisher | None = None

    def on_algorithm_init(self, *, algorithm: Algorithm, **others: Any) -> None:
        """Opens the run, and publishes the initial weights of a new one."""
        del others
        self._publisher = open_publisher(
            self.run, self._weights(algorithm), max_outage=self.max_outage
        )

    def on_train_result(
        self, *, algorithm: Algorithm, result: Mapping[str, Any], **others: Any
    ) -> None:
        """Publishes the weights after an iteration; raises the previous commit's error."""
        del others
        iteration = int(result["training_iteration"])
        if self._publisher is None or iteration % self.every:
            return
        self._publisher.publish(self._weights(algorithm), metadata={STEP_RECORD: iteration})

    def close(self) -> None:
        """Waits for the last version's commit, and ends the publisher's threads."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()

    def _weights(self, algorithm: Algorithm) -> dict[str, Tensor]:
        """Returns the trained weights of the chosen modules, on the CPU."""
        if not algorithm.config.enable_rl_module_and_learner:
            raise InputError(
                "deltawire.rllib publishes RLModules, and this algorithm uses the old API stack",
                hint="config.api_stack(enable_rl_module_and_learner=True, "
                "enable_env_runner_and_connector_v2=True)",
            )
        modules = algorithm.learner_group.get_weights()
        if self.module is not None:
            if self.module not in modules:
                there = ", ".join(sorted(modules)[:MAX_MODULES])
                raise InputError(f"the algorithm has no module {self.module!r}; it has {there}")
            modules = {self.module: modules[self.module]}
        prefixed = len(modules) > 1
        return {
            f"{module}.{name}" if prefixed else name: self._rounded(value)
            for module, state in sorted(modules.items())
            for name, value in state.items()
        }

    def _rounded(self, value: Tensor | np.ndarray) -> Tensor:
        tensor = torch.as_tensor(value).detach().cpu()
        if self.dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self.dtype)
        return tensor.contiguous()
