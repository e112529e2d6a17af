"""The comparisons of bench/ as the tests use them: their modules, and a script in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "bench"
sys.path.append(str(BENCH))

import carry  # noqa: E402
import clock  # noqa: E402
import clock_peer  # noqa: E402
import contest  # noqa: E402
import fp8  # noqa: E402
import gpu  # noqa: E402
import memory  # noqa: E402
import ratios  # noqa: E402
import shapes  # noqa: E402

sys.path.remove(str(BENCH))  # bench/serving.py would hide tests/serving

__all__ = ["carry", "clock", "clock_peer", "contest", "fp8", "gpu", "memory", "ratios", "rehearse", "shapes"]


def rehearse(script: str, out: Path, *words: str) -> tuple[dict[str, Any], str]:
    """Run a tiny rehearsal on the CPU without the peers; return its results and what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(BENCH / script), "--tiny", "--out", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text(encoding="utf-8")), done.stdout
