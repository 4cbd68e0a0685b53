"""The model that a router serves: its tokenizer and template as loaded, and what the current workers say about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protos.tandem_worker_pb2 import WorkerRecord
from router.model_info import ModelInfo
from router.request_events import WorkerKey
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Texts:
    """What the router needs to turn text into tokens."""

    model: ModelInfo
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None


KEPT_S = 60.0
"""For this time an adapter stays known after its last worker has gone, which may be restarting: requests for it hear
that no worker is available now, and not that there is no such model."""


class ServedModel:
    """`ModelInfo` with the context length and the adapters of the current decode workers, or of the last ones."""

    def __init__(
        self,
        model: ModelInfo,
        decode_records: Callable[[], Sequence[WorkerRecord]],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._known = model
        self._decode_records = decode_records
        self._now_s = now_s
        self._known_of: Sequence[WorkerRecord] = ()
        self._there: dict[str, set[WorkerKey]] = {}
        """By adapter name: the workers in `_known_of` that have it."""
        self._gone_s: dict[str, float] = {}
        """By adapter name: when its last worker went. Only adapters that no worker has."""

    def now(self) -> ModelInfo:
        workers, now_s = self._decode_records(), self._now_s()
        is_news = bool(workers) and workers is not self._known_of  # the same list for as long as they are the same
        if is_news or any(now_s - gone_s >= KEPT_S for gone_s in self._gone_s.values()):
            self._note(workers or self._known_of, now_s)
        return self._known

    def _note(self, workers: Sequence[WorkerRecord], now_s: float) -> None:
        self._known_of = workers
        before, self._there = self._there, {}
        for record in workers:
            for name in record.model.lora_names:
                self._there.setdefault(name, set()).add(WorkerKey.of(record))
        living = set(map(WorkerKey.of, workers))
        # If a worker that had the adapter still lives, the adapter was removed on purpose.
        lost = [name for name, keys in before.items() if not keys & living]
        gone_s = self._gone_s | dict.fromkeys(lost, now_s)
        self._gone_s = {
            name: at_s for name, at_s in gone_s.items() if name not in self._there and now_s - at_s < KEPT_S
        }
        shortest = min(workers, key=lambda record: record.model.max_model_len)
        leaving = {each.lora_name for record in workers for each in record.leaving_loras}
        exchanged = {name for record in workers for name in record.exchanged_lora_names}  # soon there again
        self._known = self._model.with_worker(
            shortest.model, self._there.keys() | self._gone_s.keys() | exchanged, leaving
        )
