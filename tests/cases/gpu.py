"""Weights that change between calls, on a GPU: ours against stock PyTorch. A line a case, OK or FAIL. About a minute; fsdp2 takes two processes on one GPU."""

import subprocess
import sys

import torch
import torch.nn as nn

if len(sys.argv) > 1 and sys.argv[1] == "fsdp2":
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
import upconv

torch.backends.cudnn.conv.fp32_precision = "ieee"


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.ConvTranspose2d(32, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 16, 3, 2, 1, 1)).cuda()


def X():
    torch.manual_seed(1)
    return torch.randn(4, 32, 12, 12, device="cuda")


def off(a, b):
    return ((a - b).norm() / b.norm()).item()


def compare(run):
    """Validations of the same run, stock and accelerated."""
    a, b = run(net()), run(upconv.accelerate(net()))
    return max(off(p, q) for p, q in zip(b, a))


def trained(optimizer, validate=None):
    def run(m):
        opt, x, found = optimizer(m.parameters()), X(), []
        for _ in range(4):
            opt.zero_grad()
            m(x).pow(2).mean().backward()
            opt.step()
            with torch.no_grad():
                found.append(m(x).clone())
        return found

    return run


def data_copy(m):
    x, found = X(), []
    for i in range(3):
        torch.manual_seed(i)
        for p in m.parameters():
            p.data.mul_(0.5).add_(torch.randn_like(p), alpha=0.1)
        with torch.no_grad():
            found.append(m(x).clone())
    return found


def ema_swap(m):
    """Trainers store the weights, put the averages in place for a validation, and put the weights back."""
    x, found = X(), []
    ema = [torch.randn_like(p) * 0.1 for p in m.parameters()]
    for _ in range(2):
        with torch.no_grad():
            found.append(m(x).clone())
        kept = [p.detach().clone() for p in m.parameters()]
        for p, e in zip(m.parameters(), ema):
            p.data.copy_(e)
        with torch.no_grad():
            found.append(m(x).clone())
        for p, k in zip(m.parameters(), kept):
            p.data.copy_(k)
    return found


def captured_step(m):
    opt, x = torch.optim.SGD(m.parameters(), lr=0.05), X()
    s = torch.cuda.Stream()
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        for _ in range(3):
            opt.zero_grad(set_to_none=True)
            m(x).pow(2).mean().backward()
            opt.step()
    torch.cuda.current_stream().wait_stream(s)
    g = torch.cuda.CUDAGraph()
    opt.zero_grad(set_to_none=True)
    with torch.cuda.graph(g):
        m(x).pow(2).mean().backward()
        opt.step()
    found = []
    for _ in range(3):
        for _ in range(20):
            g.replay()
        with torch.no_grad():
            found.append(m(x).clone())
    return found


def sharded(m):
    for layer in (m[0], m[2]):
        fully_shard(layer)
    fully_shard(m)
    return trained(lambda p: torch.optim.Adam(p, lr=0.01))(m)


if len(sys.argv) > 1:
    print(f"{compare(sharded):.2g}", flush=True)
    dist.destroy_process_group()
    sys.exit()
for name, run in {
    "fused AdamW, validation each step": trained(lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)),
    "param.data in place": data_copy,
    "EMA swap for a validation": ema_swap,
    "training step in a CUDA graph": captured_step,
}.items():
    error = compare(run)
    print(f"{name:40s} {'OK' if error < 1e-2 else 'FAIL'} {error:.2g}", flush=True)
out = subprocess.run(["torchrun", "--nproc-per-node", "1", __file__, "fsdp2"], capture_output=True, text=True)
last = out.stdout.strip().splitlines()[-1:] or [out.stderr[-200:]]
print(
    f"{'FSDP2, validation each step':40s} {'OK' if out.returncode == 0 and float(last[0]) < 1e-2 else 'FAIL'} {last[0]}"
)
