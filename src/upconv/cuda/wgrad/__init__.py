"""The gradient for the weight on tensor cores. See README.md."""
