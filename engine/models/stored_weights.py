"""How a checkpoint keeps its weights, by the `quantization_config` of its config.json. No torch.

Which tensors are in 8 bits their files say themselves, by type, and each has its scales beside it: lists of modules
that were left out (`ignore`, `modules_to_not_convert`) say it once more and are not needed. What activations were
quantised with is not, either: engine/quantization.py finds a scale for each row of them as it comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KNOWN = (
    "known are fp8 (float8_e4m3fn, a scale for each tensor or block) and compressed-tensors (float-quantized, "
    "int-quantized and naive-quantized: 8 bits, symmetric, a scale for each tensor, channel or block)"
)
CT_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
CT_STRATEGIES = ("tensor", "channel", "block")
AS_STORED = "stored"
"""Products in what the checkpoint has, each weight for itself: 8 bits, or plain."""
QUANTIZATION_OF_TYPE = {"float": "fp8", "int": "int8"}


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """What tensors of the checkpoint may be, beside plain ones."""

    quantizations: tuple[str, ...] = ()
    """Of "fp8" (float8_e4m3fn) and "int8"; none: all tensors are plain."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale, where scales are those of blocks."""

    @property
    def name(self) -> str:
        name = " and ".join(self.quantizations) or "plain"
        return name if self.block is None else "{} in blocks of {}x{}".format(name, *self.block)

    @staticmethod
    def from_hf(hf_config: dict[str, Any]) -> StoredWeights:
        """Raises `ValueError` naming the field that is not supported, and what is."""
        # The second is how compressed-tensors called it at first.
        config = hf_config.get("quantization_config") or hf_config.get("compression_config")
        if not config:
            return StoredWeights()
        if not isinstance(config, dict):
            raise ValueError(f"config.json: quantization_config must be an object, is {config!r}")
        method = config.get("quant_method")
        if method == "fp8":
            return _of_fp8(config)
        if method == "compressed-tensors":
            return _of_compressed_tensors(config)
        raise _unsupported("quant_method", method)


def is_mxfp4(hf_config: dict[str, Any]) -> bool:
    """Experts in 4 bits, as gpt-oss has them (engine/model_loader/mxfp4.py): widened when they are loaded."""
    config = hf_config.get("quantization_config")
    return isinstance(config, dict) and config.get("quant_method") == "mxfp4"


def _of_fp8(config: dict[str, Any]) -> StoredWeights:
    """DeepSeek-V3's and Qwen3's own (blocks), and that of AutoFP8 and Mistral (a scale for each tensor)."""
    _expect(config, "fmt", (None, "e4m3"))
    _expect(config, "scale_fmt", (None, "float", "ue8m0"))
    _expect(config, "expert_dtype", (None, "fp8"))
    return StoredWeights(quantizations=("fp8",), block=_block(config, "weight_block_size"))


def _of_compressed_tensors(config: dict[str, Any]) -> StoredWeights:
    if config.get("transform_config"):
        raise _unsupported("transform_config", config["transform_config"])
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, dict):
        _expect(sparsity, "format", (None, "dense"), "sparsity_config.")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _unsupported("config_groups", groups)
    quantizations, blocks = set(), set()
    for name, group in groups.items():
        quantization, block = _of_group(f"config_groups.{name}", group, config.get("format"))
        quantizations.add(quantization)
        if block is not None:
            blocks.add(block)
    if len(blocks) > 1:
        raise _unsupported("block_structure", sorted(blocks))
    return StoredWeights(quantizations=tuple(sorted(quantizations)), block=blocks.pop() if blocks else None)


def _of_group(at: str, group: Any, default_format: Any) -> tuple[str, tuple[int, int] | None]:
    """What its weights are in, and the blocks that share a scale, if there are any."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise _unsupported(f"{at}.weights", weights)
    format_ = group.get("format") or default_format
    if format_ not in CT_FORMATS:
        raise _unsupported("format", format_)
    at = f"{at}.weights."
    _expect(weights, "num_bits", (8,), at)
    _expect(weights, "type", tuple(QUANTIZATION_OF_TYPE), at)
    _expect(weights, "symmetric", (None, True), at)
    _expect(weights, "dynamic", (None, False), at)
    _expect(weights, "strategy", CT_STRATEGIES, at)
    block = None
    if weights["strategy"] == "block":
        block = _block(weights, "block_structure")
        if block is None:
            raise _unsupported(f"{at}block_structure", None)
    return QUANTIZATION_OF_TYPE[weights["type"]], block


def _block(config: dict[str, Any], field: str) -> tuple[int, int] | None:
    sizes = config.get(field)
    if sizes is None:
        return None
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"config.json: quantization_config: {field} must be two integers of at least 1, is {sizes!r}")
    return sizes[0], sizes[1]


def _expect(config: dict[str, Any], field: str, known: tuple[Any, ...], at: str = "") -> None:
    value = config.get(field)
    if not any(type(value) is type(each) and value == each for each in known):
        raise _unsupported(at + field, value)


def _unsupported(field: str, value: Any) -> ValueError:
    return ValueError(f"config.json: quantization_config: {field} {value!r} is not supported; {KNOWN}")
