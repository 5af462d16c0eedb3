"""Copies to a folder: what is sent, what is left, and what a message says."""

import json
from pathlib import Path

import pytest

from dalle_lean.errors import UserError
from dalle_lean.io.publish import PUBLISHED, check_destination, hub_repository, publish, without_secrets
from dalle_lean.io.remote_io import Unreachable


@pytest.fixture
def files(tmp_path):
    """Three files, one of them only content, in the order of sending."""
    (tmp_path / "from").mkdir()
    for name in ("a.bin", "last.json"):
        (tmp_path / "from" / name).write_bytes(name.encode() * 10000)
    return {
        "deep/a.bin": tmp_path / "from" / "a.bin",
        "README.md": b"# A card\n",
        "last.json": tmp_path / "from" / "last.json",
    }


def content(place):
    files = {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()}
    files.pop(PUBLISHED)
    return files


def send(files, place):
    sent = []
    words = publish(files, str(place), message="m", on_progress=lambda done, total, note: sent.append(note))
    return [name for name in sent if name], words


def expected(files):
    return {name: source.read_bytes() if isinstance(source, Path) else source for name, source in files.items()}


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_a_copy_has_every_file_and_the_last_one_comes_last(files, tmp_path, form):
    place = tmp_path / "to"
    sent, words = send(files, form.format(place))
    assert content(place) == expected(files)
    assert sent == ["deep/a.bin", "README.md", "last.json"]
    assert words == "3 files sent, 0 were there"


def test_only_what_has_changed_is_sent_again(files, tmp_path):
    place = tmp_path / "to"
    send(files, place)
    assert send(files, place) == ([], "nothing has changed, 3 files are there")
    files["deep/a.bin"].write_bytes(b"b" * 50000)  # as long as before
    assert send(files, place)[0] == ["deep/a.bin"]
    assert content(place) == expected(files)


def test_what_is_lost_or_cut_at_the_destination_is_sent_again(files, tmp_path):
    place = tmp_path / "to"
    send(files, place)
    (place / "README.md").unlink()
    (place / "last.json").write_bytes(b"half")
    assert send(files, place)[0] == ["README.md", "last.json"]
    assert content(place) == expected(files)


def test_files_of_an_earlier_copy_go_and_those_of_others_stay(files, tmp_path):
    place = tmp_path / "to"
    send(files, place)
    (place / "theirs.txt").write_text("not ours")
    del files["deep/a.bin"]
    send(files, place)
    assert content(place) == expected(files) | {"theirs.txt": b"not ours"}


def test_a_copy_that_fails_in_the_middle_continues(files, tmp_path):
    place, missing = tmp_path / "to", tmp_path / "from" / "last.json"
    kept = missing.read_bytes()

    def lose(done, total, note):
        if note == "last.json":
            missing.unlink()

    with pytest.raises(Unreachable, match=r"to could not be written .*last\.json.*the same command continues"):
        publish(files, str(place), message="m", on_progress=lose)
    assert json.loads((place / PUBLISHED).read_text())["last.json"] is None
    missing.write_bytes(kept)
    assert send(files, place)[0] == ["README.md", "last.json"]  # a.bin outweighs its note
    assert content(place) == expected(files)


def test_files_are_never_copied_onto_themselves(files, tmp_path):
    with pytest.raises(UserError, match="is where the files come from"):
        publish({"a.bin": files["deep/a.bin"]}, str(tmp_path / "from"), message="m")
    assert files["deep/a.bin"].read_bytes() == b"a.bin" * 10000


@pytest.mark.parametrize("note", [b"{", b"[]", b'{"../../etc/passwd": null}', b'{"a": 1}'])
def test_a_note_at_the_destination_that_is_not_ours_is_refused(files, tmp_path, note):
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / PUBLISHED).write_bytes(note)
    with pytest.raises(UserError, match=r"\.published at the destination is not what this program writes"):
        publish(files, str(tmp_path / "to"), message="m")


def test_a_place_on_the_hub_is_a_data_set_or_a_model():
    assert hub_repository("hf://datasets/me/birds") == ("dataset", "me/birds")
    assert hub_repository("hf://me/birds/") == ("model", "me/birds")
    assert hub_repository("hf://mydatasets/birds") == ("model", "mydatasets/birds")


@pytest.mark.parametrize(
    ("destination", "complaint"),
    [
        ("hf://datasets/name", "an address on the hub is"),
        ("hf://spaces/owner/name", "an address on the hub is"),
        ("hf://owner/name/folder", "an address on the hub is"),
        ("nowhere://bucket/name", "its kind of storage cannot be read here"),
        ("s3://AKIA:hunter2hunter2@bucket/name", "holds a password"),
        ("https://host/name?X-Amz-Signature=hunter2hunter2", "holds a password or a query"),
    ],
)
def test_a_destination_is_refused_before_anything_is_done(destination, complaint):
    with pytest.raises(UserError, match=complaint) as refused:
        check_destination(destination)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("destination", "content", "complaint"),
    [
        ("hf://me/birds", "dataset", "a model's address on the hub; a dataset goes to hf://datasets/me/birds"),
        ("hf://datasets/me/birds", "model", "a dataset's address on the hub; a model goes to hf://me/birds"),
    ],
)
def test_shards_do_not_go_where_models_are_looked_for_nor_the_other_way_round(destination, content, complaint):
    with pytest.raises(UserError, match=complaint):
        check_destination(destination, content)
    check_destination("hf://me/birds", "model")
    check_destination("hf://datasets/me/birds", "dataset")


def test_a_message_shows_no_secret(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG")
    text = "b'Bearer ab.cd\\n' hf_AbCdEfGh of hf_hub_url at https://host/ab?Sign=01&X=4 with wJalrXUtnFEMI/K7MDENG: no?"
    assert without_secrets(text) == "b'***' *** of hf_hub_url at https://host/ab?*** with ***: no?"
