"""Kernels with pixels as M. See README.md."""
