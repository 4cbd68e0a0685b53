"""Small models whose checkpoints bring along a head that guesses, and a reference of such a head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.modeling_layers import MtpModel

from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config

SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 512, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_shared_experts": 1, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
NUM_LAYERS = 3
"""Of the model; the head's comes after them."""
OF_LATENTS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
OF_HEADS = {name: value for name, value in SIZES.items() if name not in OF_LATENTS}
CONFIGS: dict[str, Any] = {
    "DeepseekV3": lambda: transformers.DeepseekV3Config(
        **SIZES, num_hidden_layers=NUM_LAYERS + 1, first_k_dense_replace=1, n_group=2, topk_group=1
    ),
    "Glm4Moe": lambda: transformers.Glm4MoeConfig(
        **OF_HEADS | {"num_key_value_heads": 2},
        num_hidden_layers=NUM_LAYERS + 1,
        head_dim=32,
        attention_bias=True,
        use_qk_norm=True,
        num_mtp_layers=0,
    ),
    "Glm4MoeLite": lambda: transformers.Glm4MoeLiteConfig(
        **SIZES,
        num_hidden_layers=NUM_LAYERS + 1,
        mlp_layer_types=["dense", *["sparse"] * NUM_LAYERS],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
}
CPU = {"dtype": "bfloat16", "attention_backend": "cpu"}
PLAIN = {"dtype": "float32", "attention_backend": "torch"}
PREFIX = f"model.layers.{NUM_LAYERS}."


class Reference:
    """A checkpoint's model and head by transformers' code, in float32; everything is computed again for each guess."""

    def __init__(self, folder: Path, family: str) -> None:
        """Write the checkpoint of a random model of the family to `folder`."""
        torch.manual_seed(3)
        config = CONFIGS[family]()
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.add_(0.2 * torch.randn_like(parameter))
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(std=0.2)
        self._model, self._layer = model, model.model.layers[NUM_LAYERS]
        norm_class, size = type(model.model.norm), config.hidden_size
        self._norms = {name: norm_class(size, config.rms_norm_eps) for name in ("enorm", "hnorm", "shared_head.norm")}
        self._join = nn.Linear(2 * size, size, bias=False)
        with torch.no_grad():
            for norm in self._norms.values():
                norm.weight.add_(0.2 * torch.randn(size))
        model.save_pretrained(folder)
        own = {f"{PREFIX}{name}.weight": norm.weight.data for name, norm in self._norms.items()}
        own |= {
            f"{PREFIX}eh_proj.weight": self._join.weight.data,
            f"{PREFIX}embed_tokens.weight": model.get_input_embeddings().weight.data.clone(),
            f"{PREFIX}shared_head.head.weight": model.get_output_embeddings().weight.data.clone(),
        }
        change_tensors(folder, own)
        written = json.loads((folder / "config.json").read_text())
        written["num_hidden_layers"] = NUM_LAYERS
        written["num_nextn_predict_layers"] = 1
        if "mlp_layer_types" in written:
            written["mlp_layer_types"] = written["mlp_layer_types"][:NUM_LAYERS]
        (folder / "config.json").write_text(json.dumps(written))
        model.model.layers = model.model.layers[:NUM_LAYERS]
        model.config.num_hidden_layers = NUM_LAYERS

    @torch.no_grad()
    def guesses(self, token_ids: list[int], num: int, *, missing: int = 0) -> list[int]:
        """Greedy guesses after `token_ids`. `missing`: the place of a token that has no feature, like the first one."""
        features_TD = self._model.model(torch.tensor([token_ids[:-1]])).last_hidden_state[0]  # after the last norm
        features = [torch.zeros_like(features_TD[0]), *features_TD]
        features[missing] = features[0]
        tokens = list(token_ids)
        for _ in range(num):
            out_D = self._output(torch.tensor(tokens), torch.stack(features))
            tokens.append(int(self._model.lm_head(out_D).argmax()))
            features.append(out_D)
        return tokens[len(token_ids) :]

    @torch.no_grad()
    def check_against_transformers(self, token_ids: list[int]) -> None:
        """Compare the head's output with that of transformers' `MtpModel`, which leaves out the first token."""
        self._model.config.update(
            {"num_mtp_layers": 1, "mtp_mlp_layer_types": ["sparse"]}
        )  # GLM 4.7 Flash's lacks both
        mtp = MtpModel(self._model, 1).eval()
        layer = mtp.layers[0]
        layer.mtp_block.load_state_dict(self._layer.state_dict())
        layer.eh_proj.load_state_dict(self._join.state_dict())
        for name, norm in zip(("enorm", "hnorm", "post_norm"), self._norms.values(), strict=True):
            getattr(layer, name).load_state_dict(norm.state_dict())
        tokens, positions = torch.tensor([token_ids]), torch.arange(len(token_ids))[None]
        features_1TD = self._model.model(tokens).last_hidden_state[:, :-1]
        theirs_1TD = mtp.forward_layer(0, features_1TD, positions[:, 1:], None, input_ids=tokens[:, 1:])
        ours_D = self._output(tokens[0, 1:], features_1TD[0], first_position=1)
        torch.testing.assert_close(ours_D, theirs_1TD[0, -1], rtol=1e-5, atol=1e-5)

    def _output(self, token_ids: torch.Tensor, features_TD: torch.Tensor, *, first_position: int = 0) -> torch.Tensor:
        """Of the last token, normed."""
        embedded_TD = self._model.get_input_embeddings()(token_ids)
        pairs_TX = torch.cat((self._norms["enorm"](embedded_TD), self._norms["hnorm"](features_TD)), dim=-1)
        x_1TD, positions = self._join(pairs_TX)[None], first_position + torch.arange(len(token_ids))[None]
        mask = torch.full((len(token_ids),) * 2, float("-inf")).triu(1)[None, None]
        x_1TD = self._layer(
            x_1TD,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self._model.model.rotary_emb(x_1TD, positions),
        )
        out_D: torch.Tensor = self._norms["shared_head.norm"](x_1TD[0, -1])
        return out_D


def change_tensors(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Change the checkpoint's tensors; None removes one."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: each for name, each in tensors.items() if each is not None}, folder / "model.safetensors")


def make_engine(folder: Path, *, num_drafts: int = 3, **settings: Any) -> LLMEngine:
    """`num_drafts`: 0 for no speculation."""
    speculation = json.dumps({"method": "mtp", "num_speculative_tokens": num_drafts}) if num_drafts else ""
    defaults: dict[str, Any] = {
        "device": "cpu", "num_threads": 1, "block_size": 16, "num_kv_blocks": 72, "max_num_seqs": 16, "max_itl_ms": 0.0,
    }  # fmt: skip
    args = EngineArgs(model=str(folder), **{"speculative_config": speculation} | defaults | settings)
    return LLMEngine(create_engine_config(args))
