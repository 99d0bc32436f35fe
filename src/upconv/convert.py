"""Models as a whole: `accelerate` has upconv compute their convolutions, `restore` undoes it, `fold_batchnorm` folds,
`warmup` compiles ahead.

`accelerate` sets an attribute of a module and nothing else (`upconv.modules`). So its class, weights, hooks, training
state, parametrisations, shared modules and every reference to the module stay as they are.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils import parametrize

from upconv import freezing, modules, planner
from upconv.cuda import engine
from upconv.problem import PRECISIONS, Layout, Problem
from upconv.replay import native, replays

_log = logging.getLogger("upconv")
Model = TypeVar("Model", bound=nn.Module)
Report = Callable[[str], object]


def accelerate(model: Model, *, convolutions: bool = False, report: Report | None = None) -> Model:
    """Has upconv compute the transposed convolutions of a model, in place.

        upconv.accelerate(model, report=print)

    Each module is marked by an attribute that its copies and pickles keep. Its class stays torch.nn's, so a pickle
    loads where upconv is not installed. In a new process call `accelerate` on what was loaded: it takes every marked
    module again. The first call in a process gives torch.nn's classes a forward that looks for the mark, and drops what
    torch.compile has compiled before.

    Args:
        model: any module; it may be a transposed convolution itself.
        convolutions: also ``Conv1d``, ``Conv2d`` and ``Conv3d``. A convolution and its gradients are gradients of a
            transposed one, and the kernels of those compute it where they are expected to be faster than cuDNN: on a
            Hopper GPU in TF32, bfloat16 or float16, in NCHW above all; and, in training, where a call is so short that
            the host's time decides. Other calls stay PyTorch's, and of a call other passes, in channels_last often all
            but the gradient for the weight.
        report: called with a line for every convolution: accelerated, and whose operator runs on its device and why; or
            left, and why. A last line counts them (``print`` will do). Which operator runs may depend on shapes, which
            `upconv.summary` takes. The same lines go to the logger ``upconv`` at level INFO.

    Returns:
        The same model. Modules whose class or instance has a forward of its own are left as they are.
    """
    modules.require(model, "accelerate")
    if report is not None and not callable(report):
        raise TypeError(f"report must be called with each line, like print; got {report!r}")
    layers = [
        (names, module)
        for names, module in modules_of(model, _ConvNd)
        if convolutions or isinstance(module, _ConvTransposeNd) or modules.is_ours(module)
    ]
    wanted = report is not None or _log.isEnabledFor(logging.INFO)
    verdicts: list[bool | None] = []
    for names, module in layers:
        reason = modules.left(module)
        if reason is None:
            _mark(module)
        if wanted:
            verdict, line = (False, f"left: {reason}") if reason else _whose(module)
            verdicts += [] if reason else [verdict]
            _say(report, f"{' = '.join(names)}: {line}")
    if wanted:
        _say(report, _closing(model, [module for _, module in layers], verdicts))
    return model


def _mark(module: nn.Module) -> None:
    base = modules.base_of(type(module))
    assert base is not None
    if not modules.is_ours(module):
        vars(module)[modules.MARK] = True
    if modules.MARK in vars(module):
        modules.install(base)


def restore(model: Model, *, report: Report | None = None) -> Model:
    """Undoes `accelerate`, in place: PyTorch computes the modules again. It ends their promise to be frozen too.

    The forward that `accelerate` gave torch.nn's classes stays; it calls PyTorch's for modules without the mark.

    Args:
        model: a model, or a copy or part of one, that `accelerate` has seen.
        report: called with a line for every module restored.

    Returns:
        The same model. Modules built as upconv's in the first place stay.
    """
    modules.require(model, "restore")
    for names, module in modules_of(model, nn.Module):
        if vars(module).pop(modules.MARK, False):
            freezing.thaw(module)
            _say(report, f"{' = '.join(names)}: restored")
    return model


def modules_of(model: nn.Module, kind: type[nn.Module]) -> list[tuple[list[str], nn.Module]]:
    """Every module of a kind once, with all the names it goes by."""
    found: dict[int, tuple[list[str], nn.Module]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, kind):
            found.setdefault(id(module), ([], module))[0].append(name or "(the model itself)")
    return list(found.values())


def _say(report: Report | None, line: str) -> None:
    _log.info(line)
    if report is not None:
        report(line)


# --- what is said of a layer whose input is not known -----------------------------------------------------------------

_SIZES = {1: (64, 1024, 16384, 262144), 2: (8, 32, 128, 512), 3: (4, 12, 32, 128)}
"""Of an input along each dimension, for which a layer on a CPU is planned: from small to large ones."""
_BATCHES = (1, 8, 64)


def _whose(module: Any) -> tuple[bool | None, str]:
    """Whether upconv computes an accelerated module on its device (None: its input decides), and a sentence why."""
    tensor = next((t for t in (*module.parameters(), *module.buffers())), torch.empty(0))
    device = planner.device_of(tensor.device)
    where = "a CPU" if device.kind == "cpu" else device.gpu.name if device.gpu is not None else device.kind
    decides = f"accelerated: its input decides whose operator computes it on {where}; upconv's"
    reason, names = modules.passed_over(module), ""
    if reason is None and not module.in_channels:
        return None, "accelerated: its first input decides whose operator computes it"
    if reason is None:
        reason = _refusal(module, tensor.dtype, device)
    if reason is None and not module.transposed:
        return None, f"{decides} where it is expected to be faster"
    if reason is None and device.kind == "cpu":
        plans = _usual_plans(module, tensor.dtype, device)
        found = dict.fromkeys(plan.forward for plan in plans)
        ours = ", ".join(name for name in found if name != "native")
        if ours and "native" in found:
            return None, f"{decides} for some ({ours})"
        if not ours:
            reason = plans[-1].candidates[0].reason if plans else "it is no valid layer as it is set"
        names = f" ({ours})"
    if reason is None:
        return True, f"accelerated: upconv computes it on {where}{names}"
    return False, f"accelerated, but PyTorch's operator computes it on {where}: {reason}"


def _refusal(module: Any, dtype: torch.dtype, device: planner.Device) -> str | None:
    """Why PyTorch's operator computes an accelerated module whatever its input, in a sentence; or None."""
    if dtype not in PRECISIONS:
        return f"upconv computes in float32, bfloat16, float16 and float64, not in {dtype}"
    if device.kind not in ("cpu", "cuda"):
        return f"upconv has no engine for {device.kind} devices"
    if not module.transposed:
        return plain_refusal(module, device)
    return planner._no_kernels(Problem.make(1, 1, 1, (1,), 1), device) if device.kind == "cuda" else None


