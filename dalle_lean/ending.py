"""How a process is asked to end, beside Ctrl+C: by SIGTERM, which Slurm, Kubernetes and spot machines send."""

EXIT_CODE = 143
"""Of a process that SIGTERM has ended: 128 and the signal's number."""


class Terminated(BaseException):
    """SIGTERM arrived and finished work is saved. Not an Exception, like KeyboardInterrupt: only the code that ends the
    process catches it."""
