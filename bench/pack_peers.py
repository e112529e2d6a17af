"""Pack the peers into one file, for a machine where nothing can be installed; `--peers-path` takes the unpacked folder.

    python bench/pack_peers.py --python .venv-bench/bin/python --out peers.tar.xz
    mkdir peers && tar -xf peers.tar.xz -C peers

The archive contains what the peers' worker imports, except torch and its dependencies, and compiled packages that fit
only one version of Python (regex, numpy, yaml). The machine must have those.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tarfile
from pathlib import Path

WITH_TORCH = {"torch", "torchgen", "functorch", "numpy", "sympy", "mpmath", "networkx", "jinja2", "markupsafe"}
WITH_TORCH |= {"typing_extensions", "setuptools", "_distutils_hack", "pkg_resources"}
PROBE = """
import importlib.metadata, json, sys, sysconfig
import accelerate, adapters, peft, transformers
from adapters import AutoAdapterModel, DoubleSeqBnConfig
from adapters.composition import BatchSplit
from transformers import AutoModelForSequenceClassification
from transformers.models.bert import modeling_bert
folder = sysconfig.get_paths()["purelib"]
inside = {name.partition(".")[0] for name, module in sys.modules.items()
          if (getattr(module, "__file__", None) or "").startswith(folder)}
distributions = importlib.metadata.packages_distributions()
print(json.dumps({"folder": folder, "packages": {p: distributions.get(p, []) for p in sorted(inside)}}))
"""


def bound(package: Path) -> bool:
    """Return whether a package has compiled parts for one version of Python."""
    return any(".abi3." not in path.name for path in package.rglob("*.so"))


def chosen(python: str) -> list[Path]:
    """Find the folders to pack: packages that are imported, and the metadata of their distributions."""
    given = subprocess.run([python, "-c", PROBE], check=True, capture_output=True, text=True).stdout
    found = json.loads(given.splitlines()[-1])
    folder = Path(found["folder"])
    packed: set[Path] = set()
    for name, distributions in found["packages"].items():
        package = folder / name
        if name in WITH_TORCH or not package.is_dir() or bound(package):
            continue
        packed.add(package)
        for distribution in distributions:
            packed |= set(folder.glob(f"{distribution.replace('-', '_')}-*.dist-info"))
    return sorted(packed)


def main() -> None:
    """Write the archive and print its contents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="Python of an environment with bench/requirements.txt")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    packed = chosen(options.python)
    with tarfile.open(options.out, "w:xz", preset=6) as archive:
        for path in packed:
            archive.add(path, path.name, filter=lambda entry: None if "__pycache__" in entry.name else entry)
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB")
    print(" ".join(path.name for path in packed))


if __name__ == "__main__":
    main()
