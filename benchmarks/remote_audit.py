"""What the audit of a served run costs: ``python -m benchmarks.remote_audit [tokens]``.

Starts ``sm70lab serve``, decodes one output, has it scored by the server's own prefill and by the engine,
and prints processor seconds of both sides.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import psutil

from sm70lab.config import compose
from sm70lab.schema import Generation, ModelSpec
from sm70lab.targets.openai import OpenAITarget

PROMPT = "workload.prompts=[{name: page, text: '<!DOCTYPE html>\\n<html lang=\"en\">\\n<head>\\n'}]"


class Clock:
    """Prints what a step took, of the server and of this process."""

    def __init__(self, server: psutil.Process) -> None:
        self.server = server
        self.start()

    def start(self) -> None:
        self.begin = self._now()

    def show(self, step: str) -> None:
        there, here, wall = (after - before for after, before in zip(self._now(), self.begin, strict=True))
        print(f"| {step} | {there:.1f} | {here:.1f} | {wall:.1f} |", flush=True)
        self.start()

    def _now(self) -> tuple[float, float, float]:
        return sum(self.server.cpu_times()[:2]), time.process_time(), time.perf_counter()


def main(tokens: int) -> None:
    """Measure once."""
    command = [sys.executable, "-m", "sm70lab", "serve", "port=0", "--json", "route=whole_round"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        settings = ["target=openai", f"target.base_url={url}", PROMPT, f"workload.max_tokens={tokens}"]
        config = compose(settings)
        target = OpenAITarget(config)
        target.load()
        print("| step | server, CPU s | here, CPU s | wall s |\n|---|---|---|---|")
        clock = Clock(psutil.Process(process.pid))
        outputs: list[Generation] = list(target.generate(target.prompts(), 0, lambda progress: None))
        clock.show(f"decoding {len(outputs[0].token_ids):,} tokens")
        target.score(outputs[0])
        clock.show(f"audit by {target.judged_by().line}")
        target.close()
        config.model = ModelSpec(name="web")
        target = OpenAITarget(config)
        target.load()
        clock.start()
        target.score(outputs[0])
        clock.show(f"audit by {target.judged_by().line}")
        target.close()
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3000)
