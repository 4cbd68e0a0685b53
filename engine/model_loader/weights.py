"""Sources of a model's weights, tensor by tensor: safetensors files, or made-up numbers.

A source hands out each tensor once, with a checked shape, in the engine's dtype, on its device. Files are
memory-mapped: nothing is read before it is taken, and the map is released with the source.
"""

from __future__ import annotations

import hashlib
import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import deserialize, safe_open

from engine.kv_cache import TORCH_DTYPES
from engine.model_loader.folder import opening, read_json, safetensors_files
from engine.model_loader.language_part import LanguageTensors, Tensors, body_in, is_whole
from engine.weight import Weight

PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of tensors that need no scales."""
_DTYPES_IN_FILES = dict(zip(("F32", "BF16", "F16", "F64"), PLAIN_DTYPES, strict=True))


def open_tensors(path: Path, device: str, whose: str = "") -> Any:
    """Open a safetensors file whose tensors are loaded to `device`; "cuda" is this thread's current one. `whose`: owner
    of the file, for errors.

    The library itself would take "cuda" for the machine's first GPU, whichever a rank has set.
    """
    if device == "cuda":
        device = f"cuda:{torch.cuda.current_device()}"
    with opening(path, whose):
        return safe_open(path, framework="pt", device=device)


def open_checkpoint(folder: Path, device: str) -> dict[Path, Tensors]:
    """Open the files of a model's folder. Of a checkpoint for text and images, only the language model's tensors are
    there, as if it were the whole checkpoint."""
    files = {path: open_tensors(path, device) for path in safetensors_files(folder)}
    if not is_whole(read_json(folder / "config.json")):
        return files
    body = body_in(chain.from_iterable(file.keys() for file in files.values()), folder)
    return {path: LanguageTensors(file, body) for path, file in files.items()}


class TensorsInMemory:
    """A safetensors file that is read completely at once, so that later changes of the file do not matter. A process
    that has mapped a file (as `open_tensors` does) dies of SIGBUS if the file is truncated."""

    def __init__(self, path: Path, device: str, max_bytes: int, whose: str) -> None:
        """Raises `ValueError` if the file is larger than `max_bytes`, or broken."""
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
        check_size(path, len(data), max_bytes, whose)
        self.digest = xxhash.xxh3_128_hexdigest(data)
        """Equals `digest_files` of the file."""
        with opening(path, whose):
            self._found = dict(deserialize(data))  # type: ignore[no-untyped-call]
        self._device, self._whose = device, whose

    def keys(self) -> Iterable[str]:
        return self._found.keys()

    def get_tensor(self, name: str) -> torch.Tensor:
        """Raises `ValueError` if the tensor's dtype is not in `PLAIN_DTYPES`."""
        found = self._found[name]
        dtype = _DTYPES_IN_FILES.get(found["dtype"])
        if dtype is None:
            one_of = ", ".join(_DTYPES_IN_FILES)
            raise ValueError(f"{self._whose}: {name} is in {found['dtype']}, must be in one of {one_of}")
        if not found["data"]:
            return torch.empty(found["shape"], dtype=dtype, device=self._device)
        return torch.frombuffer(found["data"], dtype=dtype).reshape(found["shape"]).to(self._device)


def check_size(path: Path, num_bytes: int, max_bytes: int, whose: str) -> None:
    """Raise `ValueError` if an adapter's file is larger than its rank allows."""
    if num_bytes > max_bytes:
        raise ValueError(f"{whose}: {path} has more than {max_bytes} bytes, which its rank can take in this model")


def digest_by_reading(path: Path) -> str:
    """`digest_files` of one file that may be truncated meanwhile; slower, since it copies."""
    digest = xxhash.xxh3_128()
    piece = memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(piece):
            digest.update(piece[:size])
    return digest.hexdigest()


def digest_files(files: Iterable[Path]) -> str:
    """xxh3-128 of the files' bytes in order. Reads all of them through the page cache."""
    digest = xxhash.xxh3_128()
    for path in files:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            digest.update(data)
    return digest.hexdigest()


class Weights(ABC):
    """A source of tensors by their Hugging Face names."""

    def __init__(self, dtype: str, device: str) -> None:
        self.dtype = TORCH_DTYPES[dtype]
        self.device = device

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor in the engine's dtype, or in `dtype`. Raises `ValueError` if it is missing or has another
        shape."""
        return self._read(name, shape).to(device=self.device, dtype=dtype or self.dtype).contiguous()

    def take_product(self, name: str, shape: tuple[int, int]) -> Weight:
        """Like `take`, for the weight of a layer's product: quantised if the files have it so and the engine's products
        use this form."""
        return self.take(name, shape)

    def take_integers(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor of integers, as int64. Raises `ValueError` likewise. Made-up weights have none."""
        raise ValueError(f"the weights lack the tensor {name}")

    @abstractmethod
    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor: ...

    def has(self, name: str) -> bool:
        """Whether the files hold a tensor. False for made-up weights."""
        del name
        return False

    def ignore(self, suffix: str) -> None:
        """Tensors whose names end in `suffix` need not be taken."""
        del suffix

    def ignore_layer(self, layer: int) -> None:
        """Tensors of a layer need not be taken."""
        del layer

    def check_all_taken(self) -> None:
        """Raise `ValueError` if a tensor was not taken: the model would not be the trained one."""
        return

    def check_layer_taken(self, layer: int) -> None:
        """The same for the tensors of one layer."""
        del layer


