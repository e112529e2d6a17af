"""Claims about batches: a task whose outputs are no numbers is refused, and those that share its batch are answered."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from adapterbank.serving.service.batches import most_seconds
from adapterbank.serving.service.protocol import Ask, Refusal
from adapterbank.serving.service.scheduler import Part, RowGroup
from adapterbank.tasks.spec import Examples
from serving.small_bank import assert_same, occupied, running


@pytest.mark.parametrize("kind", ["classification", "multilabel", "regression", "span"])
@pytest.mark.parametrize("number", [np.nan, np.inf, 3e38, 1e31])
def test_outputs_that_are_no_numbers_refuse_their_task_alone(small, kind, number):
    pair = kind == "span"
    small.put("a")
    small.put("good", 1, kind=kind, pair=pair)
    small.put("odd", 2, kind=kind, pair=pair)
    texts, pairs = ["why the cat sat", "where"], ["the cat sat there", "on a mat"] if pair else None

    async def run():
        async with running(small) as service:
            odd = service.registry.find("odd").handle
            gate, first = await occupied(service)

            def broken(tokens, tasks):
                outputs = gate._launch(tokens, tasks)()
                found = [out * 0 + number if task is odd else out for out, task in zip(outputs, tasks, strict=True)]
                return lambda: found

            asked = [
                asyncio.ensure_future(service.predict([Ask(name, texts, pairs)])) for name in ("good", "odd", "good")
            ]
            await asyncio.sleep(0.05)
            service.engine.launch = broken
            gate.opened.set()
            await first
            return await asyncio.gather(*asked, return_exceptions=True)

    one, refused, other = asyncio.run(run())
    assert isinstance(refused, Refusal)
    assert refused.code == "damaged"
    assert refused.message.startswith("odd@1 gives no finite number for a text of this request; ")
    (wanted,) = small.alone("good").predict([("good", Examples(texts, pairs))])
    for answer in (one, other):
        assert_same(answer[0].predictions, wanted)
        json.dumps(answer[0].predictions, allow_nan=False)


def test_weights_that_overflow_refuse_their_task_and_no_row_beside_it(small):
    small.put("a")
    package = small.put("odd", 1)
    texts = ["why the cat sat", "where"]

    async def run():
        async with running(small) as service:
            handle = service.registry.find("odd").handle
            huge = {name: np.full_like(array, 3e38) for name, array in package.tensors().items()}
            service.engine.slots.put("huge", handle.plan, huge, None, handle.about)
            found = service.registry.find("odd")
            object.__setattr__(found, "handle", service.engine.slots.find("huge"))
            gate, first = await occupied(service)
            asked = [asyncio.ensure_future(service.predict([Ask(name, texts)])) for name in ("a", "odd", "a")]
            await asyncio.sleep(0.05)
            service.engine.launch = gate._launch
            gate.opened.set()
            await first
            return await asyncio.gather(*asked, return_exceptions=True)

    one, refused, other = asyncio.run(run())
    assert (type(refused), getattr(refused, "code", "")) == (Refusal, "damaged")
    (wanted,) = small.alone("a").predict([("a", Examples(texts))])
    for answer in (one, other):
        assert_same(answer[0].predictions, wanted)


def test_a_batch_may_take_ten_times_as_long_as_the_last_ones():
    batch = [Part(RowGroup("a", None, 0), 0, 1, 1000)]
    assert most_seconds(batch, 0.0, compiles=False) == 60.0
    assert most_seconds(batch, 10_000.0, compiles=False) == 3.0
    assert most_seconds(batch, 100.0, compiles=False) == 100.0
    assert most_seconds(batch, 10_000.0, compiles=True) == 120.0
