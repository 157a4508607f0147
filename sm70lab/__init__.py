"""sm70lab: find the fastest speculative-decoding route that leaves a model's output intact."""

__version__ = "0.1.0"
