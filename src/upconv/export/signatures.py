"""Constructors of ``ModelNew``: KernelBench's, and torch.nn's for any other layer."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from upconv.problem import Problem

_ATTRIBUTES = {1: "conv1d_transpose", 2: "conv_transpose2d", 3: "conv_transpose3d"}


@dataclass(frozen=True)
class Signature:
    """A constructor: its parameters with defaults, and what it hands on to torch.nn's layer."""

    rank: int
    parameters: tuple[tuple[str, str, str], ...]
    """Name, type and default of each; an empty default for none."""
    handed: tuple[tuple[str, str], ...]
    """Argument and value of torch.nn's layer, behind the two channels."""
    doc: str
    title: str
    """What the file is, to begin its first sentence."""
    measured: str
    """How fast it is, or how that is measured, in a sentence."""

    @property
    def attribute(self) -> str:
        """The attribute that holds the layer."""
        return _ATTRIBUTES[self.rank]

    def model(self) -> str:
        """The class up to the layer, as source."""
        parameters = [
            f"{name}: {kind}" + (f" = {default}" if default else "") for name, kind, default in self.parameters
        ]
        given = ["in_channels", "out_channels", *(f"{name}={value}" for name, value in self.handed)]
        return (
            "class ModelNew(nn.Module):\n"
            f'    """{self.doc}"""\n\n'
            f"    def __init__(\n{_filled('self', *parameters)}\n    ) -> None:  # fmt: skip\n"
            "        super().__init__()\n"
            f"        self.{self.attribute} = Layer(\n{_filled(*given, indent=12)}\n        )  # fmt: skip\n"
        )


def _filled(*items: str, indent: int = 8) -> str:
    """Items of a list, each with a comma, in as few lines as they need."""
    text = " ".join(f"{one.replace(' ', _FIXED)}," for one in items)
    margin = " " * indent
    return textwrap.fill(text, 120, initial_indent=margin, subsequent_indent=margin).replace(_FIXED, " ")


_FIXED = "\u00a0"  # a space at which no line is broken


# (whether sizes are tuples: "int", "tuple", or "kernel" for the kernel's alone; the arguments behind kernel_size)
_KERNELBENCH: dict[int, tuple[str, tuple[str, ...]]] = {
    57: ("int", ("stride", "padding", "output_padding", "groups")),
    58: ("tuple", ("stride", "padding", "output_padding", "groups")),
    61: ("int", ("stride", "padding", "output_padding", "groups")),
    64: ("int", ("stride", "padding", "output_padding", "groups")),
    65: ("kernel", ("stride", "padding", "output_padding", "groups")),
    68: ("tuple", ("stride", "padding", "output_padding", "groups")),
    69: ("tuple", ("stride", "padding", "output_padding", "dilation", "groups")),
    70: ("int", ("stride", "padding", "output_padding", "dilation", "groups")),
    71: ("int", ("stride", "padding", "output_padding", "groups")),
    72: ("tuple", ("stride", "padding", "output_padding", "groups")),
    73: ("int", ("stride", "padding", "output_padding", "groups")),
    74: ("int", ("stride", "padding", "dilation")),
    75: ("tuple", ("stride", "padding", "dilation", "groups")),
    77: ("int", ("stride", "padding", "dilation")),
    78: ("tuple", ("stride", "padding")),
    79: ("int", ("stride", "padding", "dilation")),
    81: ("int", ("stride", "padding", "dilation")),
}
KERNELBENCH = tuple(_KERNELBENCH)
"""The numbers of KernelBench's level-1 transposed convolutions."""

_LEAST = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1}


def kernelbench(number: int, p: Problem) -> Signature:
    """The constructor of a KernelBench level-1 problem, argument for argument."""
    kind, names = _KERNELBENCH[number]
    parameters = [("in_channels", "int", ""), ("out_channels", "int", "")]
    parameters.append(("kernel_size", "int" if kind == "int" else "tuple", ""))
    for name in names:
        if name == "groups":
            parameters.append((name, "int", "1"))
        elif kind == "tuple":
            parameters.append((name, "tuple", str((_LEAST[name],) * p.rank)))
        else:
            parameters.append((name, "int", str(_LEAST[name])))
    parameters.append(("bias", "bool", "False"))
    cubic = kind == "int" and p.rank == 3
    handed = [("kernel_size", "(kernel_size, kernel_size, kernel_size)" if cubic else "kernel_size")]
    handed += [(name, name) for name in (*names, "bias") if not (number == 73 and name == "output_padding")]
    arguments = ", ".join(repr(v).replace("'", '"') for v in init_arguments(number, p))
    doc = f"KernelBench level 1, problem {number}: ModelNew({arguments})."
    if number == 73:
        doc += (
            "\n\n    As in the original, output_padding is not handed on to the layer; the benchmark's sixth argument,"
            "\n    meant as groups, lands there.\n    "
        )
    command = "upconv bench --suite kernelbench --as-exported"
    measured = f"Its times are in docs/founding-models.md of upconv, measured by `{command}`."
    title = f"KernelBench level 1, problem {number}"
    return Signature(p.rank, tuple(parameters), tuple(handed), doc, title, measured)


def init_arguments(number: int, p: Problem) -> tuple[Any, ...]:
    """What KernelBench constructs a problem's model with (``get_init_inputs``)."""
    kind, names = _KERNELBENCH[number]
    found: list[Any] = [p.in_channels, p.out_channels, p.kernel[0] if kind == "int" else p.kernel]
    if number == 73:
        return (*found, p.stride[0], p.padding[0], 4)
    values = {name: getattr(p, name) for name in names}
    changed = [i for i, name in enumerate(names) if set(_tuple(values[name])) != {_LEAST.get(name, 1)}]
    given = names[: changed[-1] + 1 if changed else 0]
    found += [values[name] if kind == "tuple" or name == "groups" else values[name][0] for name in given]
    return tuple(found)


def _tuple(value: int | tuple[int, ...]) -> Sequence[int]:
    return (value,) if isinstance(value, int) else value


def layer(p: Problem) -> Signature:
    """torch.nn's constructor of a layer, all of whose defaults are the layer's own values."""
    values: tuple[tuple[str, str, Any], ...] = (
        ("in_channels", "int", p.in_channels),
        ("out_channels", "int", p.out_channels),
        ("kernel_size", "int | tuple", p.kernel),
        ("stride", "int | tuple", p.stride),
        ("padding", "int | tuple", p.padding),
        ("output_padding", "int | tuple", p.output_padding),
        ("groups", "int", p.groups),
        ("bias", "bool", p.bias),
        ("dilation", "int | tuple", p.dilation),
        ("padding_mode", "str", "zeros"),
        ("device", "torch.device | None", None),
        ("dtype", "torch.dtype | None", None),
    )
    parameters = tuple((name, kind, repr(value)) for name, kind, value in values)
    handed = tuple((name, name) for name, _, _ in values[2:])
    # Without the name of its module, which KernelBench's static check would take for a call.
    doc = f"ConvTranspose{p.rank}d's arguments; the defaults are the layer's."
    measured = 'Measured by `upconv export --layer "..." --check`.'
    return Signature(p.rank, parameters, handed, doc, str(p).split(" on ")[0], measured)
