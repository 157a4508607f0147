"""One file an operation: a plain-PyTorch reference, and its fast twins beside it."""
