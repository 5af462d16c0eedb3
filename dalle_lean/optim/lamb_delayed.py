"""LAMB beside the model: the step runs in a thread while the next forward and backward compute.

Source: Ren et al. 2021, "ZeRO-Offload", section 5.2, one-step delayed parameter update.
"""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from dalle_lean.optim.lamb import Lamb, Update


class DelayedLamb:
    """`step()` starts the arithmetic on copies and returns; the next `step()` or `finish()` moves the weights.

    So the gradient of step n is taken at weights that step n - 1 has not moved yet. Which step sees which weights does
    not depend on timing. While a step is under way the copies of gradients and weights take 8 bytes a parameter on the
    statistics' device (4 for weights that have a master copy).

    Weights that are changed from outside between `step()` and `finish()` are overwritten by `finish()`; call it first.
    An error in the thread is raised by the next call; the step is then partial, as Lamb's: what was computed before it
    moves the weights at the next `finish()`, later tensors stay.

    Raises:
        RuntimeError: at any call but `zero_grad` in a process forked while a step was under way: its thread and its
            half-changed statistics stayed behind. Call `finish()` before such a fork.
    """

    def __init__(self, optimizer: Lamb):
        self.optimizer = optimizer
        self._running: Future[None] | None = None
        self._process_id = os.getpid()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups; what is changed here counts from the next `step()`."""
        return self.optimizer.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """Finish the step under way, then start that of the present gradients, which may be cleared afterwards."""
        self.finish()
        pairs = self.optimizer.with_gradient()
        updates = [self.optimizer.prepare(parameter, group, copy=True) for parameter, group in pairs]
        # A thread for this step alone: one that waits for the next step would be missing after a fork.
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="delayed-lamb")
        self._running, self._process_id = thread.submit(run_all, updates), os.getpid()
        thread.shutdown(wait=False)

    def finish(self) -> None:
        """Wait for the step under way and move the weights; call it before they are measured or saved for use."""
        self.wait()
        self.optimizer.apply_pending()

    def wait(self) -> None:
        """Wait for the arithmetic under way; the weights stay where they are. Raises what went wrong in it."""
        if self._running is None:
            return
        if self._process_id != os.getpid() and not self._running.done():
            raise RuntimeError("this process was forked while a step was under way: call finish() before the fork")
        try:
            self._running.result()
        finally:
            if self._running.done():
                self._running = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state once nothing is under way, with the weights computed and not yet given out.

        Beside the model's present weights it is all that a resumed run needs to go on bit for bit.
        """
        self.wait()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Inverse of `state_dict`; drops what is pending here."""
        self.wait()
        self.optimizer.load_state_dict(state_dict)


def run_all(updates: list[Update]) -> None:
    """Each update's arithmetic; the results wait in the optimizer's state as "pending"."""
    for update in updates:
        update.run()
        update.state["pending"] = update.new_value().to(update.parameter.dtype)
