"""The newest model as one file, fetched in chunks."""

import hashlib

import pytest

pytest.importorskip("hivemind")

from training.swarm.observe.page import model_file
from training.swarm.observe.page.model_file import Download, mirror

CONTENT = bytes(range(256)) * 10
FILE = "model-step-000006.zip"


def download(**changed):
    right = {"step": 6, "file": FILE, "size_bytes": len(CONTENT), "sha256": hashlib.sha256(CONTENT).hexdigest()}
    return Download(**{**right, **changed})


class Helper:
    """Serves chunks of 1,000 bytes, and is offline after `calls` of them."""

    def __init__(self, calls=100, content=CONTENT):
        self.calls, self.content, self.asked = calls, content, []

    def read(self, name, start):
        self.asked.append(start)
        self.calls -= 1
        return self.content[start : start + 1000] if self.calls >= 0 else None


def test_a_model_is_shown_once_it_is_whole_and_fetched_on_from_where_it_was(tmp_path):
    earlier = download(step=3, file="model-step-000003.zip")
    (tmp_path / earlier.file).write_bytes(b"earlier")
    assert mirror(tmp_path, download(), earlier, Helper(calls=1).read, pytest.fail) == earlier
    assert not (tmp_path / FILE).exists()
    helper = Helper()
    assert mirror(tmp_path, download(), earlier, helper.read, pytest.fail) == download()
    assert helper.asked == [1000, 2000]
    assert (tmp_path / FILE).read_bytes() == CONTENT
    assert sorted(path.name for path in tmp_path.iterdir()) == [earlier.file, FILE]


def test_a_model_that_is_there_is_not_fetched_again(tmp_path):
    (tmp_path / FILE).write_bytes(CONTENT)
    assert mirror(tmp_path, download(), None, pytest.fail, pytest.fail) == download()


def test_a_model_that_arrives_otherwise_is_said_and_fetched_again(tmp_path):
    notices = []
    assert mirror(tmp_path, download(), None, Helper(content=CONTENT[::-1]).read, notices.append) is None
    assert notices == [f"{FILE} does not match its hash; downloading it again"]
    assert mirror(tmp_path, download(), None, Helper().read, pytest.fail) == download()


def test_a_look_at_the_run_does_not_wait_for_a_slow_connection(tmp_path, monkeypatch):
    monkeypatch.setattr(model_file, "FETCH_S", 0.0)
    assert mirror(tmp_path, download(), None, pytest.fail, pytest.fail) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"file": "../../etc/passwd"},
        {"file": "run.json"},
        {"file": None},
        {"size_bytes": 2**60},
        {"size_bytes": "many"},
        {"step": -1.5},
        {"sha256": "../x"},
    ],
)
def test_what_a_helper_makes_up_is_refused(changed):
    with pytest.raises(ValueError, match="is malformed"):
        download(**changed)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": 1}'])
def test_a_text_that_names_no_model_is_refused(text):
    with pytest.raises(ValueError, match=r"model\.json"):
        Download.parse(text)
