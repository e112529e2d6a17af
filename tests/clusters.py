"""Run a script that starts its own Ray cluster, on a machine that may be busy and slow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ENVIRONMENT = {
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    # By default Ray gives its workers low priority: beside other tests they would wait for minutes.
    "RAY_worker_niceness": "0",
    # Do not give up on workers that start slowly.
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "600",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "600",
}


def run(code: str, folder: Path) -> str:
    """Run a script in a folder; return the last line that it wrote."""
    (folder / "script.py").write_text(code)
    found = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1800,
        env={**os.environ, **ENVIRONMENT},
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout.splitlines()[-1]
