"""Triton kernels for rounds on a GPU, each beside its plain-PyTorch twin.

Modules here import Triton at the top: import them only where a GPU runs, or where kernels are compiled.
"""
