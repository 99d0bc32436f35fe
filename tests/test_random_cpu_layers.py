"""A few hundred of the random layers of `random_cpu_layers`, as planned and as if they were large."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from conftest import forced_plans
from random_cpu_layers import check, layer, verdict
from upconv import cpu


@pytest.mark.parametrize("large", [False, True])
def test_random_layers_are_right(large: bool) -> None:
    # PyTorch's kernels corrupt the heap on some images under 4 pixels, whoever asks; float64 goes without them.
    indices = [i for i in range(700) if layer(7, i).dtype is torch.float64 or min(layer(7, i).size) >= 4]
    told: dict[int, tuple[str, str]] = {}
    threads = torch.get_num_threads()
    try:
        check(7, indices, large, lambda found: told.update({found[0]: found[1:]}))
    finally:
        torch.set_num_threads(threads)
    assert len(told) >= 200
    assert Counter(result for result, _ in told.values()) == Counter(right=len(told))
    if large:
        assert {"shuffle", "flip", "unbiased"} <= {plan.split(",")[0] for _, plan in told.values()}


def test_a_wrong_layer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is off by 2^-10 is wrong, though PyTorch's operator is right."""
    exact = cpu.forward
    p = next(p for p in (layer(7, i) for i in range(700)) if p.dtype is torch.float64 and min(p.stride) > 1)
    with forced_plans("shuffle") as forced:
        assert verdict(p) == "right" and forced
        monkeypatch.setattr(cpu, "forward", lambda *given: exact(*given) * (1 + 2**-10))
        assert verdict(p) == "wrong"
