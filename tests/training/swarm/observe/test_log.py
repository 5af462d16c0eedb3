"""Logs stay small, whichever processes write them."""

import logging
import os
import subprocess
import sys

import pytest

from training.swarm.observe.log import BoundedFileHandler, rotate_log

LIMIT_BYTES = 2000


@pytest.fixture(autouse=True)
def _limit(monkeypatch):
    monkeypatch.setattr("training.swarm.observe.log.LOG_BYTES", LIMIT_BYTES)


@pytest.fixture
def log(tmp_path):
    return tmp_path / "peer.log"


@pytest.fixture
def logger(log):
    """Writes its lines to `log`."""
    logger = logging.Logger("test")
    handler = BoundedFileHandler(log)
    logger.addHandler(handler)
    yield logger
    handler.close()


def numbers(*paths):
    return [int(line.split()[-1]) for path in paths for line in path.read_text().splitlines()]


def older(log):
    return log.with_name(f"{log.name}.1")


def test_a_log_keeps_the_newest_lines_in_two_files(log, logger, tmp_path):
    for number in range(1000):
        logger.info("line %d", number)
    assert set(tmp_path.iterdir()) == {log, older(log)}
    assert log.stat().st_size + older(log).stat().st_size < 2.1 * LIMIT_BYTES
    kept = numbers(older(log), log)
    assert kept == list(range(kept[0], 1000))
    assert len(kept) * len("line 999\n") > LIMIT_BYTES


def test_what_is_said_after_a_log_was_closed_is_in_it(log, logger):
    logger.handlers[0].close()
    logger.info("line 1")
    assert numbers(log) == [1]


def test_processes_that_are_forked_go_on_in_the_same_log_and_lose_no_line_of_it(log, logger):
    lines = 3 * LIMIT_BYTES // 2 // len("line 1000\n") // 4
    children = []
    for child in range(4):
        if (pid := os.fork()) == 0:
            for number in range(lines):
                logger.info("line %d", 1000 + lines * child + number)
            os._exit(0)
        children.append(pid)
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
    logger.info("line 999")
    assert sorted(numbers(older(log), log)) == [999, *range(1000, 1000 + 4 * lines)]
    assert numbers(log)[-1] == 999


PRINTING = f"""
import logging, os, sys
from pathlib import Path
from training.swarm.observe import log
log.LOG_BYTES = {LIMIT_BYTES}
logger = logging.Logger("test")
logger.addHandler(log.BoundedFileHandler(Path(sys.argv[1]), output=True))
for number in range(500):
    logger.info("line %d", number)
print("printed", flush=True)
os.system("echo of a child of it")
sys.exit("the end")
"""


def test_what_a_process_prints_goes_where_its_log_is_by_then(log):
    with open(log, "ab") as output:
        command = [sys.executable, "-c", PRINTING, str(log)]
        subprocess.run(command, stdout=output, stderr=output, check=False, timeout=120)
    assert log.read_text().endswith("printed\nof a child of it\nthe end\n")
    assert log.stat().st_size < 1.1 * LIMIT_BYTES


def test_a_log_that_is_full_is_rotated_before_it_is_opened_and_another_is_not(log):
    rotate_log(log)
    log.write_text("x" * (LIMIT_BYTES - 1))
    rotate_log(log)
    assert not older(log).exists()
    log.write_text("x" * LIMIT_BYTES)
    rotate_log(log)
    assert older(log).stat().st_size == LIMIT_BYTES
    assert not log.exists()