class SafetensorsWeights(Weights):
    why_not_narrow = "config.json has no quantization_config that says so"
    """Why a tensor in fewer bits cannot be read, as a clause."""

    def __init__(self, folder: Path, dtype: str, device: str) -> None:
        super().__init__(dtype, device)
        self._folder = folder
        self._handle_of: dict[str, Tensors] = {}
        self._file_of: dict[str, Path] = {}
        for path, handle in self._open(folder, device).items():
            for name in handle.keys():  # noqa: SIM118
                self._handle_of[name], self._file_of[name] = handle, path
        self._left = set(self._handle_of)

    def _open(self, folder: Path, device: str) -> dict[Path, Tensors]:
        return open_checkpoint(folder, device)

    def take_integers(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._read_stored(name, shape)
        if tensor.dtype.is_floating_point or tensor.dtype == torch.bool:
            raise ValueError(f"{self._file_of[name]}: {name} is in {tensor.dtype}, must be integers")
        return tensor.to(device=self.device, dtype=torch.int64)

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._read_stored(name, shape)
        if tensor.dtype not in PLAIN_DTYPES:
            raise ValueError(f"{self._file_of[name]}: {name} is in {tensor.dtype}, and {self.why_not_narrow}")
        return tensor

    def _read_stored(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Read a tensor in its stored dtype."""
        handle = self._handle(name)
        tensor: torch.Tensor = handle.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"the weights in {self._folder} do not fit config.json: {name} has shape {tuple(tensor.shape)}, "
                f"expected {shape}"
            )
        self._left.discard(name)
        return self._own(tensor)

    def _handle(self, name: str) -> Any:
        """The handle of the file that holds a tensor. Raises `ValueError` if none does."""
        handle = self._handle_of.get(name)
        if handle is None:
            module, _, kind = name.rpartition(".")
            of_module = {each for each in self._handle_of if each.startswith(f"{module}.")}
            beside = sorted(of_module - {f"{module}.bias"})
            has = (
                f", and have {', '.join(beside[:4])}: does config.json say how they are stored?"
                if beside and kind != "bias"
                else ""
            )
            raise ValueError(f"the weights in {self._folder} lack the tensor {name}{has}")
        return handle

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor that is a view of its file: a single view would keep the whole map and all pages read."""
        return tensor.clone() if self.device == "cpu" else tensor

    def narrow_products(self) -> dict[str, tuple[int, int]]:
        """Names and shapes of the weights that the files hold in 8 or 4 bits, for `take_product`."""
        return {}

    def take_rest(self) -> dict[str, torch.Tensor]:
        """Take all tensors that are left, as they are stored, by name."""
        rest = {name: self._handle(name).get_tensor(name) for name in sorted(self._left)}
        self._left.clear()
        return rest

    def has(self, name: str) -> bool:
        return name in self._handle_of

    def ignore(self, suffix: str) -> None:
        self._left = {name for name in self._left if not name.endswith(suffix)}

    def ignore_layer(self, layer: int) -> None:
        self._left -= self._left_of(layer)

    def check_all_taken(self) -> None:
        self._check_none(self._left)

    def check_layer_taken(self, layer: int) -> None:
        self._check_none(self._left_of(layer))

    def _left_of(self, layer: int) -> set[str]:
        return {name for name in self._left if name.startswith(f"model.layers.{layer}.")}

    def _check_none(self, left: set[str]) -> None:
        if left:
            some = ", ".join(sorted(left)[:5])
            raise ValueError(f"the weights in {self._folder} hold tensors that the architecture does not use: {some}")


def dummy_digest(seed: int, device: str) -> str:
    """The digest of made-up weights. A GPU's random numbers depend on its kind."""
    kind = "" if device == "cpu" else f"-{torch.cuda.get_device_name()}"
    return f"dummy-{seed}{kind}"


class DummyWeights(Weights):
    """Random weights of any shape: equal for equal (seed, name, shape), whatever was taken before.

    Made on the target device, since a CPU takes a minute for a model of 8B. So they are only equal on devices of the
    same kind (`dummy_digest`).
    """

    def __init__(self, seed: int, dtype: str, device: str) -> None:
        super().__init__(dtype, device)
        self._seed = seed

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        digest = hashlib.blake2b(f"{self._seed}\0{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest, "little") >> 1)
        noise = torch.randn(shape, generator=generator, device=self.device)
        if name.endswith("norm.weight"):
            return 1 + 0.1 * noise
        if len(shape) == 1 or "embed_tokens" in name:
            return 0.1 * noise
        # Keeps the magnitude of activations from layer to layer, so that logits neither vanish nor explode.
        return noise / math.sqrt(shape[1])
