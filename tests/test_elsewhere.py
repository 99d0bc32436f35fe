"""Accelerated models in other processes: where upconv is not installed, and in ones that are started for them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import upconv
from conftest import assert_close, forced_plans, printed
from upconv import modules

BARE = """
import sys
sys.path.append(sys.argv[1])
import torch
from torch import nn
try:
    import upconv
except ModuleNotFoundError as error:
    assert error.name == "upconv"
else:
    raise SystemExit(f"upconv is installed here: {upconv.__file__}")
"""
"""What each program starts with in the environment without upconv."""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages like the one that PyTorch is installed in, without upconv."""
    folder = tmp_path_factory.mktemp("packages")
    for package in Path(torch.__file__).parents[1].iterdir():
        if "upconv" not in package.name and package.suffix != ".pth":
            (folder / package.name).symlink_to(package)
    return folder


def run_bare(packages: Path, code: str, *args: object) -> str:
    """Runs a program in that environment: an isolated interpreter without its own site-packages."""
    return printed("-I", "-S", "-c", BARE + code, packages, *args)


def model() -> nn.Module:
    """Transposed and plain convolutions, one of them in a norm's parametrisation by hooks, one lazy."""
    torch.manual_seed(0)
    found = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding="same"), nn.ConvTranspose2d(4, 6, 4, 2, 1), nn.BatchNorm2d(6), nn.ReLU(),
        nn.ConvTranspose2d(6, 3, 3, 3, output_padding=1, groups=3, bias=False), nn.LazyConvTranspose2d(2, 2, 2),
    )  # fmt: skip
    found(torch.randn(2, 3, 6, 7))
    return found.eval()


def test_a_saved_model_loads_as_pytorchs_layers(packages: Path, tmp_path: Path) -> None:
    """Where upconv is missing; it computes the same there, and saved again comes back accelerated by one call."""
    stock, x = model(), torch.randn(2, 3, 6, 7)
    ours = upconv.accelerate(copy.deepcopy(stock), convolutions=True)
    wanted = stock(x).detach()
    file = tmp_path / "model.pt"
    torch.save({"model": ours, "x": x, "wanted": wanted}, file)
    code = """
file = sys.argv[2]
saved = torch.load(file, weights_only=False)
model = saved["model"]
torch.testing.assert_close(model(saved["x"]), saved["wanted"])
print([f"{type(m).__module__}.{type(m).__name__}" for m in model])
saved["model"] = model
torch.save(saved, file)
"""
    names = [f"{type(m).__module__}.{type(m).__name__}" for m in stock]  # type: ignore[attr-defined]
    assert run_bare(packages, code, file) == f"{names}\n"
    back = torch.load(file, weights_only=False)["model"]
    lines: list[str] = []
    upconv.accelerate(back, report=lines.append)
    assert [": accelerated" in line for line in lines] == [True] * 4 + [False]  # the plain one too
    assert nn.Conv2d in modules._installed
    with forced_plans("any") as forced:
        assert_close(back(x).detach(), wanted, length=4096)
    assert len(forced) == 3


def test_a_marked_model_in_a_new_process(tmp_path: Path) -> None:
    """Where upconv is installed: PyTorch's layers until `accelerate` is called, as `summary` says; then upconv's."""
    file = tmp_path / "model.pt"
    torch.save(upconv.accelerate(model()), file)
    code = f"""
import torch, upconv
model = torch.load({str(file)!r}, weights_only=False)
print({{row.why for row in upconv.summary(model, (1, 3, 6, 7)).rows}})
upconv.accelerate(model, report=print)
print(any("marks" in row.why for row in upconv.summary(model, (1, 3, 6, 7)).rows))
"""
    first, *lines, last = printed("-c", code).splitlines()
    assert first == "{'torch.nn.ConvTranspose2d.forward looks for no marks in this process; call upconv.accelerate'}"
    assert [": accelerated" in line for line in lines] == [True] * 3 + [False] and last == "False"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_scripts_load_without_upconv(packages: Path, tmp_path: Path) -> None:
    """Of accelerated layers and of upconv's own, scripted and traced, also with an output_size."""
    files, tensors = [], {}
    for rank in (1, 2, 3):
        x = torch.randn(2, 4, *(5, 6, 4)[:rank])
        stock = getattr(nn, f"ConvTranspose{rank}d")(4, 6, 3, 2, 1)
        own = getattr(upconv, f"ConvTranspose{rank}d")(4, 6, 3, 2, 1)
        own.load_state_dict(stock.state_dict())
        size = [2 * n for n in x.shape[2:]]
        tensors[rank] = x, stock(x).detach(), size, stock(x, size).detach()
        for layer in (upconv.accelerate(copy.deepcopy(stock)), own):
            for name, made in (("script", torch.jit.script(layer)), ("trace", torch.jit.trace(layer, x))):
                files.append(tmp_path / f"{len(files)}-{rank}-{name}.pt")
                torch.jit.save(made, files[-1])
    torch.save(tensors, tmp_path / "tensors")
    code = """
tensors = torch.load(sys.argv[2])
for file in sys.argv[3:]:
    _, rank, name = file.rpartition("/")[2].split("-")
    x, wanted, size, sized = tensors[int(rank)]
    loaded = torch.jit.load(file)
    torch.testing.assert_close(loaded(x), wanted)
    if name == "script.pt":
        torch.testing.assert_close(loaded(x, size), sized)
print(len(sys.argv[3:]))
"""
    assert run_bare(packages, code, tmp_path / "tensors", *files) == "12\n"
