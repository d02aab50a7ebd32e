"""A database of all kinds of kernels."""

from collections.abc import Iterator

import pytest

from perf.kernel_tables import full_database, opened
from windtunnel.perf.database import Measured


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    yield opened(full_database(tmp_path_factory.mktemp("systems")))
