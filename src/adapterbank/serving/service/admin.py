"""What is asked of tasks as such: looked up, listed, told of, removed, rolled back. Knows no rows and no HTTP."""

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
from adapterbank.serving.service.requests import as_refusals, shown
from adapterbank.storage.bank import Bank
from adapterbank.storage.package import parse_ref


class TaskAdmin:
    """The tasks of a bank, for who asks; what cannot be done is a `Refusal`."""

    def __init__(self, bank: Bank, engine: Engine, shelf: TaskRegistry, mirror: Mirror | None) -> None:
        """Take a bank and where its tasks are served from; one that is a `mirror` is not changed."""
        self.bank, self.engine, self.shelf, self.mirror = bank, engine, shelf, mirror

    async def find(self, ref: str) -> ServedTask:
        """Give what answers for a task now, loaded if need be."""
        try:
            found = self.shelf.find(ref)
        except InputError as error:
            raise Refusal("unknown_task", str(error)) from error
        if found is not None:
            return found
        if not self.shelf.ready:
            raise Refusal("not_ready", "The bank's tasks are still being loaded; try again soon.", retry_after=1)
        held: ServedTask = await asyncio.to_thread(as_refusals, lambda: self.shelf.fetch(ref), self.bank.path)
        return held

    async def tasks(self) -> dict[str, Any]:
        """See `terms.Service`."""
        return await asyncio.to_thread(self._tasks)

    async def task(self, ref: str) -> dict[str, Any]:
        """See `terms.Service`."""
        held = await self.find(ref)
        manifest = held.package.manifest
        resident = held.known.slot is not None
        told: dict[str, Any] = await asyncio.to_thread(
            as_refusals, lambda: task_info.details(self.bank, manifest, resident=resident), self.bank.path
        )
        return told

    async def remove(self, ref: str) -> None:
        """See `terms.Service`."""
        await asyncio.to_thread(self._change, ref, lambda: self.bank.remove(ref))

    async def rollback(self, ref: str) -> int:
        """See `terms.Service`."""
        return int(await asyncio.to_thread(self._change, ref, lambda: self._roll_back(ref)))

    def _change(self, ref: str, act: Callable[[], Any]) -> Any:
        """Change a task of the bank, and serve it as it is now."""
        if self.mirror:
            raise Refusal("conflict", self.mirror.refusal)
        found = as_refusals(act, self.bank.path)
        self.shelf.look_at(parse_ref(ref)[0])
        return found

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
        held = self.shelf.held()
        backbone, problems = self.engine.backbone, sorted(self.shelf.problems.copy().items())
        return {
            "backbone": {
                "name": task_info.called(backbone.name),
                "sha256": backbone.sha256,
                "parameters": backbone.parameters,
            },
            "tasks": [task_info.summary(h.package.manifest, resident=h.known.slot is not None) for h in held.values()],
            "problems": [{"task": name, "message": shown(why, self.bank.path)} for name, why in problems],
        }
