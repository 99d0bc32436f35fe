"""Compiling kernels with NVRTC, keeping them, and launching them."""
