"""One set of ranks for all tests of this room that does not end them."""

import pytest
from sharded.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    made = Ranks(4, tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()
