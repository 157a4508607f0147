"""Run llama.cpp's own converter, with one addition: a tokenizer it does not know counts as qwen2's.

    python gguf_child.py SOURCE convert_hf_to_gguf.py's arguments…

SOURCE is llama.cpp's source folder. The pre-tokenizer only matters for text that llama.cpp itself
turns into ids; the comparison sends ids.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

FALLBACK = "qwen2"


def main() -> None:
    """Patch the lookup of the pre-tokenizer, then run the converter as a script."""
    source = Path(sys.argv[1])
    script = source / "convert_hf_to_gguf.py"
    sys.path.insert(0, str(source))
    sys.argv = [str(script), *sys.argv[2:]]

    from conversion import ModelBase, TextModel  # type: ignore[import-not-found]  # llama.cpp's package

    known = TextModel.get_vocab_base_pre

    def lookup(self: ModelBase, tokenizer: Any) -> str:
        try:
            return str(known(self, tokenizer))
        except NotImplementedError:
            print(f"unknown pre-tokenizer: {FALLBACK} stands in", file=sys.stderr)
            return FALLBACK

    TextModel.get_vocab_base_pre = lookup
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
