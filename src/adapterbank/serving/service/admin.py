"""Looks up, lists, shows, removes and rolls back tasks. Knows no rows and no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from adapterbank.errors import BankError, InputError, PackageDamaged
from adapterbank.inference.engine import Engine
from adapterbank.serving.daemon_pool import DaemonPool
from adapterbank.serving.service import task_info
from adapterbank.serving.service.bank_mirror import Mirror
from adapterbank.serving.service.protocol import Refusal, shown
from adapterbank.serving.service.registry import ServedTask, TaskRegistry
from adapterbank.serving.service.requests import with_refusals, without_paths
from adapterbank.serving.service.task_reader import TaskReader
from adapterbank.storage.bank import Bank
from adapterbank.storage.package import parse_ref

_LOOKUPS, _CHANGES = 16, 4
"""Threads for reading about tasks, and for changing them."""
_CHANGING = 30.0
"""Seconds that a change of the bank may take."""

Result = TypeVar("Result")


class TaskAdmin:
    """The tasks of a bank, for clients; raises `Refusal`."""

    def __init__(self, bank: Bank, engine: Engine, registry: TaskRegistry, mirror: Mirror | None) -> None:
        """Take a bank, its engine and its registry; a bank that is a `mirror` is read-only."""
        self.bank, self.engine, self.registry, self.mirror = bank, engine, registry, mirror
        self._lookups, self._changes = DaemonPool(_LOOKUPS, "lookup"), DaemonPool(_CHANGES, "change")
        self._reader = TaskReader()

    def close(self) -> None:
        """End the threads that are idle; waits for none."""
        for pool in (self._lookups, self._changes):
            pool.shutdown(wait=False)

    async def find(self, ref: str) -> ServedTask:
        """Return the task of a name, loading it if necessary."""
        ref = shown(ref)
        try:
            found = self.registry.find(ref)
        except InputError as error:
            raise Refusal("unknown_task", str(error)) from error
        if found is not None:
            return found
        if not self.registry.ready:
            raise Refusal("not_ready", "The server is loading the bank's tasks; try again soon.", retry_after=1)
        return await self._look_up(lambda: self.registry.fetch(ref))

    async def tasks(self) -> dict[str, Any]:
        """See `protocol.Service`."""
        return await self._look_up(self._tasks)

    async def task(self, ref: str) -> dict[str, Any]:
        """See `protocol.Service`."""
        served = await self.find(ref)
        manifest = served.package.manifest
        resident = served.handle.slot is not None
        read = partial(task_info.details, self.bank, manifest, resident=resident)
        return await self._look_up(lambda: self._reader.one(manifest.name, read))

    async def remove(self, ref: str) -> None:
        """See `protocol.Service`."""
        await self._change(shown(ref), lambda: self.bank.remove(shown(ref)))

    async def rollback(self, ref: str) -> int:
        """See `protocol.Service`."""
        return await self._change(shown(ref), lambda: self._roll_back(shown(ref)))

    async def _look_up(self, read: Callable[[], Result]) -> Result:
        """Read something in a thread; what may hang is bounded by a `TaskReader`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._lookups, with_refusals, read, self.bank.path)

    async def _change(self, ref: str, action: Callable[[], Result]) -> Result:
        """Change a task of the bank and serve its new state."""
        if self.mirror:
            raise Refusal("conflict", self.mirror.refusal)

        def change() -> Result:
            result = action()
            self.registry.refresh(parse_ref(ref)[0])
            return result

        changing = asyncio.get_running_loop().run_in_executor(self._changes, with_refusals, change, self.bank.path)
        try:
            async with asyncio.timeout(_CHANGING):
                return await changing
        except TimeoutError:
            message = f"The bank has not answered for {_CHANGING:.0f} s; look at GET /v1/tasks before you try again."
            raise Refusal("not_ready", message, retry_after=30) from None

    def _roll_back(self, ref: str) -> int:
        name, version = parse_ref(ref)
        if version is not None:
            return self.bank.rollback(name, version)
        self.bank.versions(name)
        try:
            return self.bank.rollback(name)
        except PackageDamaged:
            raise
        except BankError as error:
            raise Refusal("conflict", str(error)) from error

    def _tasks(self) -> dict[str, Any]:
        served = self.registry.tasks().values()
        backbone, problems = self.engine.backbone, self.registry.all_problems().items()
        return {
            "backbone": {
                "name": task_info.public_name(backbone.name),
                "sha256": backbone.sha256,
                "parameters": backbone.parameters,
            },
            "tasks": [task_info.summary(t.package.manifest, resident=t.handle.slot is not None) for t in served],
            "problems": [{"task": name, "message": without_paths(why, self.bank.path)} for name, why in problems],
        }
