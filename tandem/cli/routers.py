"""For operators' commands: asks every router that --router lists; each answers only for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from rpc.errors import Unreachable
from rpc.targets import addresses_of
from rpc.tls import ClientTLS
from tandem.client import Client

T = TypeVar("T")


@dataclass(frozen=True)
class Answers(Generic[T]):
    """The routers' answers, at least one."""

    by_address: Mapping[str, T]
    away: list[str]
    """A sentence about each router that does not answer."""


class Routers:
    """A client for each router."""

    def __init__(self, clients: Mapping[str, Client], threads: ThreadPoolExecutor) -> None:
        self._clients = clients
        self._threads = threads

    def ask(self, question: Callable[[Client], T]) -> Answers[T]:
        """Ask all routers at once. Raises `Unreachable` if none answers."""
        asked = {address: self._threads.submit(question, client) for address, client in self._clients.items()}
        answers: dict[str, T] = {}
        away: list[str] = []
        for address, answer in asked.items():
            try:
                answers[address] = answer.result()
            except Unreachable as error:
                away.append(f"router at {address} does not answer: {error.message}")
                last = error
        if not answers:
            raise last
        return Answers(answers, away)


@contextmanager
def all_routers(target: str, api_key: str, tls: ClientTLS | None) -> Iterator[Routers]:
    addresses = addresses_of(target)
    # The clients are closed first, which ends the calls that threads wait for.
    with ThreadPoolExecutor(len(addresses)) as threads, ExitStack() as stack:
        clients = {address: stack.enter_context(Client(address, api_key=api_key, tls=tls)) for address in addresses}
        yield Routers(clients, threads)
