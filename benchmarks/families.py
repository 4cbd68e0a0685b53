"""Measures the engine beside others with models of many families, of random weights.

    python -m benchmarks.families --against llama                       # Gemma 3 270M, Qwen 3.5 0.8B, a part of gpt-oss
    python -m benchmarks.families --against llama,vllm --shapes gemma3-270m
    python -m benchmarks.families --shapes qwen3-1.7b-half,qwen3-30b-a3b-eighth --quantization int4

Such checkpoints cannot be had everywhere; their shapes are enough to measure speed. Each is written once, in bfloat16,
and converted to GGUF by llama.cpp's own converter, without a vocabulary, and then to Q8_0 or Q4_0 by its own code. The
measurements are those of engine.py.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.engine import compare
from benchmarks.flags import COUNT, Numbers, wrong_usage
from benchmarks.peers import Case, existing

SHAPES: dict[str, dict[str, Any]] = {
    "gemma3-270m": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 640,
        "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512, "max_position_embeddings": 32768,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "tie_word_embeddings": True,
    },
    "qwen3.5-0.8b": {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 248320,
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 32768, "tie_word_embeddings": True,
    },
    "gpt-oss-20b-quarter": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 50272, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 6, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
        "max_position_embeddings": 131072, "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "qwen3-1.7b-half": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 75968, "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 14, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 32768, "rope_theta": 1e6, "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b-eighth": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 18992, "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_local_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1,
        "max_position_embeddings": 32768, "rope_theta": 1e6, "tie_word_embeddings": False,
    },
    "glm-4.7-flash-sixteenth": {
        "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "vocab_size": 9680,
        "hidden_size": 2048, "intermediate_size": 10240, "num_hidden_layers": 3, "num_attention_heads": 20,
        "num_key_value_heads": 20, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64, "v_head_dim": 256, "n_routed_experts": 64, "n_shared_experts": 1,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.8, "max_position_embeddings": 32768, "rope_theta": 1e6, "tie_word_embeddings": False,
    },
    "glm-4.5-air-23rd": {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "vocab_size": 6592, "hidden_size": 4096,
        "intermediate_size": 10944, "num_hidden_layers": 2, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": 128, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 1.0, "attention_bias": True, "use_qk_norm": False,
        "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 0, "max_position_embeddings": 131072,
        "rope_theta": 1e6, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
    "youtu-2b-quarter": {
        "architectures": ["YoutuForCausalLM"], "model_type": "youtu", "vocab_size": 32064, "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "max_position_embeddings": 32768, "rope_theta": 1e6, "tie_word_embeddings": True, "bos_token_id": 1,
        "eos_token_id": 2,
    },
}  # fmt: skip
"""As in the models' own config.json; a part of a model has this part of its layers and of its vocabulary."""
BY_TRANSFORMERS = ("gemma3-270m", "qwen3.5-0.8b", "gpt-oss-20b-quarter")
LLAMA_FTYPE = {"int8": 7, "int4": 2}
"""llama.cpp's numbers for Q8_0 and Q4_0."""
TOOLS = "tools/bin/python"
CONVERTER = "llama/vendor/llama.cpp"
CONVERT = """
import sys
folder, to, source = sys.argv[1:]
sys.path[:0] = [source, source + "/gguf-py"]
import convert_hf_to_gguf as converter
from conversion import base, deepseek, gemma, glm, gpt_oss, qwen

def without_vocabulary(model):
    model.gguf_writer.add_tokenizer_model("none")
    model.gguf_writer.add_vocab_size(model.hparams["vocab_size"])

for module in (base, deepseek, gemma, glm, gpt_oss, qwen):
    for kind in vars(module).values():
        if isinstance(kind, type) and hasattr(kind, "set_vocab"):
            kind.set_vocab = without_vocabulary
without_mtp = ["--no-mtp"] if "qwen3.5" in to else []
sys.argv = ["convert", folder, "--outfile", to, "--outtype", "bf16", *without_mtp]
converter.main()
"""
"""Run by the peers' Python. The converter reads a Gemma's tokenizer.json, to see how many tokens there are."""
LIBRARY = "llama/vendor/llama.cpp/build/bin/libllama.so"
QUANTISE = """
import ctypes, sys
library, source, to, ftype, num_threads = sys.argv[1:]
llama = ctypes.CDLL(library)

class Params(ctypes.Structure):  # its first fields; the defaults of the others stay as they are
    _fields_ = [("num_threads", ctypes.c_int32), ("ftype", ctypes.c_int32), ("others", ctypes.c_char * 1024)]

llama.llama_model_quantize_default_params.restype = Params
llama.llama_model_quantize.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(Params)]
params = llama.llama_model_quantize_default_params()
params.num_threads, params.ftype = int(num_threads), int(ftype)
sys.exit(llama.llama_model_quantize(source.encode(), to.encode(), ctypes.byref(params)))
"""
"""Likewise: llama-quantize is not among the programs that were built."""


