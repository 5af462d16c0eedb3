import pytest

from tests.preprocessing.emoji.packages import write_packages


@pytest.fixture(scope="session")
def emoji_packages(tmp_path_factory):
    return write_packages(tmp_path_factory.mktemp("node_modules"))
