"""Collaborative training: hivemind's peers, made robust so that no fault loses the run."""

import warnings

# Importing hivemind compiles two functions with TorchScript, which torch has deprecated.
warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning, module=r"torch\.jit\._script")