def write_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    import transformers

    torch.manual_seed(0)
    fields = {name: value for name, value in config.items() if name not in ("architectures", "quantization_config")}
    hf_config = transformers.AutoConfig.for_model(**fields)
    if "quantization_config" in config:
        write_in_four_bits(folder, hf_config, config)
    else:
        transformers.AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16).save_pretrained(folder)
    vocab = {str(token): token for token in range(config["vocab_size"])}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))


def write_in_four_bits(folder: Path, hf_config: Any, config: dict[str, Any]) -> None:
    import transformers
    from safetensors.torch import save_file

    from engine.models.transformers_experts import FourBitExperts, with_four_bit_experts

    hf_config.dtype = torch.bfloat16
    model = with_four_bit_experts(transformers.GptOssForCausalLM)(hf_config).to(torch.bfloat16)
    for module in model.modules():
        if isinstance(module, FourBitExperts):
            module.make_up_weights()
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    fields = hf_config.to_dict() | {name: config[name] for name in ("architectures", "quantization_config")}
    (folder / "config.json").write_text(json.dumps(fields, default=str))


def convert(folder: Path, to: Path, quantization: str) -> None:
    """Raises `click.ClickException` if llama.cpp's code fails."""
    plain = to if quantization == "none" else to.with_suffix(".bf16.gguf")
    _by_peers(CONVERT, folder, plain, existing(CONVERTER))
    if plain != to:
        _by_peers(QUANTISE, existing(LIBRARY), plain, to, LLAMA_FTYPE[quantization], torch.get_num_threads())
        plain.unlink()


def _by_peers(code: str, *arguments: object) -> None:
    command = [str(existing(TOOLS)), "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise click.ClickException(f"llama.cpp's converter: {done.stderr[-1000:]}")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--shapes", default=",".join(BY_TRANSFORMERS), show_default=True, help="Models, comma-separated.")
@click.option("--quantization", default="none", type=click.Choice(["none", *LLAMA_FTYPE]), show_default=True)
@click.option("--against", default="llama", show_default=True, help="Peers: llama, vllm (see peers.py).")
@click.option("--rounds", default=2, type=COUNT, show_default=True, help="Times to measure each engine, in turn.")
@click.option("--batch-sizes", default="1,8,32", type=Numbers(), show_default=True)
@click.option("--prompt-tokens", default="128,1024", type=Numbers(), show_default=True)
@click.option("--context-tokens", default=160, type=COUNT, show_default=True, help="Prompt length before decoding.")
@click.option("--num-steps", default=24, type=COUNT, show_default=True)
@click.option("--num-prompts", default=3, type=COUNT, show_default=True)
@click.option("--num-threads", default=0, show_default=True, help="Compute threads. 0: torch's default.")
def main(
    shapes: str,
    quantization: str,
    against: str,
    rounds: int,
    batch_sizes: tuple[int, ...],
    prompt_tokens: tuple[int, ...],
    context_tokens: int,
    num_steps: int,
    num_prompts: int,
    num_threads: int,
) -> None:
    """Measure models of many families beside other engines."""
    wanted, peers = shapes.split(","), against.split(",")
    if unknown := [name for name in wanted if name not in SHAPES]:
        raise click.UsageError(f"--shapes: no such model {', '.join(unknown)}; there are {', '.join(SHAPES)}")
    with wrong_usage("--against"):
        for name in (TOOLS, CONVERTER) if "llama" in peers else ():
            existing(name)
    for name in wanted:
        with tempfile.TemporaryDirectory() as made:
            folder, gguf = Path(made) / name, Path(made) / f"{name}.gguf"
            click.echo(f"{name}: writing random weights", err=True)
            write_checkpoint(folder, SHAPES[name])
            if "llama" in peers:
                convert(folder, gguf, quantization)
            case = Case(
                prompt_tokens=prompt_tokens,
                batch_sizes=batch_sizes,
                context_tokens=context_tokens,
                num_steps=num_steps,
                num_prompts=num_prompts,
                num_threads=num_threads or torch.get_num_threads(),
                folder=str(folder),
                gguf=str(gguf),
                quantization=quantization,
                shape=name,
            )
            click.echo(name)
            compare(
                case, peers, rounds, ["--model", str(folder), "--dtype", "bfloat16", "--quantization", quantization]
            )


if __name__ == "__main__":
    main()
