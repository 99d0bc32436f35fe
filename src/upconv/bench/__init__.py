"""The bench: suites of real layers, timing against PyTorch, ceilings, correctness of every row, and the report."""
