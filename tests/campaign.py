"""The trial campaign of bench/ as the tests use it: its frame, and the command in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COMMAND = ROOT / "bench" / "trial.py"
sys.path.append(str(COMMAND.parent))

from trials import frame  # noqa: E402

sys.path.remove(str(COMMAND.parent))  # bench/serving.py would hide tests/serving

__all__ = ["COMMAND", "ROOT", "frame", "run", "short"]


def run(*words: Any, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command and wait."""
    command = [sys.executable, str(COMMAND), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def short(folder: Path, *names: str) -> list[dict[str, Any]]:
    """Run some trials for a minute in all, from a fixed seed; return the result of each."""
    out = folder / "trial.json"
    done = run("--minutes", 1, "--seed", 15, "--only", ",".join(names), "--out", out, "--failures", folder / "failures")
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(out.read_text())["trials"]
    return found
