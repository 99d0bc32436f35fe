"""Cases on a CPU, from public reports: stock PyTorch beside upconv. A line a case, OK or FAIL."""

import multiprocessing as mp
import statistics
import sys
import time
import traceback

import torch
import torch._dynamo  # once, ahead of the forks
import torch.nn as nn
import torch.nn.functional as F

import upconv

CASES = []


def case(f):
    CASES.append(f)
    return f


def near(a, b, tol=1e-4):
    assert a.shape == b.shape, (a.shape, b.shape)
    error = ((a - b).norm() / b.norm().clamp_min(1e-30)).item()
    assert error < tol, f"relative error {error:.2g}"


def twins(*args, kind="ConvTranspose2d", **kw):
    torch.manual_seed(0)
    a = getattr(nn, kind)(*args, **kw).eval()
    b = getattr(upconv, kind)(*args, **kw).eval()
    b.load_state_dict(a.state_dict())
    return a, b


@case
def compiled_jvp():
    a, b = twins(4, 6, 3, 2, 1)
    x = torch.randn(2, 4, 5, 6)
    f = lambda m: torch.compile(lambda t: torch.func.jvp(m, (t,), (t,))[1], backend="aot_eager")(x)
    near(f(b), f(a))


@case
def compiled_func_grad():
    a, b = twins(4, 6, 3, 2, 1)
    x = torch.randn(2, 4, 5, 6)
    f = lambda m: torch.compile(lambda t: torch.func.grad(lambda z: m(z).pow(2).sum())(t), backend="aot_eager")(x)
    near(f(b), f(a))


@case
def compiled_vmap_without_a_warning():
    import warnings

    a, b = twins(4, 6, 3, 2, 1)
    x = torch.randn(3, 2, 4, 5, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        near(torch.compile(torch.func.vmap(b), backend="aot_eager")(x), torch.func.vmap(a)(x))


@case
def enormous_stride_raises_at_once():
    x, w = torch.ones(1, 4, 5, 5), torch.ones(4, 3, 3, 3)
    said = []
    for f in (F.conv_transpose2d, upconv.conv_transpose2d):
        t = time.perf_counter()
        try:
            f(x, w, stride=200000)
            said.append("nothing")
        except Exception as error:
            said.append(f"{type(error).__name__}")
        assert time.perf_counter() - t < 5
    assert said[0] == said[1], said


def times(a, b, x, enough, most=40):
    """Median times of a and b, called in turn until `enough(stock, ours)`, for a machine that does other work too.

    Looking after each turn favours b a little: the test is for times that are several times as long.
    """
    seen = [], []
    with torch.no_grad():
        a(x), b(x)
        for turn in range(most):
            for m, its in zip((a, b), seen):
                t = time.perf_counter()
                m(x)
                its.append(time.perf_counter() - t)
            if turn >= 4 and enough(*map(statistics.median, seen)):
                break
    return [statistics.median(its) for its in seen]


@case
def stride_of_thousands_is_not_slow():
    a, b = twins(4, 4, 3, 1000)
    x = torch.randn(1, 4, 5, 5)
    t = time.perf_counter()
    y = b(x)
    assert time.perf_counter() - t < 5
    near(y, a(x))
    enough = lambda stock, ours: ours < 3 * stock + 0.2
    stock, ours = times(a, b, x, enough)
    assert enough(stock, ours), f"{ours:.2f} s, stock {stock:.2f}"


@case
def one_channel_upsampling():
    for args, x, kind in (
        ((1, 1, 2, 2), torch.randn(16, 1, 512, 512), "ConvTranspose2d"),
        ((1, 1, 4, 4), torch.randn(4, 1, 512, 512), "ConvTranspose2d"),
        ((1, 1, 2, 2), torch.randn(8, 1, 1000000), "ConvTranspose1d"),
    ):
        stock, ours = times(*twins(*args, kind=kind), x, lambda stock, ours: ours < 1.15 * stock)
        assert ours < 1.15 * stock, f"{args} on {tuple(x.shape)}: {ours / stock:.1f} times PyTorch's time"


@case
def fx_trace_with_output_size():
    class U(nn.Module):
        def __init__(self):
            super().__init__()
            self.d, self.u = nn.Conv2d(3, 8, 3, 2, 1), nn.ConvTranspose2d(8, 3, 3, 2, 1)

        def forward(self, x):
            return self.u(self.d(x), output_size=x.shape[-2:])

    m = upconv.accelerate(U())
    x = torch.randn(1, 3, 9, 10)
    near(torch.fx.symbolic_trace(m)(x), m(x))


@case
def fuse_modules():
    s = upconv.accelerate(nn.Sequential(nn.ConvTranspose2d(8, 6, 4, 2, 1), nn.BatchNorm2d(6))).eval()
    x = torch.randn(1, 8, 4, 4)
    near(torch.ao.quantization.fuse_modules(s, ["0", "1"])(x), s(x))


@case
def eager_static_quantisation():
    import copy

    from torch.ao import quantization as q

    torch.manual_seed(0)
    stock = nn.Sequential(q.QuantStub(), nn.ConvTranspose2d(4, 6, 4, 2, 1), q.DeQuantStub()).eval()
    x = torch.randn(1, 4, 8, 8)

    def converted(m):
        m.qconfig = q.default_qconfig
        p = q.prepare(m)
        p(x)
        return q.convert(p)(x)

    ours = upconv.accelerate(copy.deepcopy(stock))
    near(converted(ours), converted(stock))


@case
def nested_tensors_raise_as_stock():
    a, b = twins(4, 3, 3)
    said = []
    for m in (a, b):
        try:
            m(torch.nested.nested_tensor([torch.randn(4, 5, 5), torch.randn(4, 6, 6)]))
            said.append("nothing")
        except Exception as error:
            said.append(type(error).__name__)
    assert said[0] == said[1], said


@case
def patched_functional_sees_the_call():
    n, old = [], F.conv_transpose2d
    F.conv_transpose2d = lambda *a, **k: (n.append(1), old(*a, **k))[1]
    try:
        upconv.ConvTranspose2d(4, 3, 3)(torch.randn(1, 4, 5, 5))
    finally:
        F.conv_transpose2d = old
    assert n, "a profiler that patches torch.nn.functional counts nothing"


def child(f, out):
    torch.set_num_threads(2)
    try:
        f()
        out.put("OK")
    except Exception as error:
        out.put(
            f"FAIL {type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else traceback.format_exc()[-150:]}"
        )


if __name__ == "__main__":
    wanted = sys.argv[1:]
    context = mp.get_context("fork")
    for f in CASES:
        if wanted and f.__name__ not in wanted:
            continue
        out = context.Queue()
        p = context.Process(target=child, args=(f, out))
        p.start()
        p.join(120)
        if p.is_alive():
            p.kill()
            print(f"{f.__name__:40s} FAIL no answer in 120 s", flush=True)
        else:
            print(f"{f.__name__:40s} {out.get() if not out.empty() else 'FAIL it died'}", flush=True)
