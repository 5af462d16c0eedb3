"""Progress as a person sees it in a terminal, and as it stands in a file."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap
import time

import pytest

from dalle_lean import terminal

SCRIPT = """
import sys, time
from dalle_lean import terminal
terminal.LINE_INTERVAL_S = {interval_s}
with terminal.progress_bar("drawing '[/b] a red [heart] on a blue ground'", "codes") as on_progress:
    for done in range({steps}):
        on_progress(done + 1, {steps}, "loss 2.345")
        time.sleep(0.02)
    if {fails}:
        raise SystemExit("error: no")
"""


def script(steps=20, interval_s=10.0, fails=False):
    return [sys.executable, "-c", textwrap.dedent(SCRIPT).format(steps=steps, interval_s=interval_s, fails=fails)]


def in_a_file(*arguments, **options):
    environment = os.environ | {"COLUMNS": "40", "FORCE_COLOR": "1"}
    command = script(*arguments, **options)
    result = subprocess.run(command, capture_output=True, env=environment, timeout=60, check=False)
    return result.stderr.decode()


def in_a_terminal(columns, **options):
    """What the program writes to a terminal so many columns wide."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    process = subprocess.Popen(script(**options), stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    written = b""
    try:
        while part := os.read(ours, 65536):
            written += part
    except OSError:  # how Linux tells that the other side is closed
        pass
    process.wait(timeout=60)
    os.close(ours)
    return written.decode()


def test_short_work_is_one_whole_line_in_a_file():
    written = in_a_file()
    line = r"drawing '\[/b\] a red \[heart\] on a blue ground' 20/20 \d+\.\d codes/s \S+ loss 2.345\n"
    assert re.fullmatch(line, written)


def test_what_is_reported_in_one_burst_has_no_rate(capsys):
    with terminal.progress_bar("preprocess", "pictures") as on_progress:
        for done in (1, 30, 41):
            on_progress(done, 41, "1 of 1 shard")
    assert capsys.readouterr().err == "preprocess 41/41 - pictures/s 0:00:00 1 of 1 shard\n"


def test_long_work_adds_a_line_at_each_interval():
    lines = in_a_file(interval_s=0.1).splitlines()
    assert 3 <= len(lines) <= 6
    counts = [int(re.search(r"(\d+)/20", line)[1]) for line in lines]
    assert counts == sorted(set(counts))
    assert counts[-1] == 20


@pytest.mark.parametrize("columns", [30, 80])
def test_the_bar_keeps_to_one_line_of_the_terminal(columns):
    written = in_a_terminal(columns)
    assert "\x1b[1A" not in written  # would go up to a line above
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    assert max(len(line) for line in re.split(r"[\r\n]+", shown)) <= columns


@pytest.mark.parametrize("columns", [30, 80])
def test_a_mistake_before_the_first_step_leaves_no_bar(columns):
    written = in_a_terminal(columns, steps=0, fails=True)
    assert written.endswith("\x1b[1A\x1b[2Kerror: no\r\n")
    assert in_a_file(steps=0, fails=True) == "error: no\n"


def test_a_long_start_says_what_it_waits_for_and_how_long_until_it_is_done(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "LINE_INTERVAL_S", 0.05)
    with terminal.waiting_told() as wait_for:
        for what in ("Ray", "2 replicas to load the model"):
            wait_for(what)
            time.sleep(0.4)
    said = capsys.readouterr().err
    time.sleep(0.2)
    lines = r"(waiting for Ray, 0 s so far\n)+(waiting for 2 replicas to load the model, [01] s so far\n)+"
    assert re.fullmatch(lines, said)
    assert capsys.readouterr().err == ""
