"""upconv: transposed convolution in PyTorch, as fast as the hardware allows.

    from upconv import ConvTranspose2d  # a layer: torch.nn's signature, weights and results
    upconv.accelerate(model)                    # or every layer of a model, in place

Importing the package initialises no device, writes nothing and prints nothing.
"""

import upconv.compiler  # noqa: F401 - defines the operators
from upconv._version import __version__
from upconv.convert import accelerate, fold_batchnorm, restore, warmup
from upconv.export import export
from upconv.freezing import freeze, frozen, thaw
from upconv.functional import conv_transpose1d, conv_transpose2d, conv_transpose3d
from upconv.modules import (
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    LazyConvTranspose1d,
    LazyConvTranspose2d,
    LazyConvTranspose3d,
)
from upconv.refusals import strict
from upconv.summary import summary

__all__ = [
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "LazyConvTranspose1d",
    "LazyConvTranspose2d",
    "LazyConvTranspose3d",
    "__version__",
    "accelerate",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "export",
    "fold_batchnorm",
    "freeze",
    "frozen",
    "restore",
    "strict",
    "summary",
    "thaw",
    "warmup",
]
