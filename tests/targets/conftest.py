import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from failure_scripts import SCRIPTS
from script_process import ScriptProcess, playing


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptProcess]:
    """One process that plays every script of ``failure_scripts``."""
    with playing(tmp_path_factory.mktemp("scripts"), SCRIPTS) as process:
        yield process
