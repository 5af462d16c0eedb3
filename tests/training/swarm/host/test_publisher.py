"""Publishing the checkpoints of a hosted run while it trains."""

import json
import math

import pytest
import torch

from dalle_lean.io.model_folder import check_parts
from tests.tiny import tiny_dalle
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
