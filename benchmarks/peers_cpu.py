"""Other engines on the embedded checkpoint, float32, greedy: transformers and llama.cpp."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch

from sm70lab.config import compose
from sm70lab.engine.loading import EMBEDDED

DRAFTS = 4


def _prompt() -> str:
    text = compose([]).workload.prompts[1].text
    assert text is not None
    return text


def transformers_greedy(tokens: int, threads: int) -> dict[str, float]:
    """transformers' own greedy decode with its cache."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(EMBEDDED)
    ids = tokenizer(_prompt(), return_tensors="pt").input_ids
    with torch.inference_mode():
        started = time.perf_counter()
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        speed = tokens / (time.perf_counter() - started)
    return {"tokens_per_second": speed, "rounds_per_second": speed, "acceptance_length": 1.0}


def llama_cpp(server: Path, tokens: int, threads: int) -> list[dict[str, float]]:
    """llama.cpp's own timings, without drafts and with its MTP drafts."""
    from tokenizers import Tokenizer

    from recipes.peers import gguf
    from recipes.peers.llama_server import Settings, complete

    ids = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json")).encode(_prompt()).ids
    with tempfile.TemporaryDirectory(prefix="llama-cpp-") as temporary:
        log = Path(temporary) / "output.log"
        weights = gguf.convert(gguf.find_source(server, None), EMBEDDED, Path(temporary), "f32", log)
        settings = Settings(server, weights, len(ids) + tokens + DRAFTS + 16, threads, timeout=600)
        found: list[dict[str, float]] = []
        for drafts in (0, DRAFTS):
            answer = complete(settings, ids, tokens, drafts, log)
            rounds = len(answer.ids) - 1 - answer.accepted  # the first token comes from the prompt
            length = (len(answer.ids) - 1) / rounds
            speed = answer.tokens_per_second
            found.append(
                {"tokens_per_second": speed, "rounds_per_second": speed / length, "acceptance_length": length}
            )
        return found
