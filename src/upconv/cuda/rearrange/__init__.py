"""The other families' kernels on rearranged tensors. See README.md."""
