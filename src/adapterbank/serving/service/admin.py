"""Looks up, lists, shows, removes and rolls back tasks. Knows no rows and no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from adapterbank.errors import BankError, InputError, PackageDamaged
from adapterbank.inference.engine import Engine
from adapterbank.serving.service import task_info
from adapterbank.serving.service.bank_mirror import Mirror
from adapterbank.serving.service.protocol import Refusal
from adapterbank.serving.service.registry import ServedTask, TaskRegistry
from adapterbank.serving.service.requests import with_refusals, without_paths
from adapterbank.storage.bank import Bank
from adapterbank.storage.package import parse_ref


class TaskAdmin:
    """The tasks of a bank, for clients; raises `Refusal`."""

    def __init__(self, bank: Bank, engine: Engine, registry: TaskRegistry, mirror: Mirror | None) -> None:
        """Take a bank, its engine and its registry; a bank that is a `mirror` is read-only."""
        self.bank, self.engine, self.registry, self.mirror = bank, engine, registry, mirror

    async def find(self, ref: str) -> ServedTask:
        """Return the task of a name, loading it if necessary."""
        try:
            found = self.registry.find(ref)
        except InputError as error:
            raise Refusal("unknown_task", str(error)) from error
        if found is not None:
            return found
        if not self.registry.ready:
            raise Refusal("not_ready", "The server is loading the bank's tasks; try again soon.", retry_after=1)
        served: ServedTask = await asyncio.to_thread(with_refusals, lambda: self.registry.fetch(ref), self.bank.path)
        return served

    async def tasks(self) -> dict[str, Any]:
        """See `protocol.Service`."""
        return await asyncio.to_thread(self._tasks)

    async def task(self, ref: str) -> dict[str, Any]:
        """See `protocol.Service`."""
        served = await self.find(ref)
        manifest = served.package.manifest
        resident = served.handle.slot is not None
        details: dict[str, Any] = await asyncio.to_thread(
            with_refusals, lambda: task_info.details(self.bank, manifest, resident=resident), self.bank.path
        )
        return details

    async def remove(self, ref: str) -> None:
        """See `protocol.Service`."""
        await asyncio.to_thread(self._change, ref, lambda: self.bank.remove(ref))

    async def rollback(self, ref: str) -> int:
        """See `protocol.Service`."""
        return int(await asyncio.to_thread(self._change, ref, lambda: self._roll_back(ref)))

    def _change(self, ref: str, action: Callable[[], Any]) -> Any:
        """Change a task of the bank and serve its new state."""
        if self.mirror:
            raise Refusal("conflict", self.mirror.refusal)
        result = with_refusals(action, self.bank.path)
        self.registry.refresh(parse_ref(ref)[0])
        return result

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
        backbone, problems = self.engine.backbone, sorted(self.registry.problems.copy().items())
        return {
            "backbone": {
                "name": task_info.public_name(backbone.name),
                "sha256": backbone.sha256,
                "parameters": backbone.parameters,
            },
            "tasks": [task_info.summary(t.package.manifest, resident=t.handle.slot is not None) for t in served],
            "problems": [{"task": name, "message": without_paths(why, self.bank.path)} for name, why in problems],
        }
