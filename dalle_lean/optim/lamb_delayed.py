"""LAMB beside the model: the step runs in a thread while the next forward and backward compute.

Source: Ren et al. 2021, "ZeRO-Offload", section 5.2, one-step delayed parameter update.
"""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from dalle_lean.optim.lamb import Lamb, Update


class DelayedLamb:
    """`step()` starts the computation on copies and returns; the next `step()` or `finish()` moves the weights.

    So the gradient of step n is taken at weights that step n - 1 has not moved yet, whatever the timing. While a step
    is running, the copies of gradients and weights take 8 bytes a parameter on the statistics' device (4 for weights
    with a master copy).

    `finish()` overwrites weights that were changed from outside since `step()`; call it before such changes. An error
    in the thread is raised by the next call. The step is then partial, like Lamb's: the next `finish()` moves the
    tensors computed before the error, the others stay.

    Raises:
        RuntimeError: at any call but `zero_grad` in a process that was forked while a step was running, whose thread
            and half-updated statistics stayed in the parent. Call `finish()` before such a fork.
    """

    def __init__(self, optimizer: Lamb):
        self.optimizer = optimizer
        self._running: Future[None] | None = None
        self._process_id = os.getpid()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups; changes apply from the next `step()`."""
        return self.optimizer.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """Finish the running step, then start that of the present gradients, which may be cleared afterwards."""
        self.finish()
        pairs = self.optimizer.with_gradient()
        updates = [self.optimizer.prepare(parameter, group, copy=True) for parameter, group in pairs]
        # A thread for this step only: one that waits for the next step would be missing after a fork.
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="delayed-lamb")
        self._running, self._process_id = thread.submit(run_all, updates), os.getpid()
        thread.shutdown(wait=False)

    def finish(self) -> None:
        """Wait for the running step and move the weights; call it before using or saving the model."""
        self.wait()
        self.optimizer.apply_pending()

    def wait(self) -> None:
        """Wait for the running computation, without moving the weights; raises its error."""
        if self._running is None:
            return
        if self._process_id != os.getpid() and not self._running.done():
            raise RuntimeError("this process was forked while a step was running: call finish() before the fork")
        try:
            self._running.result()
        finally:
            if self._running.done():
                self._running = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state after the running step, with the weights that are computed but not yet applied.

        With the model's present weights it is all that a run needs to resume bit for bit.
        """
        self.wait()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Inverse of `state_dict`; discards weights that are not yet applied."""
        self.wait()
        self.optimizer.load_state_dict(state_dict)


def run_all(updates: list[Update]) -> None:
    """Compute all updates; the new weights wait in the optimizer's state as "pending"."""
    for update in updates:
        update.run()
        update.state["pending"] = update.new_value().to(update.parameter.dtype)
