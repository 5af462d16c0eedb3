"""A run that was interrupted or could not read its source continues, to the same bytes."""

import pytest

from preprocessing.encoding.encode import preprocess
from preprocessing.sources import open_source
from preprocessing.sources.folder import ListedFolder
from tests.preprocessing.runs import Stop, contents

pytestmark = pytest.mark.usefixtures("decode_here")


class SometimesAway(ListedFolder):
    """A storage that fails in the middle of part 1."""

    def samples(self, part):
        for number, sample in enumerate(super().samples(part)):
            if (part, number) == (1, 5):
                raise OSError("the storage is away")
            yield sample


def test_a_part_that_cannot_be_read_is_named_and_made_later(discs, vqgan, tmp_path):
    preprocess(open_source(discs, 8), tmp_path / "alone", vqgan, batch_size=4)
    with pytest.raises(OSError, match=r"could not be read.*00001: the storage is away"):
        preprocess(SometimesAway(discs, 8), tmp_path / "out", vqgan, batch_size=4)
    assert len(list((tmp_path / "out").glob("shard-*.parquet"))) == 3
    preprocess(open_source(discs, 8), tmp_path / "out", vqgan, batch_size=4)
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


@pytest.mark.parametrize("stop_at", range(1, 9))
def test_an_interrupted_run_ends_in_the_same_bytes(discs, vqgan, tmp_path, stop_at):
    preprocess(open_source(discs, 8), tmp_path / "undisturbed", vqgan, batch_size=4)
    calls = 0

    def stop(done: int, total: int, note: str) -> None:
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise Stop

    with pytest.raises(Stop):
        preprocess(open_source(discs, 8), tmp_path / "out", vqgan, batch_size=4, on_progress=stop)
    assert not (tmp_path / "out" / "dataset.json").exists()
    preprocess(open_source(discs, 8), tmp_path / "out", vqgan, batch_size=4)
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


def test_a_shard_without_its_note_or_a_note_without_its_shard_is_made_again(discs, vqgan, tmp_path):
    preprocess(open_source(discs, 8), tmp_path / "undisturbed", vqgan)

    def stop(done: int, total: int, note: str) -> None:
        if done > 24:
            raise Stop

    with pytest.raises(Stop):
        preprocess(open_source(discs, 8), tmp_path / "out", vqgan, on_progress=stop)
    (tmp_path / "out" / ".progress" / "part-00001.json").unlink()
    (tmp_path / "out" / "shard-00002.parquet").unlink()
    preprocess(open_source(discs, 8), tmp_path / "out", vqgan)
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")
