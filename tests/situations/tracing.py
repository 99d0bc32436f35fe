"""TorchScript, fx, export, compiled graphs, fake tensors, packages."""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import upconv
from situations import BF16, Lab, error, seen, situation, step


def _traced(model: Any, *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(model, args, check_trace=False)


def _scripted(model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(model)


def _frozen(module: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.optimize_for_inference(torch.jit.freeze(module.eval()))


def _ops(graph: Any) -> list[str]:
    return sorted(n.kind() for n in graph.nodes() if n.kind().startswith("aten::"))


@situation(
    "pytorch/pytorch#50074", "Scripted and traced models are frozen, which folds norms into convolutions", ours=False
)
def frozen(lab: Lab) -> Any:
    model = lab.done(nn.Sequential(lab.layer(16, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), lab.layer(8, 4, 2, 2)))
    model, x = model.to(lab.device), lab.x()
    with torch.no_grad():
        model(x)
    model.eval()
    by_script, by_trace = _frozen(_scripted(model)), _frozen(_traced(model, x))
    return seen(by_script, x), seen(by_trace, x), _ops(by_trace.graph)


@situation("pytorch/pytorch#63552", "A model is traced inside an autocast region", ours=False)
def traced_under_autocast(lab: Lab) -> Any:
    model, x = lab.model().eval(), lab.x()
    with torch.no_grad(), torch.autocast(lab.device, torch.bfloat16, cache_enabled=False):
        traced = _traced(model, x)
        inside = traced(x)
    return inside, seen(traced, x), _ops(traced.inlined_graph)


@situation(
    "lernapparat/lernapparat#6", "A function is traced whose padding is computed from a tensor's size", ours=False
)
def traced_with_computed_padding(lab: Lab) -> Any:
    call = torch.nn.functional.conv_transpose2d if lab.way == "stock" else upconv.conv_transpose2d
    x, w = lab.x(1, 4, 5, 6), torch.randn(4, 3, 5, 5, device=lab.device)

    def f(x: Tensor, w: Tensor) -> Any:
        return call(x, w, None, 2, (w.size(-1) - 1) // 2)

    return error(lambda: _traced(f, x, w)(x, w))


@situation("onnx/onnx#1772", "A trace has the output's size of an encoder's input and meets other sizes", ours=False)
def traced_output_size(lab: Lab) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = lab.home("Conv2d")(4, 8, 3, 2, 1), lab.layer(8, 4, 3, 2, 1)

        def forward(self, x: Tensor) -> Any:
            return self.up(self.down(x), output_size=x.shape)

    net = lab.done(Net()).to(lab.device)
    traced = _traced(net, lab.x(1, 4, 9, 10))
    scripted = error(lambda: _scripted(net)(lab.x(1, 4, 8, 11)))
    sizes = ((9, 10), (8, 11), (12, 13))
    return [error(lambda size=size: seen(traced, lab.x(1, 4, *size))) for size in sizes], scripted


@situation("pytorch/pytorch#109596", "Parameters and inputs are fake tensors", ours=False)
def fake(lab: Lab) -> Any:
    model, x = lab.model(), lab.x()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = model(mode.from_tensor(x))
        built = lab.one()(torch.empty(2, 16, 5, 6, device=lab.device))
    return [(t.shape, t.stride(), t.dtype, t.device, type(t).__name__) for t in (found, built)], hasattr(
        model[0], "_conv_forward"
    )


@situation("pytorch/pytorch#195590", "A compiled layer's output has no pixels")
def compiled_empty_output(lab: Lab) -> Any:
    layer, x = lab.done(lab.layer(8, 4, 1, 1, 1)), lab.x(12, 8, 2, 2)
    eager = error(lambda: seen(layer, x))
    compiled = error(lambda: seen(torch.compile(layer, backend="aot_eager"), x))
    return eager, _agrees(compiled, eager), seen(layer, lab.x(2, 8, 4, 4))


def _agrees(compiled: Any, eager: Any) -> bool:
    """Whether a compiled call returns what the eager one does, or raises; what fake tensors raise has its own text."""
    return isinstance(compiled, tuple) or (isinstance(eager, Tensor) and compiled.shape == eager.shape)


@situation("pytorch/pytorch#124256", "A 1-D layer's weight has the strides of a channels_last image", ours=False)
def compiled_odd_weight(lab: Lab) -> Any:
    layer, x = lab.done(lab.layer(16, 33, 1, rank=1)), lab.x(2, 16, 20)
    w = layer.weight.data
    layer.weight.data = w.view(16, 33, 1, 1).to(memory_format=torch.channels_last).view(16, 33, 1)
    compiled = torch.compile(layer, backend="aot_eager")
    found = [seen(compiled, x), *step(compiled, x, layer.parameters())]
    return layer.weight.stride(), seen(layer, x), [t.contiguous() for t in found]


@situation("pytorch/pytorch#191106", "An autocast region is inside the compiled function", tolerance=BF16)
def compiled_autocast(lab: Lab) -> Any:
    model, x = lab.model(), lab.x()

    @torch.compile(backend="aot_eager")
    def run(x: Tensor) -> Any:
        with torch.autocast(lab.device, torch.bfloat16):
            y = model[0](x)
            with torch.autocast(lab.device, enabled=False):
                return model[2](y.float().relu())

    return step(run, x, model.parameters()), step(model, x)


@situation("pytorch/pytorch#144015", "Input and weight have different dtypes, in eager mode and compiled")
def compiled_mixed_dtypes(lab: Lab) -> Any:
    layer, x = lab.one().double(), lab.x()
    compiled = error(lambda: seen(torch.compile(layer, backend="aot_eager"), x))
    eager = error(lambda: seen(layer, x))
    return eager, _agrees(compiled, eager), seen(layer, x.double())


@situation(
    "onnx/onnx-tensorflow#750", "An exported inverse STFT by a transposed convolution has a dynamic length", ours=False
)
def exported_dynamic_length(lab: Lab) -> Any:
    call = torch.nn.functional.conv_transpose1d if lab.way == "stock" else upconv.conv_transpose1d

    class Inverse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(10, 1, 8, device=lab.device), requires_grad=False)

        def forward(self, x: Tensor) -> Any:
            return call(x, self.kernel, stride=4, padding=2)[..., : 4 * x.shape[-1] - 4]

    x, other = lab.x(2, 10, 7), lab.x(2, 10, 12)
    program = torch.export.export(Inverse(), (x,), dynamic_shapes=({2: torch.export.Dim.AUTO},))
    kinds = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    return seen(program.module(), x), seen(program.module(), other), [k for k in kinds if "conv" in k]


@situation("https://docs.pytorch.org/docs/stable/package.html", "`torch.package` packs a model and loads it back")
def packaged(lab: Lab) -> Any:
    model, x, file = lab.model(), lab.x(), io.BytesIO()
    first = seen(model, x)
    with torch.package.PackageExporter(file) as exporter:
        exporter.extern(["torch.**", "upconv.**", "collections", "sys"])
        exporter.save_pickle("model", "model.pkl", model)
    file.seek(0)
    again = torch.package.PackageImporter(file).load_pickle("model", "model.pkl")
    return first, seen(again, x), step(again, x)
