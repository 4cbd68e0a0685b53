"""The queue does what the example in docs/reading.md says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from protos import tandem_inference_pb2 as inference_pb
from protos import tandem_worker_pb2 as pb
from router.needs import Needs
from router.queue import RequestQueue
from router.queued_request import QueuedRequest
from router.served_kind import Kind
from router.taken_room import TakenRoom
from router.worker_handle import WorkerHandle

ROWS = {f"| {number} |" for number in range(1, 7)}
"""How lines of the table begin."""
PAGE = (Path(__file__).parents[2] / "docs" / "reading.md").read_text()
ASKED = [
    ("A1", "ann", 400, 0),
    ("A2", "ann", 100, 0),
    ("S1", "bob", 200, 0),
    ("B1", "bob", 100, 0),
    ("U1", "cy", 100, -1),
]
"""Name, client, tokens, priority. S1 needs the adapter that only d2 has."""


def handle(name: str) -> WorkerHandle:
    model = inference_pb.GetModelInfoResponse(block_size=1)
    return WorkerHandle(pb.WorkerRecord(worker_id=name, incarnation="1", model=model), channel=None)


class Example:
    def __init__(self) -> None:
        self.workers = {name: handle(name) for name in ("d1", "d2")}
        self.room = {"d1": 0, "d2": 0}
        self.names: dict[QueuedRequest, str] = {}
        self.planned: list[str] = []
        self.counters: dict[str, int] = {}
        self.queue = RequestQueue(
            max_tokens=10_000,
            choose=self.choose,
            has_workers=lambda _: True,
            has_fewer_workers=lambda request: bool(request.needs.lora_name),
            workers_for=lambda request: [self.workers[name].key for name in self.usable(request)],
        )

    def usable(self, request: QueuedRequest) -> list[str]:
        return ["d2"] if request.needs.lora_name else ["d1", "d2"]

    def choose(self, request: QueuedRequest, _: int) -> TakenRoom | None:
        for name in self.usable(request):
            if self.workers[name].key not in request.barred and self.room[name] >= request.num_tokens:
                self.room[name] -= request.num_tokens
                self.planned.append(f"{self.names[request]} on {name}")
                return TakenRoom(self.workers[name], None, request.num_tokens, kind=Kind("a kind"))
        return None

    async def ask(self, name: str, client: str, num_tokens: int, priority: int, *, is_return: bool = False) -> None:
        needs = Needs(lora_name="sql" if name == "S1" else "")
        request = QueuedRequest(num_tokens=num_tokens, needs=needs, is_return=is_return)
        self.names[request] = name
        share = self.queue.enter(priority, client)
        await self.queue.wait_for_plan(request, priority=priority, fairness_id=client)
        self.counters[client] = share.counter
        await asyncio.Event().wait()  # it runs

    def free(self, name: str, num_tokens: int) -> None:
        self.room[name] += num_tokens
        self.queue.dispatch()


@asynccontextmanager
async def asking(example: Example) -> AsyncIterator[Callable[..., Awaitable[None]]]:
    tasks: list[asyncio.Task[None]] = []

    async def ask(*asked: object, **further: bool) -> None:
        tasks.append(asyncio.create_task(example.ask(*asked, **further)))  # type: ignore[arg-type]
        await settle()

    yield ask
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_example() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line[:5] in ROWS]
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    example = Example()
    async with asking(example) as ask:
        for asked in ASKED:
            await ask(*asked)
        assert not example.planned
        for _, event, planned, _, counters in rows:
            example.planned.clear()
            match event.split():
                case [worker, "frees", num_tokens]:
                    example.free(worker, int(num_tokens))
                case _:
                    await ask(*ASKED[0], is_return=True)
            await settle()
            names, _, worker = planned.partition(" on ")
            assert example.planned == [f"{name} on {worker}" for name in names.split(", ") if worker], event
            for client, counter in (each.split() for each in counters.split(", ") if each):
                assert example.counters.get(client, 0) == int(counter), event
