"""Kernels on CUDA cores: few channels, depthwise layers, float64. See README.md."""
