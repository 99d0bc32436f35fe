"""Results that the copy engine stores: what threads leave in shared memory, and where its boxes bring that."""

from __future__ import annotations

import math
import random
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from gather_interpreter import Floats, Interpreter
from test_host import epilogue, tiles
from upconv.cuda import boxes, gather, jit
from upconv.cuda.gpu import H200
from upconv.cuda.tiling import Tiling, result_shape
from upconv.problem import Problem


def tilings(p: Problem) -> list[Tiling]:
    layer = gather.any_size(p)
    return [
        *gather.candidates(layer, H200, classes=gather.classes_of(p), drained=True),
        *gather.candidates(layer, H200, size=p.size, drained=True),
    ]


def layers(count: int) -> list[Problem]:
    """Random layers whose result is drained."""
    rng = random.Random(7)
    found: list[Problem] = []
    while len(found) < count:
        pass_ = rng.choice(("fwd", "fwd", "grad-input"))
        stride = tuple(rng.choice((1, 2, 2, 4)) if pass_ == "fwd" else 1 for _ in range(2))
        size = tuple(rng.choice((4, 7, 8, 16, 20, 33, 40)) for _ in range(2))
        kernel = tuple(rng.randint(step, 5) for step in stride)
        padding = tuple(rng.randint(0, 2) for _ in range(2))
        try:
            channels = rng.choice((16, 24, 72)), rng.choice((8, 40, 72, 130))
            p = Problem.make(rng.randint(1, 5), *channels, size, kernel, stride, padding, dtype=torch.bfloat16)
            p = p.with_(pass_=pass_)
        except ValueError:
            continue
        if gather.drains(p) and tilings(p):  # rows of the source that begin anywhere are copied by threads
            found.append(p)
    return found


