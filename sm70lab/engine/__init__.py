"""The built-in engine: Qwen3.5 / Qwen3-Next hybrids with native multi-token prediction."""
