"""`dalle-lean pack --publish` to an S3 server and to a hub, both on loopback, by real clients."""

import pytest

from inference import Generator
from tests.inference.tiny_model import save_tiny_model


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".cache" not in path.parts  # of the hub's client
    }


@pytest.mark.long
@pytest.mark.parametrize("storage", [pytest.param("s3", marks=pytest.mark.slow), "hub"], indirect=True)
def test_a_packed_model_is_whole_where_it_is_published_and_only_changes_follow(storage, tmp_path):
    model, packed = save_tiny_model(tmp_path), tmp_path / "packed"
    said = storage.program("pack", model, packed, "--publish", storage.model)
    one = contents(storage.fetch(tmp_path / "one"))
    assert {name: one[name] for name in contents(packed)} == contents(packed)
    assert one.keys() - contents(packed).keys() == {".published"}
    assert storage.weight_files() == 3  # of the transformer, the VQGAN and CLIP

    said += storage.program("pack", model, packed, "--guidance", 2, "--publish", storage.model)
    two = contents(storage.fetch(tmp_path / "two"))
    assert {name for name in two if one.get(name) != two[name]} == {"config.json", ".published"}
    assert storage.weight_files() == 3
    generator = Generator.from_folder(tmp_path / "two", device="cpu")
    assert generator.scorer is not None
    assert generator.guidance == 2
    assert storage.secret not in said
