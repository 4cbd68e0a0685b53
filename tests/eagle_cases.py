"""Models with EAGLE-3 heads whose guesses are known: a ring of tokens, and random heads beside a reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from many_endings import CONFIG as ENDINGS
from safetensors.torch import load_file, save_file

from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.sampling_params import SamplingParams

MODEL = ENDINGS | {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
"""Of sizes that the CPU kernels can compute."""
HEAD = MODEL | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 40}
SIZE, NUM_TOKENS = 64, 60
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
CPU = {"dtype": "bfloat16", "attention_backend": "cpu"}
PLAIN = {"dtype": "float32", "attention_backend": "torch"}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def folder_of(path: Path, config: dict[str, Any]) -> Path:
    """For made-up weights."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def make_engine(model: Path, head: Path | None, *, num_drafts: int = 4, **settings: Any) -> LLMEngine:
    speculation = ""
    if head is not None:
        speculation = json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": num_drafts})
    defaults: dict[str, Any] = {
        "device": "cpu", "num_threads": 1, "block_size": 16, "num_kv_blocks": 72, "max_num_seqs": 16, "max_itl_ms": 0.0,
    }  # fmt: skip
    args = EngineArgs(model=str(model), **{"speculative_config": speculation} | defaults | settings)
    return LLMEngine(create_engine_config(args))


def num_wrong(engine: LLMEngine) -> int:
    return engine.stats.num_draft_tokens - engine.stats.num_accepted_tokens


