"""An EAGLE-3 head as `train_eagle_head.py` trains it: one layer that reads the next token's embedding beside features
of the target model, and drafts further tokens from its own output."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

NUM_STEPS = 3
"""Tokens drafted one after the other in training."""
FIRST_SURENESS = 0.4
"""Of the target's logits: the head's first guesses are mostly wrong, and training is long in unlearning sure ones."""
LEAST_LAYERS = 5
"""So that the three layers are in order."""
SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "rms_norm_eps",
    "max_position_embeddings",
)  # fmt: skip


def head_config(target: Any) -> dict[str, Any]:
    """config.json of a head for a model with this transformers configuration. Raises `ValueError` if the model is not
    of Llama's form."""
    missing = [name for name in SIZES if getattr(target, name, None) is None]
    if missing:
        raise ValueError(f"must be a model of Llama's form, but its config.json has no {missing[0]}")
    if target.num_hidden_layers < LEAST_LAYERS:
        raise ValueError(f"must have at least {LEAST_LAYERS} layers, has {target.num_hidden_layers}")
    head_dim = getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: getattr(target, name) for name in SIZES},
        "head_dim": head_dim,
        "num_hidden_layers": 1,
        "rope_theta": (getattr(target, "rope_parameters", None) or {}).get("rope_theta", 10000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def draft_vocabulary(counts: Mapping[int, int], size: int) -> list[int]:
    """The `size` most frequent ids, in ascending order."""
    return sorted(sorted(counts, key=lambda id_: (-counts[id_], id_))[:size])


def rate_at(progress: float) -> float:
    """Share of the peak learning rate at `progress`, from 0 to 1: a short rise, then half a cosine."""
    return min(1.0, 0.02 + progress / 0.04) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class SoftCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of logits [N, n] against distributions [N, n]. Several times as fast as torch's own, which
    makes many more arrays of this size."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, expected: Tensor) -> Tensor:
        log_shares = logits.float().log_softmax(-1)
        ctx.save_for_backward(log_shares, expected)
        return -torch.dot(log_shares.flatten(), expected.flatten()) / max(1, len(logits))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        log_shares, expected = ctx.saved_tensors
        return log_shares.exp().sub_(expected).mul_(gradient / max(1, len(expected))), None


class EagleHead(nn.Module):
    """Parameters have the names of the checkpoint. `feature_scales` [3 D] multiply the features, which differ much in
    size; `weights` has them folded into `fc`."""

    feature_scales: Tensor

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        D, inner, eps = config["hidden_size"], config["intermediate_size"], config["rms_norm_eps"]
        self._head_dim: int = config["head_dim"]
        self._theta: float = config["rope_theta"]
        q_size, kv_size = (config[f"num_{name}_heads"] * self._head_dim for name in ("attention", "key_value"))

        def product(num_inputs: int, num_outputs: int) -> nn.Linear:
            return nn.Linear(num_inputs, num_outputs, bias=False)

        self.fc = product(3 * D, D)
        attention = {"q_proj": product(2 * D, q_size), "o_proj": product(q_size, D)}
        attention |= {f"{name}_proj": product(2 * D, kv_size) for name in "kv"}
        mlp = {"gate_proj": product(D, inner), "up_proj": product(D, inner), "down_proj": product(inner, D)}
        norms = {f"{name}norm": nn.RMSNorm(D, eps) for name in ("input_layer", "hidden_", "post_attention_layer")}
        self.midlayer = nn.ModuleDict({"self_attn": nn.ModuleDict(attention), "mlp": nn.ModuleDict(mlp), **norms})
        self.norm = nn.RMSNorm(D, eps)
        self.lm_head = product(D, config["draft_vocab_size"])
        self.register_buffer("feature_scales", torch.ones(3 * D), persistent=False)

    @torch.no_grad()
    def begin_like(self, target: Any, target_ids: Tensor, feature_scales: Tensor) -> None:
        """Take what the target has: its last norm, its head's rows, and as features first those of the deepest layer.
        The layer adds little at first."""
        D = self.fc.out_features
        self.feature_scales.copy_(feature_scales)
        deepest = 1 / feature_scales[-D:]
        self.fc.weight.normal_(std=0.1 / D**0.5)
        self.fc.weight[:, -D:] += torch.diag(deepest / deepest.square().mean().sqrt())
        for part in ("self_attn", "mlp"):
            for weight in self.midlayer[part].parameters():
                weight.normal_(std=weight.shape[1] ** -0.5)
        self.midlayer["self_attn"]["o_proj"].weight.mul_(0.1)
        self.midlayer["mlp"]["down_proj"].weight.mul_(0.1)
        self.norm.weight.copy_(target.base_model.norm.weight * FIRST_SURENESS)
        self.lm_head.weight.copy_(target.get_output_embeddings().weight[target_ids])

    def weights(self) -> dict[str, Tensor]:
        """As in the checkpoint, for features as the target has them."""
        weights = {name: weight.detach() for name, weight in self.state_dict().items()}
        return weights | {"fc.weight": weights["fc.weight"] * self.feature_scales}

    def forward(self, embedded: Tensor, features: Tensor) -> list[Tensor]:
        """Outputs of all steps for pairs of a token's embedding [B, N, D] and the features before it [B, N, 3 D].

        A chain begins at each pair: its step s reads the token s places further with the output of step s - 1, and
        attends to the pairs up to its first and to its own earlier steps, as when drafting. The outputs of step s are
        [B, N - s, D], by the chains' first pairs.
        """
        layer, attention = self.midlayer, self.midlayer["self_attn"]
        num_pairs = embedded.shape[1]
        state = self.fc(features * self.feature_scales).float()
        outs: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(min(NUM_STEPS, num_pairs)):
            num = num_pairs - step
            read = (layer["input_layernorm"](embedded[:, step:].float()), layer["hidden_norm"](state))
            pair = torch.cat(read, dim=-1)
            q, k, v = (attention[f"{name}_proj"](pair).unflatten(-1, (-1, self._head_dim)) for name in "qkv")
            cos, sin = self._turns(step, num)
            keys.append(_turned(k, cos, sin).transpose(1, 2))
            values.append(v.transpose(1, 2))
            q = _turned(q, cos, sin).transpose(1, 2)
            mixed = _attention(q, [key[:, :, :num] for key in keys], [value[:, :, :num] for value in values])
            state = state + attention["o_proj"](mixed.transpose(1, 2).flatten(2))
            x = layer["post_attention_layernorm"](state)
            mlp = layer["mlp"]
            outs.append(state + mlp["down_proj"](silu(mlp["gate_proj"](x)) * mlp["up_proj"](x)))
            state = outs[-1][:, :-1]
        return outs

    def logits(self, out: Tensor) -> Tensor:
        return self.lm_head(self.norm(out))

    def _turns(self, first: int, num: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [num, 1, head_dim / 2] of RoPE for positions from `first` on."""
        rates = self._theta ** (-torch.arange(0, self._head_dim, 2) / self._head_dim)
        angles = torch.arange(first, first + num)[:, None, None] * rates
        return angles.cos(), angles.sin()


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _attention(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Of queries [B, heads, N, d], to `keys[0]` up to their own place and to those of their own chain in the others."""
    num_heads, num = q.shape[1:3]
    k, v = ([x.repeat_interleave(num_heads // x.shape[1], dim=1) for x in xs] for xs in (keys, values))
    is_later = torch.ones(num, num, dtype=torch.bool).triu(1)
    scores = (q @ k[0].mT).masked_fill(is_later, -torch.inf)
    own = [(q * key).sum(-1, keepdim=True) for key in k[1:]]
    weights = (torch.cat((scores, *own), dim=-1).float() * q.shape[-1] ** -0.5).softmax(-1).to(v[0].dtype)
    mixed = weights[..., :num] @ v[0]
    for step, value in enumerate(v[1:]):
        mixed = mixed + weights[..., num + step, None] * value
    return mixed
