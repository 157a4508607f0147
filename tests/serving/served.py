"""``sm70lab serve`` as a user starts it: a process of its own, asked over real sockets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import httpx
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.cli.lab import default_signals

SECONDS = 60
PAGE = '<!DOCTYPE html>\n<html lang="en">\n<head>\n  <title>Notes</title>\n'


class ServeProcess:
    """A running server."""

    def __init__(self, *settings: str, **environment: str) -> None:
        self.settings = settings
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sm70lab", "serve", "port=0", "--json", *settings],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            preexec_fn=default_signals,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()  # the test's own time limit bounds this
        assert line, self.process.communicate(timeout=SECONDS)[1]
        self.url: str = json.loads(line)["url"]
        self.http = httpx.Client(base_url=self.url, timeout=SECONDS)

    def client(self, key: str = "none") -> OpenAI:
        """OpenAI's own client."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, timeout=SECONDS, max_retries=0)

    def completion(self, **fields: Any) -> dict[str, Any]:
        """One completion that must succeed."""
        answer = self.http.post("/v1/completions", json={"prompt": PAGE, "return_token_ids": True, **fields})
        assert answer.status_code == 200, answer.text
        value: dict[str, Any] = answer.json()
        return value

    def ids(self, **fields: Any) -> list[int]:
        """Token ids of one completion."""
        ids: list[int] = self.completion(**fields)["choices"][0]["token_ids"]
        return ids

    def metrics(self) -> dict[tuple[str, str], float]:
        """(sample, its finished_reason or position) → value, by Prometheus' own parser."""
        page = self.http.get("/metrics").text
        return {
            (s.name, s.labels.get("finished_reason") or s.labels.get("position") or ""): s.value
            for family in text_string_to_metric_families(page)
            for s in family.samples
            if "le" not in s.labels
        }

    def wait_for(self, sample: str, value: float, label: str = "") -> None:
        """Until a metric has a value."""
        deadline = time.monotonic() + SECONDS
        while self.metrics().get((sample, label)) != value:
            assert time.monotonic() < deadline, (sample, self.metrics().get((sample, label)))
            time.sleep(0.05)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """End it; exit code and standard error."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        _, stderr = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, stderr
