"""The model that a router serves: its texts, as loaded, and what workers say of it, as they are now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protos.tandem_worker_pb2 import WorkerRecord
from router.model_info import ModelInfo
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Texts:
    """What turns text into tokens."""

    model: ModelInfo
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None


class ServedModel:
    """`ModelInfo` with the context length and the adapters of the decode workers that are there, or were last."""

    def __init__(self, model: ModelInfo, decode_records: Callable[[], Sequence[WorkerRecord]]) -> None:
        self._model = model
        self._known = model
        self._decode_records = decode_records
        self._known_of: Sequence[WorkerRecord] = ()

    def now(self) -> ModelInfo:
        workers = self._decode_records()
        if workers and workers is not self._known_of:  # the same list for as long as they are the same
            self._known_of = workers
            shortest = min(workers, key=lambda record: record.model.max_model_len)
            lora_names = {name for record in workers for name in record.model.lora_names}
            self._known = self._model.with_worker(shortest.model, lora_names)
        return self._known
