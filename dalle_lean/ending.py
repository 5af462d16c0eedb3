"""How a process is asked to end, beside Ctrl+C: by SIGTERM, which Slurm, Kubernetes and spot machines send."""

EXIT_CODE = 143
"""Of a process that SIGTERM has ended: 128 and the signal's number."""


class Terminated(BaseException):
    """SIGTERM has come, and what was finished is saved. No Exception, as KeyboardInterrupt is none: only who ends the
    process catches it."""
