import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from failure_scripts import SCRIPTS
from script_process import ScriptProcess, write_scripts


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptProcess]:
    """One process that plays every script of ``failure_scripts``, each at an address of its own."""
    process = ScriptProcess(write_scripts(tmp_path_factory.mktemp("scripts"), SCRIPTS))
    yield process
    code, stderr = process.stop()
    assert (code, stderr) == (0, "")
