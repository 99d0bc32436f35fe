"""The example programs: each in its short form, then what a user may get wrong.

A process of its own has the one that CI runs beside the tests. All get one thread (`conftest`): beside others on the
same cores PyTorch's threads wait for each other at every small layer. On two overloaded cores a training step took 1 s
with two threads, and some 50 ms with one.
"""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

pytest.importorskip("matplotlib", reason="matplotlib draws the examples' pictures")
# Asked for, not imported, which would take 3 s of every worker's collection.
if importlib.util.find_spec("skimage") is None:
    pytest.skip("scikit-image carries the photographs", allow_module_level=True)
if importlib.util.find_spec("sklearn") is None:
    pytest.skip("scikit-learn carries the digits and two photographs", allow_module_level=True)

import numpy as np
from matplotlib import image

EXAMPLES = Path(__file__).parents[1] / "examples"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Matplotlib, given tensors
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a program prints that is run as a script in a fresh folder.

    In this process: of a program's 10 to 18 s in one of its own 7 to 9 were imports, which the other tests share.
    """

    def run(name: str, *arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name), *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(sys.argv[0], run_name="__main__")
        assert ended.value.code in (None, 0)
        return capsys.readouterr().out

    return run


def numbers(output: str, row: str) -> list[float]:
    """The numbers of the only table row whose first cell is ``row``."""
    (line,) = [line for line in output.splitlines() if line.startswith(f"│ {row} ")]
    return [float(number) for number in re.findall(r"\d+\.\d+", line)]


def assert_picture(path: Path, least_width: int, least_height: int) -> None:
    """A PNG of at least that size in pixels with more than a few colours, and no half-written file beside it."""
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    pixels = image.imread(path)
    assert pixels.shape[0] >= least_height and pixels.shape[1] >= least_width
    assert len(np.unique((pixels[..., :3] * 255).astype(np.uint8).reshape(-1, 3), axis=0)) > 15
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(("photo", "scale"), [("coffee", 4)])  # the astronaut at 3 is CI's job
def test_upscale_photo(run: Callable[..., str], tmp_path: Path, photo: str, scale: int) -> None:
    choice = ("--photo", photo, "--scale", str(scale), "--steps", "60")
    output = run("upscale_photo.py", "--quick", *choice, "--out", "here")
    assert "upscale: accelerated" in output

    (bicubic,) = numbers(output, "bicubic")
    by_torch, *torch_ms = numbers(output, "network, torch")
    by_upconv, *upconv_ms = numbers(output, "network, upconv")
    assert by_torch == pytest.approx(by_upconv, abs=0.0101)  # 0.01 dB; two decimals are printed
    assert len(torch_ms) == len(upconv_ms) == 2
    assert min(torch_ms + upconv_ms) > 0
    assert 20 < bicubic < 50
    # Over all photographs 200 steps end 0.08 (cat, 3x) to 0.8 dB (astronaut, 3x) above bicubic, coffee at 4x 0.44;
    # there 60 steps end 0.25 above.
    assert bicubic < by_upconv < bicubic + 3

    assert_picture(tmp_path / "here" / f"upscale_{photo}_x{scale}.png", 1200, 600)


def test_autoencoder_digits(run: Callable[..., str], tmp_path: Path) -> None:
    output = run("autoencoder_digits.py", "--quick")

    (linear,) = numbers(output, "principal components")
    by_torch, torch_ms = numbers(output, "autoencoder, torch")
    by_upconv, upconv_ms = numbers(output, "autoencoder, upconv")
    assert by_torch == pytest.approx(by_upconv, abs=1.01e-5)  # five decimals are printed
    assert torch_ms > 0 and upconv_ms > 0
    # The digits' own variance is 0.07. 10 epochs end at 0.024, the whole training at 0.005.
    assert 0.005 < linear < 0.02
    assert 0.001 < by_upconv < 0.035

    assert_picture(tmp_path / "out" / "autoencoder_digits.png", 800, 300)


def test_train_dcgan(run: Callable[..., str], tmp_path: Path) -> None:
    output = run("train_dcgan.py", "--quick", "--compare")

    torch_ms, *by_torch = numbers(output, "DCGAN, torch")
    upconv_ms, *by_upconv = numbers(output, "DCGAN, upconv")
    assert torch_ms > 0 and upconv_ms > 0
    assert by_upconv == pytest.approx(by_torch, rel=0.05) and len(by_torch) == 2
    # Both begin at 0.7, that of a coin's toss. A generator that learnt nothing from 30 steps would be above 6.
    generator, discriminator = by_upconv
    assert 0.1 < discriminator < 1.0 < generator < 6

    assert_picture(tmp_path / "out" / "train_dcgan.png", 1200, 400)


def test_train_unet(run: Callable[..., str], tmp_path: Path) -> None:
    output = run("train_unet.py", "--quick", "--steps", "15", "--width", "4", "--no-accelerate", "--amp")

    (threshold,) = numbers(output, "Otsu's threshold")
    by_torch, torch_ms = numbers(output, "U-Net, torch")
    by_upconv, upconv_ms = numbers(output, "U-Net, upconv")
    assert torch_ms > 0 and upconv_ms > 0
    assert by_torch == pytest.approx(by_upconv, abs=0.0101)
    # 15 steps end at 0.4 or so, 300 of the whole network above 0.8.
    assert 0.4 < threshold < 0.8 and 0.1 < by_upconv < 0.9

    assert_picture(tmp_path / "out" / "train_unet.png", 1200, 800)


@pytest.mark.parametrize("name", ["dcgan", "unet"])
def test_trainings_of_one_seed_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """benchmarks/curves.py: with equal seeds only roundings differ, and another seed is another training."""
    monkeypatch.syspath_prepend(str(EXAMPLES.parent / "benchmarks"))
    import curves

    made = curves.trained(name, 8, 4, 12, "cpu")
    assert list(made["losses"]) == list(curves.RUNS) == list(made["seconds"])
    for loss in curves.MODELS[name][1]:
        runs = {run: losses[loss] for run, losses in made["losses"].items()}
        assert {len(series) for series in runs.values()} == {12}
        for seed in range(curves.SEEDS):
            assert runs[f"upconv, seed {seed}"] == pytest.approx(runs[f"torch, seed {seed}"], rel=1e-3)
        assert runs["torch, seed 1"] != pytest.approx(runs["torch, seed 0"], rel=1e-2)
        assert curves.agree(runs)


@pytest.fixture
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(request.param, EXAMPLES / f"{request.param}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, request.param, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("program", "arguments", "named"),
    [
        ("upscale_photo", ["--photo", "nobody"], ["--photo", "'nobody'"]),
        ("autoencoder_digits", ["--latent", "0"], ["--latent"]),
        ("train_dcgan", ["--out", __file__], ["--out", "is a file"]),
        ("train_unet", ["--device", "tpu"], ["--device", "'tpu'"]),
    ],
    indirect=["program"],
)
def test_bad_arguments(
    program: ModuleType, arguments: list[str], named: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the parameter and the value, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(program.main)
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert all(word in result.output for word in named)
    assert not list(tmp_path.iterdir())
