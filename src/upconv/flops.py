"""The FLOPs of our operators, which ``FlopCounterMode`` counts by PyTorch's formulas for transposed convolutions.

Of calls of our functions a counter sees PyTorch's own operator anyway; these are for the operators themselves, as a
compiled graph has them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_COUNTER = "torch.utils.flop_counter"


Parse = Callable[[str], tuple[Any, ...]]
"""Of an operator's arguments, from its string."""


def _register(counter: ModuleType, arguments_of: Parse) -> None:
    """Has ``FlopCounterMode`` count our operators by the formulas that PyTorch has for its own transposed convolutions.

    ``counter`` is the module ``torch.utils.flop_counter``. Active counters, which copied the formulas when they were
    made, get these too; one made but not yet entered before upconv is imported does not know them.
    """

    def forward(input: Any, weight: Any, bias: Any, text: str, **rest: Any) -> int:
        stride, padding, output_padding, groups, dilation = arguments_of(text)
        found: int = counter.conv_flop(
            input, weight, bias, stride, padding, dilation, True, output_padding, groups, **rest
        )
        return found

    def backward(grad: Any, input: Any, weight: Any, text: str, mask: int, **rest: Any) -> int:
        stride, padding, output_padding, groups, dilation = arguments_of(text)
        asked = [bool(mask & 1), bool(mask & 2), False]
        found: int = counter.conv_backward_flop(
            grad, input, weight, None, stride, padding, dilation, True, output_padding, groups, asked, **rest
        )
        return found

    operators = torch.ops.upconv
    formulas = {operators.conv_transpose_forward: forward, operators.conv_transpose_backward: backward}
    for operator, formula in formulas.items():  # raw, since PyTorch's formulas take tensors too
        counter.register_flop_formula(operator, get_raw=True)(formula)
    for mode in _get_current_dispatch_mode_stack():
        active = getattr(mode, "counter", None)
        if isinstance(active, counter.FlopCounterMode):
            active.flop_registry.update(formulas)


class _Formulas(Loader):
    """Registers the formulas when `torch.utils.flop_counter` is imported, as the first finder in `sys.meta_path`.

    Importing it here would add 20 to 30 ms to importing upconv, and Triton where that is installed, though few count
    FLOPs; registering in a call of ours would be too late, since a ``FlopCounterMode`` copies the formulas when it is
    made. So they are there as soon as the module is. Whatever finds and loads the module does so as before.
    """

    def __init__(self, arguments_of: Parse) -> None:
        self._arguments_of = arguments_of

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                self._loader, spec.loader = spec.loader, self
                return spec
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            _register(module, self._arguments_of)


def register(arguments_of: Parse) -> None:
    """Has counters know the operators, which are defined; at once, or as soon as the module of counters is there.

    ``arguments_of``: what reads an operator's string of arguments.
    """
    if _COUNTER in sys.modules:
        _register(sys.modules[_COUNTER], arguments_of)
    else:
        sys.meta_path.insert(0, _Formulas(arguments_of))
