"""What tests start is as a person would start it."""

import signal
import subprocess
import sys

import pytest

from tests.children import start


@pytest.fixture
def _in_the_background():
    """SIGINT ignored, as a shell without job control has it for what ends in &."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_in_the_background")
def test_a_process_that_a_test_starts_hears_ctrl_c():
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    with start([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.communicate(timeout=60)[0] == "True\n"
