"""The OpenAI-compatible API over the engine, and the scripted server for tests and demonstrations."""
