"""``python -m upconv.export models`` writes the files of ``models/`` anew, for all of KernelBench's layers."""

from __future__ import annotations

import sys
from pathlib import Path

from upconv.export import kernelbench, publish
from upconv.export.signatures import KERNELBENCH

if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
    sys.exit(f"upconv.export: the one argument must be a folder that exists; got {' '.join(sys.argv[1:])!r}")
for number in KERNELBENCH:
    publish(Path(sys.argv[1]) / f"model_{number}.py", kernelbench(number))
