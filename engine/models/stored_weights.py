"""How a checkpoint stores its weights, read from the `quantization_config` of its config.json. No torch.

The files show which tensors are in 8 or 4 bits, by type or name, and each such tensor has its scales beside it. So the
lists of excluded modules (`ignore`, `modules_to_not_convert`) are not needed. Nor are the scales of activations:
engine/quantization.py computes a scale per row at run time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KNOWN = (
    "known are fp8 (float8_e4m3fn, a scale for each tensor or block), compressed-tensors (float-quantized, "
    "int-quantized and naive-quantized: 8 bits, symmetric, a scale for each tensor, channel or block; pack-quantized: "
    "int, 4 bits, by channel or group), gptq (4 bits), awq (4 bits, gemm) and auto-round (4 bits, as gptq or awq)"
)
CT_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
CT_PACKED = "pack-quantized"
OWN = "tandem-int4"
"""Method of GGUF files that Tandem has converted."""
CT_STRATEGIES = ("tensor", "channel", "block")
CT_ORDERS = (None, "static", "weight", "group", "dynamic")
"""Orders in which columns were quantised. With the last two, which are synonyms, a group's columns are not adjacent."""
QUANTIZATIONS = ("quantization_config", "compression_config")
"""Where config.json says it. The second is the earlier name of compressed-tensors."""
AS_STORED = "stored"
"""Quantization "stored": each weight stays as the checkpoint has it, in 8 or 4 bits, or plain."""
QUANTIZATION_OF_TYPE = {"float": "fp8", "int": "int8"}


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """The forms that the checkpoint's tensors may have, besides plain ones."""

    quantizations: tuple[str, ...] = ()
    """"fp8" (float8_e4m3fn) or "int8" or both, or only "int4"; empty: all tensors are plain."""
    block: tuple[int, int] | None = None
    """Outputs and inputs of a block that shares a scale, if scales are per block."""
    packing: str = ""
    """How 4-bit weights are packed, and which tensors come with them: engine/model_loader/int4_weights.py."""
    group_size: int = -1
    """For 4 bits: inputs that share a scale, by config.json; -1: all. If the files differ from this, they count."""

    is_symmetric: bool = False
    """For gptq: all zero points are the middle, by config.json. The files have them, too."""

    @property
    def name(self) -> str:
        name = " and ".join(self.quantizations) or "plain"
        return name if self.block is None else "{} in blocks of {}x{}".format(name, *self.block)

    @staticmethod
    def from_hf(hf_config: dict[str, Any]) -> StoredWeights:
        """Raises `ValueError` naming the unsupported field, and what is supported."""
        config = _config_of(hf_config)
        if not config:
            return StoredWeights()
        if not isinstance(config, dict):
            raise ValueError(f"config.json: quantization_config must be an object, is {config!r}")
        method = config.get("quant_method")
        if method == "fp8":
            return _of_fp8(config)
        if method == "compressed-tensors":
            return _of_compressed_tensors(config)
        if method == "gptq":
            return _of_gptq(config)
        if method == "awq":
            return _of_awq(config)
        if method == "auto-round":
            return _of_auto_round(config)
        if method == OWN:
            return StoredWeights(quantizations=("int4",), packing=OWN, group_size=_group_size(config))
        raise _unsupported("quant_method", method)


def method_of(hf_config: dict[str, Any]) -> object:
    """The `quant_method` of config.json; None if weights are plain."""
    config = _config_of(hf_config)
    return config.get("quant_method") if isinstance(config, dict) else None


def _config_of(hf_config: dict[str, Any]) -> Any:
    return next((hf_config[field] for field in QUANTIZATIONS if hf_config.get(field)), None)


def is_mxfp4(hf_config: dict[str, Any]) -> bool:
    """Whether experts are in MXFP4, as in gpt-oss (engine/model_loader/mxfp4.py)."""
    config = hf_config.get("quantization_config")
    return isinstance(config, dict) and config.get("quant_method") == "mxfp4"