def rewritten(head: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """The head with its tensors changed."""
    config = json.loads((head / "config.json").read_text())
    return write(head.parent / "changed", config, change(load_file(head / "model.safetensors")))


# -- a ring -----------------------------------------------------------------------------------------------------


def write_ring(folder: Path, *, sharpness: float = 6.0) -> Path:
    """A model that continues each token with the next one, 59 with 0; the sharper, the more often, if it draws."""
    tokens = torch.eye(SIZE)[:NUM_TOKENS]
    layers = {}
    for layer in range(MODEL["num_hidden_layers"]):
        layers |= _layer(f"model.layers.{layer}", inputs=SIZE)
    return write(folder, MODEL | {"tie_word_embeddings": False}, layers | {
        "model.embed_tokens.weight": tokens,
        "model.norm.weight": torch.ones(SIZE),
        "lm_head.weight": sharpness / SIZE**0.5 * tokens[_next_of(torch.arange(NUM_TOKENS)).argsort()],
    })  # fmt: skip


def write_ring_head(folder: Path, **config: Any) -> Path:
    """The head of that model. It knows the token before the last one, so it is right while the ring is kept. It attends
    to nothing: what is in the pool does not show in its guesses."""
    tokens = torch.eye(SIZE)[:NUM_TOKENS]
    to_next = torch.eye(SIZE)[_next_of(torch.arange(NUM_TOKENS))]
    layer = _layer("midlayer", inputs=2 * SIZE)
    # silu(8 * 8) * 8 of the token's place, on to the next token's
    step = (to_next - tokens).T / SIZE**1.5
    layer["midlayer.mlp.gate_proj.weight"] = 8 * torch.eye(SIZE)
    layer["midlayer.mlp.up_proj.weight"] = torch.eye(SIZE)
    layer["midlayer.mlp.down_proj.weight"] = F.pad(step, (0, SIZE - NUM_TOKENS))
    # What the layer leaves is the last token; the logits are of the one after it.
    head_config = HEAD | {"draft_vocab_size": NUM_TOKENS, "eagle_aux_hidden_state_layer_ids": [0]} | config
    return write(folder, head_config, layer | {
        "midlayer.hidden_norm.weight": torch.ones(SIZE),
        "fc.weight": torch.eye(SIZE),
        "norm.weight": torch.ones(SIZE),
        "lm_head.weight": 6 / SIZE**0.5 * tokens[_next_of(torch.arange(NUM_TOKENS)).argsort()],
    })  # fmt: skip


def _next_of(token_ids: torch.Tensor) -> torch.Tensor:
    return (token_ids + 1) % NUM_TOKENS


def _layer(name: str, *, inputs: int) -> dict[str, torch.Tensor]:
    """A layer that adds nothing, and whose keys and values are not zeros."""
    heads = SIZE
    return {
        f"{name}.input_layernorm.weight": torch.ones(SIZE),
        f"{name}.post_attention_layernorm.weight": torch.ones(SIZE),
        f"{name}.self_attn.q_proj.weight": torch.eye(heads, inputs),
        f"{name}.self_attn.k_proj.weight": torch.eye(heads // 2, inputs),
        f"{name}.self_attn.v_proj.weight": torch.eye(heads // 2, inputs),
        f"{name}.self_attn.o_proj.weight": torch.zeros(SIZE, heads),
        f"{name}.mlp.gate_proj.weight": torch.zeros(SIZE, SIZE),
        f"{name}.mlp.up_proj.weight": torch.zeros(SIZE, SIZE),
        f"{name}.mlp.down_proj.weight": torch.zeros(SIZE, SIZE),
    }


# -- random models and heads ------------------------------------------------------------------------------------


def write_random_model(folder: Path, *, num_layers: int = 4) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(**MODEL | {"num_hidden_layers": num_layers, "initializer_range": 0.3})
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


def load_causal_lm(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def write_random_head(folder: Path, *, num_features: int = 3, seed: int = 0, **config: Any) -> Path:
    """A head with random weights for a model of `MODEL`'s shape."""
    config = HEAD | config
    generator = torch.Generator().manual_seed(seed)
    size = config["hidden_size"]
    q_size, kv_size = (config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value"))

    def product(outputs: int, inputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=generator) / inputs**0.5

    def norm(size: int = size) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=generator)

    tensors = {
        "fc.weight": product(size, num_features * size),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": 2 * product(q_size, 2 * size),
        "midlayer.self_attn.k_proj.weight": product(kv_size, 2 * size),
        "midlayer.self_attn.v_proj.weight": product(kv_size, 2 * size),
        "midlayer.self_attn.o_proj.weight": 6 * product(size, q_size),  # what it attends to decides
        "midlayer.mlp.gate_proj.weight": product(config["intermediate_size"], size),
        "midlayer.mlp.up_proj.weight": product(config["intermediate_size"], size),
        "midlayer.mlp.down_proj.weight": product(size, config["intermediate_size"]),
        "norm.weight": norm(),
        "lm_head.weight": 4 * product(config["draft_vocab_size"], size),
    }
    if config["draft_vocab_size"] < config["vocab_size"]:
        chosen = torch.randperm(config["vocab_size"], generator=generator)[: config["draft_vocab_size"]].sort().values
        tensors["d2t"] = chosen - torch.arange(len(chosen))
        tensors["t2d"] = torch.isin(torch.arange(config["vocab_size"]), chosen)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": norm() for i in range(num_features)}
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(num_features * size)
    return write(folder, config, tensors)


class ReferenceHead:
    """A head in plain torch, in float64, that computes everything again for each guess. After the equations of the
    EAGLE-3 paper; a token's keys and values are those of the token and the feature before it."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, torch.Tensor], embedding_VD: torch.Tensor) -> None:
        self._config = config
        self._of = {name: tensor if name in ("d2t", "t2d") else tensor.double() for name, tensor in tensors.items()}
        self._embedding_VD = embedding_VD.double()

    def guesses(self, token_ids: list[int], features_TF: torch.Tensor, num: int) -> list[int]:
        """Greedy guesses after `token_ids`, given the model's hidden states of all tokens but the last one."""
        fused_TD = self._fused(features_TF.double())
        features = [torch.zeros_like(fused_TD[0]), *fused_TD]
        tokens = list(token_ids)
        for _ in range(num):
            out_D = self._layer(torch.tensor(tokens), torch.stack(features))
            normed_D = self._norm(out_D, "norm")
            logits = self._of["lm_head.weight"] @ normed_D
            guess = int(logits.argmax())
            tokens.append(guess + int(self._of["d2t"][guess]) if "d2t" in self._of else guess)
            features.append(normed_D if self._config.get("norm_output") else out_D)
        return tokens[len(token_ids) :]

    def _fused(self, features_TF: torch.Tensor) -> torch.Tensor:
        if self._config.get("norm_before_fc"):
            features_TF = self._norm(features_TF, "input_norm")
        if self._config.get("fc_norm"):
            chunks = features_TF.chunk(features_TF.shape[1] // self._config["hidden_size"], dim=1)
            features_TF = torch.cat([self._norm(each, f"fc_norm.{i}") for i, each in enumerate(chunks)], dim=1)
        return features_TF @ self._of["fc.weight"].T

    def _layer(self, token_ids: torch.Tensor, features_TD: torch.Tensor) -> torch.Tensor:
        """The last token's output."""
        config, of = self._config, self._of
        normed_TD = self._norm(features_TD, "midlayer.hidden_norm")
        x_TX = torch.cat((self._norm(self._embedding_VD[token_ids], "midlayer.input_layernorm"), normed_TD), dim=1)
        residual_TD = normed_TD if config.get("norm_before_residual") else features_TD
        q, k, v = (
            (x_TX @ of[f"midlayer.self_attn.{each}_proj.weight"].T).unflatten(1, (-1, config["head_dim"]))
            for each in "qkv"
        )
        positions = torch.arange(len(token_ids))
        q, k = self._rotated(q, positions), self._rotated(k, positions)
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        weights_NT = (torch.einsum("nh,tnh->nt", q[-1], k) / config["head_dim"] ** 0.5).softmax(dim=-1)
        attended_D = torch.einsum("nt,tnh->nh", weights_NT, v).flatten() @ of["midlayer.self_attn.o_proj.weight"].T
        x_D = residual_TD[-1] + attended_D
        h_D = self._norm(x_D, "midlayer.post_attention_layernorm")
        gate, up = (of[f"midlayer.mlp.{each}_proj.weight"] @ h_D for each in ("gate", "up"))
        return x_D + of["midlayer.mlp.down_proj.weight"] @ (F.silu(gate) * up)

    def _rotated(self, x_TNH: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = x_TNH.shape[2] // 2
        angles = positions[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x_TNH[..., :half], x_TNH[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self._config.get("rms_norm_eps", 1e-6)
        return self._of[f"{name}.weight"] * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
