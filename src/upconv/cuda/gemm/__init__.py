"""Kernels with output channels as M. See README.md."""
