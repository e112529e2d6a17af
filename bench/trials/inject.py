"""Code that a server runs before its own, to make calls on files fail or wait while a flag file exists."""

from __future__ import annotations

from pathlib import Path

_HOOKS = """
import builtins, errno, io, os, time
_plain = {name: getattr(os, name) for name in ("open", "stat", "mkdir", "rename", "replace", "link")}
_plain_open = builtins.open

def _hook(name):
    def call(path, *args, **options):
        _before(name, path, args, options)
        return _plain[name](path, *args, **options)
    return call

def _open(file, mode="r", *args, **options):
    _before("file", file, (mode,), options)
    return _plain_open(file, mode, *args, **options)

for _name in _plain:
    setattr(os, _name, _hook(_name))
builtins.open = io.open = _open
"""
_STALL = """
def _before(name, path, args, options):
    if isinstance(path, (str, os.PathLike)) and {part!r} in os.fspath(path):
        while _there():
            time.sleep(0.02)

def _there():
    try:
        return bool(_plain["stat"]({flag!r}))
    except OSError:
        return False
"""
_ERRORS = """
def _before(name, path, args, options):
    if name == "stat" or not isinstance(path, (str, os.PathLike)):
        return
    if name == "file" and not set(str(args[0])) & set("wax+"):
        return
    if name == "open" and not args[0] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return
    try:
        with _plain_open({flag!r}) as file:
            number = getattr(errno, file.read())
    except OSError:
        return
    raise OSError(number, os.strerror(number), os.fspath(path))
"""


def stall(part: str, flag: Path) -> str:
    """Return code that makes every call on a path with this part wait while the flag exists."""
    return _HOOKS + _STALL.format(part=part, flag=str(flag))


def errors(flag: Path) -> str:
    """Return code that makes every writing call fail with the error whose name the flag holds."""
    return _HOOKS + _ERRORS.format(flag=str(flag))
