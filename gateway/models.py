"""Finds the routers that serve the model that a request names. Each model has routers of its own.

    name ──known──> in the routers' last answers: the client for its routers ──> no longer there, as these routers say?
             └─ unknown ──> client_of: all are asked ──> its client, or a refusal with the known names <──┘

Answers of routers expire, and they are asked again in the background. Routers that do not answer keep their last names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from gateway.errors import KINDS, MODEL_NOT_FOUND, RETRY_AFTER_S, UNAVAILABLE, Refusal
from protos.tandem_inference_pb2 import GetModelInfoResponse
from rpc.errors import InvalidRequest, NotFound, TandemError, Unreachable
from tandem.client import AsyncClient

_log = logging.getLogger(__name__)

MAX_AGE_S = 1.0
"""Routers are asked again when their answer is older than this, since adapters come and go."""
MAX_NAME_CHARS = 128
"""A client's name is cut to this length in an error."""
MAX_WAIT_S = 1.0
"""How long to wait for routers that do not answer while others do."""


class _Served:
    """What one client's routers serve, as far as they have answered."""

    def __init__(self, client: AsyncClient, address: str) -> None:
        self.client = client
        self.names: tuple[str, ...] = ()
        """Names of the model and its adapters."""
        self.info: GetModelInfoResponse | None = None
        """The routers' last answer."""
        self.error: TandemError | None = None
        """Why they did not answer when they were asked last."""
        self._address = address
        self._asking: asyncio.Task[None] | None = None
        self._answered_s: float | None = None
        """When they answered, or failed, last, by the loop's clock."""

    @property
    def is_old(self) -> bool:
        return self._answered_s is None or self._answered_s + MAX_AGE_S < asyncio.get_running_loop().time()

    def ask(self) -> asyncio.Task[None]:
        """The task that asks what the routers serve. Only one runs at a time."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return self._asking

    async def _ask(self) -> None:
        try:
            self.info = await self.client.model_info()
        except TandemError as error:
            if type(error) is not type(self.error):
                _log.warning(
                    "router does not say what it serves: GetModelInfo failed",
                    extra={"router": self._address, "why": error.message},
                )
            self.info, self.error = None, error
        else:
            self.error, names = None, _names_of(self.info)
            if names != self.names:
                _log.info("serves", extra={"router": self._address, "models": " ".join(names)})
            self.names = names
        self._answered_s = asyncio.get_running_loop().time()

    async def aclose(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})


class Models:
    """The models of the routers behind each address of `clients`, which the caller closes after this object."""

    def __init__(self, clients: Mapping[str, AsyncClient]) -> None:
        self._all = [_Served(client, address) for address, client in clients.items()]

    @property
    def are_several(self) -> bool:
        return len(self._all) > 1

    def known(self, name: str) -> AsyncClient | None:
        """The client for the model of that name, by the routers' last answers; of two that serve it, the one listed
        first. If there is only one client, it is returned whatever the name: its router checks names."""
        if not self.are_several:
            return self._all[0].client
        self._ask_again()
        return self._of(name)

    async def client_of(self, name: str, *, but: AsyncClient | None = None) -> AsyncClient:
        """As `known`, but asks the routers if necessary. `but`: a client to leave out, whose routers say that they do
        not have the model, whatever their last answer was.

        Raises `Refusal` for an unknown or empty name (503 while routers that might serve it cannot be reached); and
        what routers raise that answer, but do not say what they serve, such as `Unauthenticated`.
        """
        asking = self._ask_again(at_once=but is not None)
        if not name:
            if asking:
                await asyncio.wait(asking, timeout=MAX_WAIT_S)
            raise no_such_model(name, self._names)
        while (found := self._of(name, but=but)) is None and asking:
            done, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        if found is not None:
            return found
        for served in self._all:
            if isinstance(served.error, Unreachable):
                raise Refusal(
                    UNAVAILABLE,
                    f"model: no router that answers has {name[:MAX_NAME_CHARS]!r}, and some do not answer; retry later",
                    param="model",
                    retry_after_s=RETRY_AFTER_S,
                )
            if served.error is not None:
                raise served.error.with_traceback(None)
        raise no_such_model(name, [each for each in self._names if each != name])

    @property
    def _names(self) -> list[str]:
        return [name for served in self._all for name in served.names]

    def _of(self, name: str, *, but: AsyncClient | None = None) -> AsyncClient | None:
        return next((served.client for served in self._all if name in served.names and served.client is not but), None)

    def _ask_again(self, *, at_once: bool = False) -> set[asyncio.Task[None]]:
        """Ask the routers whose last answer is old, or all if `at_once`. Returns the tasks that ask."""
        return {served.ask() for served in self._all if at_once or served.is_old}

    async def infos(self) -> list[GetModelInfoResponse]:
        """The infos of all models whose routers have answered. If some answer, waits for the others at most
        `MAX_WAIT_S`, and uses their last answers. If none has ever answered, raises the first one's error."""
        asked = [served.ask() for served in self._all]
        _, asking = await asyncio.wait(asked, timeout=MAX_WAIT_S)
        while not (infos := [served.info for served in self._all if served.info is not None]) and asking:
            _, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        for task, served in zip(asked, self._all, strict=True) if not infos else ():
            task.result()
            assert served.error is not None
            raise served.error.with_traceback(None)
        return infos

    async def is_serving(self) -> bool:
        """Whether any model can be served; returns as soon as one can. If none can, raises an error if there was
        one."""
        asking = [asyncio.create_task(_is_serving(served.client)) for served in self._all]
        errors: list[TandemError] = []
        try:
            for answer in asyncio.as_completed(asking):
                try:
                    if await answer:
                        return True
                except TandemError as error:
                    errors.append(error)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.wait(asking)
        if errors:
            raise errors[0]
        return False

    async def aclose(self) -> None:
        """Stop asking routers."""
        for served in self._all:
            await served.aclose()


def no_such_model(name: str, names: Sequence[str]) -> Refusal:
    """The refusal of an unknown or empty `name`; it lists the known `names`."""
    kind, wrong = MODEL_NOT_FOUND, f"the model {name[:MAX_NAME_CHARS]!r} does not exist"
    if not name:
        kind, wrong = KINDS[InvalidRequest], "must be given"
    there = ", ".join(map(repr, dict.fromkeys(names)))
    return Refusal(kind, f"model: {wrong}" + (f"; available: {there}" if there else ""), param="model")


def _names_of(info: GetModelInfoResponse) -> tuple[str, ...]:
    return (info.model, *info.aliases, *info.lora_names)


async def _is_serving(client: AsyncClient) -> bool:
    """Whether the router is there, has a decode worker, and accepts our key."""
    try:
        is_serving = await client.is_serving()
        if is_serving:
            await client.model_info()  # checks the key, which the health check does not need
    except NotFound:  # another kind of server answers there, without the router's health service
        return False
    return is_serving