def _of_fp8(config: dict[str, Any]) -> StoredWeights:
    """The format of DeepSeek-V3 and Qwen3 (blocks), and of AutoFP8 and Mistral (a scale per tensor)."""
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
    stored = [_of_group(f"config_groups.{name}", group, config.get("format")) for name, group in groups.items()]
    quantizations = sorted({quantization for each in stored for quantization in each.quantizations})
    if "int4" in quantizations:
        if len(quantizations) > 1:
            raise _unsupported("config_groups", " and ".join(quantizations))
        return stored[0]
    blocks = {each.block for each in stored if each.block is not None}
    if len(blocks) > 1:
        raise _unsupported("block_structure", sorted(blocks))
    return StoredWeights(quantizations=tuple(quantizations), block=blocks.pop() if blocks else None)


def _of_group(at: str, group: Any, default_format: Any) -> StoredWeights:
    """The form of a config group's weights."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise _unsupported(f"{at}.weights", weights)
    format_ = group.get("format") or default_format
    if format_ == CT_PACKED:
        return _of_packed(weights, f"{at}.weights.")
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
    return StoredWeights(quantizations=(QUANTIZATION_OF_TYPE[weights["type"]],), block=block)


def _of_packed(weights: dict[str, Any], at: str) -> StoredWeights:
    _expect(weights, "num_bits", (4,), at)
    _expect(weights, "type", ("int",), at)
    _expect(weights, "symmetric", (None, True, False), at)
    _expect(weights, "dynamic", (None, False), at)
    _expect(weights, "strategy", ("channel", "group"), at)
    _expect(weights, "actorder", CT_ORDERS, at)
    group_size = _group_size(weights, at) if weights["strategy"] == "group" else -1
    return StoredWeights(quantizations=("int4",), packing=CT_PACKED, group_size=group_size)


def _of_gptq(config: dict[str, Any]) -> StoredWeights:
    """The format of AutoGPTQ and GPTQModel. The format "gptq" stores zero points minus one."""
    _expect(config, "bits", (4,))
    # "format" is the name in GPTQModel's code, which some files have, too.
    field = "checkpoint_format" if config.get("checkpoint_format") else "format"
    _expect(config, field, (None, "", "gptq", "gptq_v2"))
    _expect(config, "pack_dtype", (None, "int32"))
    _check_bits(config, "dynamic", (None, 4))
    packing = "gptq_v2" if config.get(field) == "gptq_v2" else "gptq"
    return StoredWeights(
        quantizations=("int4",), packing=packing, group_size=_group_size(config), is_symmetric=config.get("sym") is True
    )


def _of_awq(config: dict[str, Any]) -> StoredWeights:
    """The format of AutoAWQ. Other tools' symmetric files (`zero_point` false) contain zero points, too."""
    _expect(config, "bits", (4,))
    for field in ("version", "format", "checkpoint_format"):
        _expect(config, field, (None, "gemm", "GEMM"))
    # All other backends are kernels of the writing tool, for the same form.
    if config.get("backend") == "llm-awq":
        raise _unsupported("backend", config["backend"])
    return StoredWeights(quantizations=("int4",), packing="awq", group_size=_group_size(config))


def _of_auto_round(config: dict[str, Any]) -> StoredWeights:
    """The format of Intel's AutoRound, which packs like GPTQ or AWQ."""
    _expect(config, "bits", (4,))
    _expect(config, "data_type", (None, "int"))
    _expect(config, "packing_format", ("auto_round:auto_gptq", "auto_round:auto_awq"))
    _check_bits(config, "extra_config", (None, 4, 16, 32))
    packing = config["packing_format"].removeprefix("auto_round:auto_")
    return StoredWeights(quantizations=("int4",), packing=packing, group_size=_group_size(config))


def _check_bits(config: dict[str, Any], field: str, known: tuple[int | None, ...]) -> None:
    """Check the bits of modules that have their own settings, by name."""
    modules = config.get(field) or {}
    if not isinstance(modules, dict):
        raise _unsupported(field, modules)
    for name, settings in modules.items():
        # With this prefix GPTQModel leaves the matching modules plain.
        if isinstance(settings, dict) and not name.startswith("-:"):
            _expect(settings, "bits", known, f"{field}.{name}.")


def _group_size(config: dict[str, Any], at: str = "") -> int:
    size = config.get("group_size")
    if type(size) is not int or (size < 1 and size != -1):
        raise ValueError(f"config.json: quantization_config: {at}group_size must be at least 1, or -1, is {size!r}")
    return size


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
