"""Transposed convolution in PyTorch, as fast as the hardware allows."""

from upconv._version import __version__
