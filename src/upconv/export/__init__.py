"""One layer -> one self-contained Python file with its CUDA kernels inline."""