class Epilogue:
    """A consumer's sums by gather_epilogue.cuh's formulas, to a result that lies as `gather.result_map` says."""

    def __init__(self, tiling: Tiling, p: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
        self.t, self.p, self.of = tiling, p, Interpreter(tiling)
        m = self.m = self.of.m
        self.run = self.run_groups * 8
        self.run_subtiles = self.run_groups if m["SUB_H"] == 8 else max(1, self.run_groups // 8)
        self.runs_of_subtile = 8 if m["SUB_H"] == 8 else 1 if self.run_groups > 8 else 8 // self.run_groups
        seen: list[tuple[object, ...]] = []
        monkeypatch.setattr(gather, "encode", lambda *arguments: seen.append(arguments) or b"")
        gather.result_map(tiling, p, 0)
        (arguments,) = seen
        tensor, _, dtype, self.box, steps, self.span = arguments
        assert isinstance(tensor, boxes.Tensor5) and dtype is torch.bfloat16 and steps == (1,) * 5
        assert all(stride % 16 == 0 for stride in tensor.strides), "what the engine reads"
        self.dims, self.strides = tensor.dims, (2, *tensor.strides)

    @property
    def run_groups(self) -> int:
        return int(self.m["RUN_GROUPS"])

    def first_of_run(self, r: int) -> int:
        if self.m["PAIRED"]:
            return r // 2 * (2 * self.run_subtiles) + r % 2
        return r * self.run_subtiles

    def group(self, r: int, i: int, k: int) -> tuple[int, int]:
        """Subtile and group of 8 columns."""
        first = self.first_of_run(r)
        if self.m["PAIRED"]:
            return first + 2 * k, i
        if self.m["SUB_H"] == 8:
            return first + k, i
        return first + k // 8, k % 8 if self.run_groups > 8 else i * self.run_groups + k

    def swizzled(self, at: int) -> int:
        return at ^ (at >> 7 & (self.span // 16 - 1)) << 4

    def store(self, y: Floats, corner: tuple[int, int, int], phase: int, wg: int, block: int, values: Floats) -> None:
        """``values``: [channel of the block, column of the consumer's, phase of W]."""
        m, of, span = self.m, self.of, self.span
        w_subs, nb, rows = int(m["W_SUBS"]), of.nb, 8 if m["SUB_H"] == 8 else 1
        run_boxes, box_bytes = self.run * w_subs * 2 // span, rows * 16 * span
        first_subtile = nb if m["SPLIT"] == 0 and wg else 0
        for warp in range(4):
            cout = block * 64 + warp * 16
            if cout >= m["COUT_G"]:
                continue
            buffer = np.full(nb * 64 * w_subs * 16, np.nan)
            for r, i, h, k, lane in product(
                range(nb // self.run_subtiles), range(self.runs_of_subtile), (0, 1), range(self.run_groups), range(32)
            ):
                g, q = lane >> 2, lane & 3
                subtile, j = self.group(r, i, k)
                at = k * 8 * w_subs * 2
                box = (r if m["SUB_H"] == 8 else r * self.runs_of_subtile + i) * run_boxes + at // span
                lanes = (q * 4 * w_subs) ^ ((g * span >> 7 & (span // 16 - 1)) << 4)
                to = (
                    g * span
                    + box * box_bytes
                    + ((i if m["SUB_H"] == 8 else 0) * 16 + 8 * h) * span
                    + (at % span ^ lanes)
                )
                words = values[
                    warp * 16 + 8 * h + g, subtile * 64 + 8 * j + 2 * q : subtile * 64 + 8 * j + 2 * q + 2
                ].ravel()
                assert to % (4 * w_subs) == 0 and np.isnan(buffer[to // 2 : to // 2 + len(words)]).all()
                buffer[to // 2 : to // 2 + len(words)] = words
            assert not np.isnan(buffer).any(), "what boxes bring is written"
            for r, i, k in product(
                range(nb // self.run_subtiles), range(1 if m["SUB_H"] == 8 else self.runs_of_subtile), range(run_boxes)
            ):
                box = (r if m["SUB_H"] == 8 else r * self.runs_of_subtile + i) * run_boxes + k
                n, _, h, w = (int(v) for v in of.place_of(np.array(first_subtile + self.first_of_run(r))))
                column = m["OUT_STEP_W"] * (corner[2] + w + i * self.run) + k * (span // 2)
                self.bring(y, buffer, box * box_bytes, (column, cout, corner[1] + h, phase, corner[0] + n))

    def bring(self, y: Floats, buffer: Floats, at: int, begin: tuple[int, ...]) -> None:
        assert begin[0] * 2 % 16 == 0 and at % 128 == 0 and self.span in (32, 64, 128)
        assert self.box[0] * 2 == self.span, "a row is as wide as the swizzle"
        for i, place in enumerate(np.ndindex(*self.box[::-1])):
            where = [b + o for b, o in zip(begin, place[::-1])]
            if all(0 <= v < n for v, n in zip(where, self.dims)):
                to = sum(v * s for v, s in zip(where, self.strides)) // 2
                assert np.isnan(y[to]), "every output is stored once"
                y[to] = buffer[self.swizzled(at + i * 2) // 2]


@pytest.mark.parametrize("p", layers(24), ids=str)
def test_boxes_bring_every_output_to_its_place(p: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    every = tilings(p)
    assert every
    for t in random.Random(str(p)).sample(every, min(2, len(every))):
        e = Epilogue(t, p, monkeypatch)
        m, of = e.m, e.of
        batch, channels, *size = result_shape(p)
        out_h, out_w = size
        y = np.full(batch * channels * out_h * out_w, np.nan)
        steps_h, steps_w = int(m["OUT_STEP_H"]), int(m["OUT_STEP_W"])
        assert steps_w == m["W_SUBS"] and m["SUBS"] == 1 and m["VARIANTS"] == steps_h
        ids = np.arange(math.prod(result_shape(p)), dtype=float).reshape(batch, channels, out_h, out_w)
        counts = [
            -(-n // tile)
            for n, tile in zip((batch, -(-out_h // steps_h), -(-out_w // steps_w)), (t.tile[0], *t.tile[2:]))
        ]
        blocks = -(-channels // 64)
        for corner in product(*(range(0, n * tile, tile) for n, tile in zip(counts, (t.tile[0], *t.tile[2:])))):
            for variant, block, wg in product(range(steps_h), range(blocks), range(2)):
                if m["SPLIT"] == 1 and wg != block % 2:
                    continue
                subtiles = of.nb * 64
                values = np.full((64, subtiles, steps_w), -1.0)  # of what no image has
                first = of.nb if m["SPLIT"] == 0 and wg else 0
                for subtile, column in product(range(of.nb), range(64)):
                    n, _, h, w = (int(v) for v in of.place_of(np.array(first + subtile)))
                    h, w = (h + column // 8, w + column % 8) if m["SUB_H"] == 8 else (h, w + column)
                    n, oh, ow = corner[0] + n, steps_h * (corner[1] + h) + variant, steps_w * (corner[2] + w)
                    if n < batch and oh < out_h and ow < out_w:
                        have = ids[n, block * 64 : block * 64 + 64, oh, ow : ow + steps_w]
                        values[: len(have), subtile * 64 + column, : have.shape[1]] = have
                phase = int(np.atleast_1d(m["SUBS_H"])[variant])
                assert phase == variant
                e.store(y, corner, phase, wg, block, values)  # type: ignore[arg-type]
        assert (y == ids.ravel()).all()


@pytest.mark.parametrize("p", layers(24)[::2], ids=str)
def test_the_kernels_source_stores_every_output(p: Problem, tmp_path: Path) -> None:
    """Compiled for the host, its words and boxes as written."""
    tiling = random.Random(f"host {p}").choice(tilings(p))
    assert tiles(epilogue(tiling, tmp_path), 1, 80) > 500


def test_which_results_are_drained() -> None:
    p = Problem.make(4, 32, 64, (8, 20), 4, 2, 1, dtype=torch.float16, precision="fp16")
    assert gather.drains(p)
    assert not gather.drains(p.with_(dtype=torch.float32, precision="tf32")), "a tile's outputs are too many"
    assert not gather.drains(p.with_(layout="channels_last"))
    assert not gather.drains(p.with_(size=(8, 18))), "rows of 36 begin off 16 bytes"
    assert not gather.drains(p.with_(size=(8, 20), output_padding=(1, 0))), "the phases of H have unequal rows"
    assert not gather.drains(p.with_(pass_="grad-input")), "such tiles read more than they store"
    assert not gather.drains(Problem.make(4, 32, 64, (20,), 4, 2, 1, dtype=torch.float16, precision="fp16"))
    assert not gather.drains(Problem.make(4, 32, 64, (4, 8, 20), 4, 2, 1, dtype=torch.float16, precision="fp16"))
    assert not gather.drains(Problem.make(4, 32, 64, (20,), 4, 2, 1, groups=2, dtype=torch.float16, precision="fp16"))


CHOSEN = (  # as gradients for the input those without a stride
    Problem.make(128, 512, 256, (8, 8), 4, 2, 1, dtype=torch.bfloat16),
    Problem.make(128, 256, 128, (16, 16), 4, 2, 1, dtype=torch.float16),
    Problem.make(16, 256, 128, (64, 64), 4, 2, 1, dtype=torch.bfloat16),
    Problem.make(16, 256, 256, (64, 64), 3, 2, 1, 1, dtype=torch.float16),
    Problem.make(8, 64, 64, (1024, 1024), 3, 1, dtype=torch.bfloat16, pass_="grad-input"),
)


@pytest.mark.parametrize("p", CHOSEN, ids=str)
def test_compiled_kernels_spill_nothing(p: Problem) -> None:
    chosen = gather.choose(p, H200)
    assert not isinstance(chosen, str) and chosen.tiling.drained
    for unit in (*chosen.sources(), *chosen.packing_sources):
        code, _, log = jit.built(unit.source, "90a", unit.label)
        assert jit.inspect(code)["gather"][1] == 0 and not jit.serialised(log)


def test_the_planner_drains_where_its_model_gains() -> None:
    """DCGAN's layers, whose epilogues nothing else hides."""
    p = Problem.make(128, 128, 64, (32, 32), 4, 2, 1, dtype=torch.bfloat16, precision="bf16")
    chosen = gather.choose(p, H200)
    assert not isinstance(chosen, str) and chosen.tiling.drained and "copy engine" in chosen.summary
    general = gather.choose(p, H200, general=True)
    assert not isinstance(general, str) and not general.tiling.drained, "exported files have no map of the result"
