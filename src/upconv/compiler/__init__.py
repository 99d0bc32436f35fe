"""``torch.compile``: what it traces of a transposed convolution, and whose kernel a compiled graph calls.

`operator` defines the operators, and `rule` decides which calls of a compiled graph are ours.
"""

from upconv.compiler import operator

__all__ = ["operator"]
