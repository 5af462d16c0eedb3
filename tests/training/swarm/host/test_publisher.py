"""Publishing the checkpoints of a hosted run while it trains."""

import json
import math
import subprocess
import sys

import pytest
import torch

from dalle_lean import load_model
from dalle_lean.io.model_folder import check_parts
from tests.children import kill_family, start
from tests.tiny import tiny_dalle, tiny_vqgan
from tests.training.swarm.host.small_run import until
from training.swarm.host.checkpoints import Checkpoints
from training.swarm.host.host_config import HostConfig
from training.swarm.host.publisher import CheckpointPublisher, publishing


@pytest.fixture
def checkpoints(run, settings):
    """Checkpoints of a run that has none yet."""
    return Checkpoints(run, settings, HostConfig(ports={}), pytest.fail)


def save(checkpoints, step, loss=math.nan):
    model = tiny_dalle()
    with torch.no_grad():
        model.norm.weight.fill_(step)
    assert checkpoints.save(step, model, [], loss)
    return model


def card(place):
    return (place / "README.md").read_text()


def test_the_destination_is_the_newest_checkpoint_as_a_model_folder_with_a_card(checkpoints, tmp_path):
    place = tmp_path / "out"
    publisher = CheckpointPublisher(checkpoints.run_dir, str(place), pytest.fail)
    assert publisher.publish_newest()  # there is none yet
    assert not place.exists()
    save(checkpoints, 10, 4.5)
    assert publisher.publish_newest()
    first = check_parts(place)["parts"]
    assert "| step | 10 |" in card(place)
    assert "4.5 nats" in card(place)
    save(checkpoints, 20)
    assert publisher.publish_newest()
    second = check_parts(place)["parts"]
    assert {name for name in first if first[name] != second[name]} == {"model.safetensors"}
    assert "| step | 20 |" in card(place)
    assert json.loads((place / ".published").read_text()).keys() == {*second, "config.json", "README.md"}


def test_what_fails_is_said_once_and_tried_again(checkpoints, tmp_path):
    said = []
    (tmp_path / "out").write_text("a file is in the way")
    publisher = CheckpointPublisher(checkpoints.run_dir, str(tmp_path / "out"), said.append)
    save(checkpoints, 10)
    assert not publisher.publish_newest()
    assert not publisher.publish_newest()
    [line] = said
    assert line.startswith("the checkpoint of step 10 was not published: ")
    (tmp_path / "out").unlink()
    assert publisher.publish_newest()
    check_parts(tmp_path / "out")


def test_the_last_state_of_a_run_that_ends_is_published_too(checkpoints, tmp_path):
    with publishing(checkpoints.run_dir, str(tmp_path / "out"), pytest.fail):
        save(checkpoints, 100)
    check_parts(tmp_path / "out")


def test_an_interrupted_host_does_not_wait_for_what_is_being_sent(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(CheckpointPublisher, "run", lambda self, stopped: stopped.wait())
    save(checkpoints, 10)
    with pytest.raises(KeyboardInterrupt), publishing(checkpoints.run_dir, str(tmp_path / "out"), pytest.fail):
        raise KeyboardInterrupt
    assert not (tmp_path / "out").exists()


PUBLISHER = """
import sys
from pathlib import Path
from training.swarm.host.publisher import CheckpointPublisher

publisher = CheckpointPublisher(Path(sys.argv[1]), sys.argv[2], lambda line: print(line, flush=True))
for _ in sys.stdin:
    print(publisher.publish_newest(), flush=True)
"""


class Publisher:
    """A host's publisher in a process of its own, which publishes whenever it is told to."""

    def __init__(self, run_dir, storage):
        self.process = start(
            [sys.executable, "-c", PUBLISHER, str(run_dir), storage.model],
            env=storage.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said = []

    def begin(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def publish(self):
        """Whether it is published, and what it says."""
        self.begin()
        lines = []
        for line in self.process.stdout:
            self.said.append(line)
            if line in ("True\n", "False\n"):
                return line == "True\n", lines
            lines.append(line)
        raise AssertionError("".join(self.said))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        kill_family(self.process)


@pytest.mark.long
@pytest.mark.parametrize("storage", ["s3", pytest.param("hub", marks=pytest.mark.slow)], indirect=True)
def test_a_publisher_that_is_killed_and_whose_storage_fails_for_a_while_continues(run, settings, storage, tmp_path):
    tiny_vqgan().save(tmp_path / "vqgan")
    checkpoints = Checkpoints(run, settings, HostConfig(ports={}, vqgan=str(tmp_path / "vqgan")), pytest.fail)
    save(checkpoints, 10, 4.5)
    with Publisher(run, storage) as killed, storage.held("vqgan/model.safetensors") as is_held:
        killed.begin()
        until("the second file of weights", is_held)
        kill_family(killed.process)
    before = storage.weight_files()
    with Publisher(run, storage) as publisher:
        assert publisher.publish() == (True, [])
        assert storage.weight_files() == before + 1
        check_parts(storage.fetch(tmp_path / "one"))
        assert "| step | 10 |" in card(tmp_path / "one")
        save(checkpoints, 20)
        with storage.away():
            done, [line] = publisher.publish()
            assert not done
            assert line.startswith(f"the checkpoint of step 20 was not published: {storage.model} could not be written")
            assert publisher.publish() == (False, [])
        assert publisher.publish() == (True, [])
        assert publisher.publish() == (True, [])
    fetched = storage.fetch(tmp_path / "two")
    assert "| step | 20 |" in card(fetched)
    assert set(load_model(fetched).norm.weight.tolist()) == {20.0}
    assert storage.weight_files() == before + 2
    assert storage.secret not in "".join(publisher.said)
