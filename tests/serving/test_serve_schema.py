"""The server against its own OpenAPI description: whatever is sent, no 5xx and no undescribed answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving.served import ServeProcess

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.mark.long
@pytest.mark.timeout(280)
def test_schemathesis_finds_no_5xx_and_nothing_undescribed(tmp_path: Path) -> None:
    server = ServeProcess("route=split", "model=tiny", "max_model_len=32", "target.max_num_seqs=2")
    try:
        done = subprocess.run(
            [
                *(str(Path(sys.executable).with_name("schemathesis")), "run", f"{server.url}/openapi.json"),
                *("--checks", CHECKS, "--phases", "examples,coverage,fuzzing", "--max-examples", "60"),
                *("--seed", "1", "--generation-database", "none", "--no-color"),
                # One worker: CPython's compiler, which the generator calls, fails in two threads at once.
                # A busy machine makes examples slowly, which is not the server's fault.
                *("--continue-on-failure", "--request-timeout", "60", "--suppress-health-check", "all"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert server.http.get("/health").status_code == 200
        assert server.metrics()["vllm:num_requests_running", ""] == 0
    finally:
        code, stderr = server.stop()
    assert code == 0 and "Traceback" not in stderr
