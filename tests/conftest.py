import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from tiny_runs import make_run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--vllm-python", help="interpreter of an environment with vLLM (tests/vllm/README.md)")


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of one variant (one under another name), two other variants, one of them with a hazard."""
    runs = tmp_path_factory.mktemp("recorded") / "runs"
    make_run(runs, "seed=1")
    make_run(runs, "seed=2", "repeats=2", "name=again")
    make_run(runs, "route.draft_tokens=2", "seed=1")
    make_run(runs, "hazard=no_conv_rollback", "seed=1")
    return runs


@pytest.fixture
def runs(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the recorded runs to do as one likes with, in a working folder of its own."""
    shutil.copytree(recorded, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"