def plain_refusal(module: Any, device: planner.Device) -> str | None:
    """Why PyTorch's operator computes an accelerated plain convolution whatever its input, in a sentence; or None."""
    if device.unavailable is not None:
        return device.unavailable
    if device.gpu is None or device.gpu.capability != (9, 0):
        return "plain convolutions are upconv's on GPUs of compute capability 9.0 alone"
    if module.groups != 1 or module.padding_mode != "zeros":
        return "plain convolutions are upconv's without groups and padded with zeros"
    return None


def _usual_plans(module: Any, dtype: torch.dtype, device: planner.Device) -> list[planner.Plan]:
    """A layer's plans for inputs of many sizes, the largest last: no reason of size holds for that one."""
    rank, plans = len(module.kernel_size), []
    biased = module._parameters.get("bias", module) is not None  # a parametrised one is there too
    reach = max(d * k // s for d, k, s in zip(module.dilation, module.kernel_size, module.stride))
    lengths = sorted({*_SIZES[rank], 2 * reach + 1})  # one is larger than the kernel
    thin = [size for size in product((1, lengths[-1]), repeat=rank) if min(size) < max(size)]  # strips
    layouts: tuple[Layout, ...] = ("channels_last", "nchw") if rank > 1 else ("nchw",)
    for layout, size, batch in product(layouts, (*thin, *((n,) * rank for n in lengths)), _BATCHES):
        try:
            problem = Problem.make(
                batch, module.in_channels, module.out_channels, size, module.kernel_size, module.stride,
                module.padding, module.output_padding, module.dilation, module.groups, bias=biased, dtype=dtype,
                layout=layout,
            )  # fmt: skip
        except (TypeError, ValueError):  # no transposed convolution, of this size at least
            continue
        plans.append(planner.plan(problem, device))
    return plans


def _closing(model: nn.Module, found: Sequence[nn.Module], verdicts: Sequence[bool | None]) -> str:
    """How many of the convolutions found are accelerated, and how many of those upconv computes (``verdicts``)."""
    if not found:
        plain = sum(isinstance(m, tuple(modules.PLAIN)) for m in model.modules())
        more = f"; accelerate(model, convolutions=True) takes its {plain} plain ones" if plain else ""
        scripted = any(isinstance(m, torch.jit.ScriptModule) for m in model.modules())
        more += "; its scripted modules are PyTorch's" if scripted else ""
        return f"nothing to accelerate: the model has no transposed convolution module{more}"
    kinds = {bool(getattr(m, "transposed", False)) for m in found}
    line = f"{len(verdicts)} of {len(found)} {'transposed ' if kinds == {True} else ''}convolutions accelerated"
    if not verdicts:
        return line
    devices = {t.device.type for m in found for t in m.parameters()}
    on = " and ".join("a CPU" if kind == "cpu" else kind for kind in sorted(devices)) or "a CPU"
    ours, theirs, open_ = (verdicts.count(value) for value in (True, False, None))
    undecided = f"; of {open_} the input decides" if open_ else ""
    return (
        f"{line}; on {on} upconv computes {ours} of {len(verdicts)}, PyTorch's operator {theirs}{undecided}"
        " (upconv.summary(model, example) tells for your shapes)"
    )


# --- warming up ------------------------------------------------------------------------------------------------------

Progress = Callable[[str, int, int], object]


def warmup(model: nn.Module, *example: Any, training: bool = False, progress: Progress | None = None) -> list[str]:
    """Compiles, in threads, and loads every CUDA kernel that a model needs for an example, so that no later call waits.

    The model runs once on the example, in eval mode and without gradients. Random numbers go on as if it had not. Where
    a kernel is not loaded yet, PyTorch's operator stands in. Kernels are compiled for the layer, not for the image
    size, but other sizes may need other tiles. Autocast and precision settings count as they are now.

    Args:
        model: any module; on a CPU there is nothing to compile.
        example: the model's arguments: tensors, or shapes (tuples of integers) for random tensors of the model's own
            dtype and device. A single list or dict is taken as all arguments, by position or by name.
        training: also the kernels of the gradients for input and weight, and what replays calls without Python
            (`upconv.replay.native`), which takes half a minute the first time.
        progress: called as ``progress(label, done, total)`` behind each source that is compiled or found in the cache.

    Returns:
        A line for each source, like ``gather 64->64 k3x7 for sm_90a``; of those loaded before, none.

    Raises:
        RuntimeError: a kernel that cannot be compiled; names the problem and the plan.
    """
    modules.require(model, "warmup")
    from upconv.cuda import warming  # which prepares for threads

    with torch.random.fork_rng(devices_of(model)):
        args, kwargs = arguments(model, example)
        with evaluated(model), torch.no_grad(), engine.collecting(every=training) as wanted:
            model(*args, **kwargs)
    replayed = training and bool(wanted) and replays.hoped
    if replayed:
        native.module()  # in the background, while the kernels are compiled
    lines = warming.load(wanted, progress)
    if replayed:
        native.wait()
    return lines


def devices_of(model: nn.Module) -> list[int]:
    """The GPUs that a model's parameters are on, whose random numbers it may draw."""
    return sorted({t.device.index for t in model.parameters() if t.is_cuda})


def arguments(model: nn.Module, example: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """A model's arguments by position and by name as an ``example`` gives them: shapes as random tensors (`warmup`)."""
    args: Sequence[Any] = example
    kwargs: dict[str, Any] = {}
    if len(example) == 1 and isinstance(example[0], dict):
        args, kwargs = (), example[0]
    elif len(example) == 1 and isinstance(example[0], list):
        args = example[0]
    first = next((t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()), torch.empty(0))

    def tensor(value: Any) -> Any:
        shape = isinstance(value, (tuple, torch.Size)) and bool(value) and all(type(n) is int for n in value)
        return torch.randn(value, dtype=first.dtype, device=first.device) if shape else value

    return [tensor(value) for value in args], {name: tensor(value) for name, value in kwargs.items()}


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; afterwards each module in its own mode again."""
    training = [module for module in model.modules() if module.training]
    # By the attribute: a `train` of the model's own may do more, as adapters that merge their weights do.
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


# --- folding ---------------------------------------------------------------------------------------------------------


class _Leaves(fx.Tracer):
    """Traces through containers; every convolution and norm is a leaf, also those whose class is not torch.nn's."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (_ConvNd, _BatchNorm)) or super().is_leaf_module(m, module_qualified_name)


def fold_batchnorm(model: Model, *, report: Report | None = None) -> Model:
    """Folds each BatchNorm that follows a transposed convolution into its weight and bias, in place, for inference.

    With ``scale = gamma / sqrt(var + eps)`` per output channel, ``weight *= scale`` and ``bias = (bias - mean) * scale
    + beta``. The output channels of a transposed convolution's weight are its second dimension, within each group, so
    the scale is laid out by group: right for grouped and depthwise layers.

    Args:
        model: a model in eval mode, of torch.nn's layers or upconv's.
        report: called with a line for every BatchNorm folded, and for every one that was left behind a transposed
            convolution, and why.

    Returns:
        The same model, each folded norm replaced by `torch.nn.Identity`.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: the model is in training mode.
    """
    modules.require(model, "fold_batchnorm")
    if model.training:
        raise ValueError("fold_batchnorm needs a model in eval mode, got one in training mode; call model.eval() first")
    uses = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    for prefix, root, conv_name, norm_name, alone in _pairs(model):
        conv, norm = root.get_submodule(conv_name), root.get_submodule(norm_name)
        assert isinstance(conv, _ConvTransposeNd) and isinstance(norm, _BatchNorm)
        reason = _keep_reason(conv, norm)
        if reason is None and not alone:
            reason = "the convolution's output is used elsewhere too"
        if reason is None and (uses[id(conv)] > 1 or uses[id(norm)] > 1):
            reason = "a module of the pair is used in several places"
        if reason is None:
            _fold(conv, norm)
            owner, _, leaf = norm_name.rpartition(".")
            setattr(root.get_submodule(owner), leaf, nn.Identity())
        _say(report, f"{prefix}{norm_name}: " + (f"left: {reason}" if reason else f"folded into {prefix}{conv_name}"))
    return model


def _pairs(model: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module, str, str, bool]]:
    """(prefix, root, convolution, norm, whether nothing else reads the convolution), found by tracing.

    A module that cannot be traced (data-dependent control flow) is searched child by child.
    """
    has_both = {any(isinstance(m, kind) for m in model.modules()) for kind in (_ConvTransposeNd, _BatchNorm)}
    if has_both != {True}:
        return []
    try:
        graph = _Leaves().trace(model)
    except Exception:  # whatever the user's forward raises on proxies: it cannot be traced
        return [pair for name, child in model.named_children() for pair in _pairs(child, f"{prefix}{name}.")]
    called = Counter(node.target for node in graph.nodes if node.op == "call_module")
    found = []
    for node in graph.nodes:
        source = node.args[0] if node.op == "call_module" and node.args else None
        if not isinstance(source, fx.Node) or source.op != "call_module":
            continue
        conv_name, norm_name = str(source.target), str(node.target)
        if isinstance(model.get_submodule(conv_name), _ConvTransposeNd) and isinstance(
            model.get_submodule(norm_name), _BatchNorm
        ):
            alone = len(source.users) == 1 and called[source.target] == 1 and called[node.target] == 1
            found.append((prefix, model, conv_name, norm_name, alone))
    return found


def _keep_reason(conv: _ConvTransposeNd, norm: _BatchNorm) -> str | None:
    if conv.training or norm.training:
        return "the pair is in training mode"
    if norm.running_mean is None or norm.running_var is None:
        return "the norm keeps no running statistics"
    if parametrize.is_parametrized(conv) or parametrize.is_parametrized(norm):
        return "a module of the pair is parametrised; remove the parametrisation first"
    if "weight" not in conv._parameters:
        return "the convolution's weight is computed by a hook (weight or spectral norm); remove it first"
    for module in (conv, norm):
        if module._forward_hooks or module._forward_pre_hooks:
            return "a module of the pair has forward hooks"
    if norm.num_features != conv.out_channels:
        return f"the norm has {norm.num_features} features and the convolution {conv.out_channels} output channels"
    return None


@torch.no_grad()
def _fold(conv: _ConvTransposeNd, norm: _BatchNorm) -> None:
    """In float64, since it is done once; the parameters keep their dtype."""
    assert norm.running_mean is not None and norm.running_var is not None

    def wide(t: Tensor | None, default: float) -> Tensor:
        if t is None:
            return torch.full((conv.out_channels,), default, dtype=torch.float64, device=conv.weight.device)
        return t.detach().double()

    scale = wide(norm.weight, 1.0) / (norm.running_var.double() + norm.eps).sqrt()
    bias = (wide(conv.bias, 0.0) - norm.running_mean.double()) * scale + wide(norm.bias, 0.0)
    by_group = scale.view(conv.groups, 1, -1, *(1,) * len(conv.kernel_size))
    weight = conv.weight.double().unflatten(0, (conv.groups, -1)) * by_group
    dtype, grad = conv.weight.dtype, conv.weight.requires_grad
    last = conv.weight  # its layout (channels_last weights stay so)
    folded = torch.empty_like(last).copy_(weight.flatten(0, 1))
    conv.weight = nn.Parameter(folded, requires_grad=grad)
    conv.bias = nn.Parameter(bias.to(dtype), requires_grad=grad)
