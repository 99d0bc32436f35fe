"""The README says what the reports say, and its commands and five lines run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_tables_are_generated_from_the_reports() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "readme.py", "--check"], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_changed_figure_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import readme

    figure = re.search(r"\| (\d+\.\d\dx) \|", README)
    assert figure is not None
    wrong = README.replace(figure[1], "99.99x")
    assert readme.rewritten(wrong) == README != wrong


def test_pictures_and_documents_it_names_exist() -> None:
    links = re.findall(r"\]\(((?!https?:)[^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_its_python_runs() -> None:
    """The first Python block, as a user would paste it."""
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert block is not None
    names: dict[str, object] = {}
    exec(block[1], names)
    layer, image, out = names["layer"], names["image"], names["out"]
    assert isinstance(layer, torch.nn.ConvTranspose2d) and isinstance(image, torch.Tensor)
    torch.testing.assert_close(out, torch.nn.ConvTranspose2d.forward(layer, image))
