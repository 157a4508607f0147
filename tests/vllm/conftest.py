import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
import dense
from lab import Lab


@pytest.fixture(scope="session")
def vllm_python(request: pytest.FixtureRequest) -> str:
    """The interpreter of an environment that has vLLM's CPU build."""
    given = request.config.getoption("--vllm-python")
    if given is None:
        pytest.skip("give the interpreter of a vLLM environment: --vllm-python PATH (tests/vllm/README.md)")
    return str(Path(given).absolute())


@pytest.fixture(scope="session")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dense checkpoint."""
    folder = tmp_path_factory.mktemp("dense")
    dense.make(folder)
    return folder


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)
