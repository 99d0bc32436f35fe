"""Pickles, copies, threads and processes."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing as mp

from situations import BF16, Lab, seen, situation, step

CPU = ("cpu",)


def forked(run: Any) -> Any:
    """What a function returns in a forked process, or a text that says how it failed."""
    context = mp.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def child() -> None:
        try:
            found = run()
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        there.send_bytes(pickle.dumps(found))  # bytes: a tensor's memory would be shared, and gone with the process

    process = context.Process(target=child)
    process.start()
    there.close()
    try:
        return pickle.loads(here.recv_bytes()) if here.poll(30) else "no answer within 30 s"
    except EOFError:
        return "it died"
    finally:
        process.kill()
        process.join()


def arrays(found: Any) -> Any:
    return [arrays(f) for f in found] if isinstance(found, (list, tuple)) else found.detach().numpy()


def tensors(found: Any) -> Any:
    if isinstance(found, list):
        return [tensors(f) for f in found]
    return found if isinstance(found, str) else torch.from_numpy(found)


@situation("pytorch/pytorch#91547", "A process is forked after the first calls; then both train", devices=CPU)
def forked_training(lab: Lab) -> Any:
    model, x = lab.model(), lab.x(4, 16, 12, 12)
    first = seen(model, x)

    def run() -> Any:
        torch.set_num_threads(1)
        return arrays(step(model, x))

    return first, tensors(forked(run)), step(model, x)


@situation(
    "pytorch/pytorch#77732", "A model goes through a queue between processes: its weights stay shared", devices=CPU
)
def through_a_queue(lab: Lab) -> Any:
    model, x = lab.model(), lab.x()
    first = seen(model, x)
    again = pickle.loads(bytes(ForkingPickler.dumps(model)))
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    return first, seen(again, x), seen(model, x), step(again, x)


def in_threads(runs: list[Any]) -> list[Any]:
    found: dict[int, Any] = {}

    def run(i: int) -> None:
        try:
            found[i] = runs[i]()
        except Exception as error:
            found[i] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[i] for i in range(len(runs))]


@situation("pytorch/pytorch#25683", "Threads train and validate copies of one model at the same time")
def training_in_threads(lab: Lab) -> Any:
    models = [lab.model()]
    models += [copy.deepcopy(models[0]) for _ in range(3)]
    x = lab.x()

    def train(model: Any) -> Any:
        optimiser, found = torch.optim.SGD(model.parameters(), lr=0.5), []
        for _ in range(4):
            optimiser.zero_grad()
            model(x).square().mean().backward()
            optimiser.step()
            found.append(seen(model, x))
        return found

    return in_threads([lambda m=m: train(m) for m in models])


@situation(
    "pytorch/pytorch#20528",
    "Each thread has a setting of its own: inference mode, autocast, gradients off",
    tolerance=BF16,
)
def settings_of_threads(lab: Lab) -> Any:
    model, x = lab.model(), lab.x()
    inside = seen(model, x)

    def inference() -> Any:
        with torch.inference_mode():
            return [model(x).clone().is_inference() for _ in range(3)]

    def autocast() -> Any:
        with torch.autocast(lab.device, torch.bfloat16):
            return [seen(model, x) for _ in range(3)]

    def plain() -> Any:
        return [model(x).requires_grad for _ in range(3)], step(model, x)

    with torch.no_grad():
        return inside, in_threads([inference, autocast, plain, lambda: [seen(model, x) for _ in range(3)]])


@situation("NVIDIA/waveglow#127", "A whole model was saved before layers had a padding_mode")
def old_pickle(lab: Lab) -> Any:
    model, x, file = lab.model(), lab.x(), io.BytesIO()
    for layer in (model[0], model[2]):
        for name in ("padding_mode", "_reversed_padding_repeated_twice"):
            layer.__dict__.pop(name, None)
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    return [m.padding_mode for m in (again[0], again[2])], seen(again, x), step(again, x)
