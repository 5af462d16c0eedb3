import pytest

from tests.preprocessing.shards_of_pictures import emoji_rows


@pytest.fixture(scope="session")
def rows(emoji):
    return emoji_rows(emoji, 12)
