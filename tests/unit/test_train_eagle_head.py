"""benchmarks/train_eagle_head.py: a head computes in training what drafting computes, and what was trained is kept."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy, rms_norm, silu

from benchmarks.eagle_head import NUM_STEPS, EagleHead, SoftCrossEntropy, draft_vocabulary, head_config, rate_at
from benchmarks.made_texts import Text, code_task, kept_texts
from benchmarks.train_eagle_head import batches, main
from tests.unit.llama_folders import folder_with, write_weights

CONFIG = {
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "vocab_size": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "draft_vocab_size": 20,
}  # fmt: skip


class Drafter:
    """The layer as an engine computes it: one pair after the other, with the keys and values of the earlier ones."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def read(self, embedded: Tensor, state: Tensor) -> Tensor:
        w = {name.removeprefix("midlayer."): weight for name, weight in self.weights.items()}

        def normed(x: Tensor, name: str) -> Tensor:
            return rms_norm(x, (16,), w[f"{name}.weight"], 1e-5)

        pair = torch.cat((normed(embedded, "input_layernorm"), normed(state, "hidden_norm")))
        q, k, v = ((w[f"self_attn.{name}_proj.weight"] @ pair).view(-1, 4) for name in "qkv")
        position = len(self.keys)
        self.keys.append(self._turned(k, position))
        self.values.append(v)
        mixed = []
        for head, query in enumerate(self._turned(q, position)):
            scores = torch.stack([key[head // 2] @ query / 2 for key in self.keys])
            mixed.append(scores.softmax(0) @ torch.stack([value[head // 2] for value in self.values]))
        state = state + w["self_attn.o_proj.weight"] @ torch.cat(mixed)
        x = normed(state, "post_attention_layernorm")
        inner = silu(w["mlp.gate_proj.weight"] @ x) * (w["mlp.up_proj.weight"] @ x)
        return state + w["mlp.down_proj.weight"] @ inner

    @staticmethod
    def _turned(x: Tensor, position: int) -> Tensor:
        turn = torch.polar(torch.ones(2), position * 10000.0 ** -torch.tensor([0.0, 0.5]))
        turned = torch.complex(x[:, :2], x[:, 2:]) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.fixture
def head() -> EagleHead:
    torch.manual_seed(0)
    head = EagleHead(CONFIG)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    head.feature_scales.uniform_(0.5, 2)
    return head


@torch.no_grad()
def test_steps_of_training_are_those_of_drafting(head: EagleHead) -> None:
    embedded, features = torch.randn(7, 16), torch.randn(7, 48)
    found = head(embedded[None], features[None])
    weights = head.weights()
    for first in range(7):
        drafter = Drafter(weights)
        for pair in range(first + 1):
            state = drafter.read(embedded[pair], weights["fc.weight"] @ features[pair])
        for step in range(min(NUM_STEPS, 7 - first)):
            if step > 0:
                state = drafter.read(embedded[first + step], state)
            torch.testing.assert_close(found[step][0, first], state, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_padding_behind_a_text_changes_nothing(head: EagleHead) -> None:
    embedded, features = torch.randn(1, 9, 16), torch.randn(1, 9, 48)
    for padded, alone in zip(head(embedded, features), head(embedded[:, :6], features[:, :6]), strict=True):
        torch.testing.assert_close(padded[:, : alone.shape[1]], alone, rtol=1e-4, atol=1e-5)


def test_the_loss_is_the_cross_entropy() -> None:
    logits, expected = torch.randn(5, 7, requires_grad=True), torch.randn(5, 7).softmax(-1)
    found, known = SoftCrossEntropy.apply(logits, expected), cross_entropy(logits, expected)
    torch.testing.assert_close(found, known)
    torch.testing.assert_close(
        torch.autograd.grad(2 * found, logits), torch.autograd.grad(2 * known, logits), rtol=1e-4, atol=1e-6
    )


def test_the_most_frequent_tokens_can_be_drafted() -> None:
    assert draft_vocabulary(Counter([9, 9, 9, 4, 4, 7, 3]), 3) == [3, 4, 9]
    assert draft_vocabulary(Counter([5, 1]), 8192) == [1, 5]


def test_the_rate_rises_and_falls_to_nothing() -> None:
    assert rate_at(0) < 0.05
    assert rate_at(0.04) > 0.9
    assert rate_at(0.5) == pytest.approx(0.5)
    assert rate_at(1) == rate_at(1.01) == pytest.approx(0)


def test_batches_have_all_texts_and_few_tokens() -> None:
    lengths = [5, 100, 30, 31, 32, 7, 8, 50, 49, 3]
    found = batches(lengths, 64, random.Random(0))
    assert sorted(i for batch in found for i in batch) == list(range(10))
    assert all(len(batch) * max(lengths[i] for i in batch) <= 64 for batch in found if len(batch) > 1)
    assert len(found) < 9


def test_code_tasks_name_what_is_in_the_code() -> None:
    tasks = [code_task(random.Random(seed)) for seed in range(30)]
    assert len(set(tasks)) == 30
    renaming = next(task for task in tasks if "renamed" in task)
    assert renaming.split("`")[1] in renaming.partition("\n\n")[2]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [({"intermediate_size": None}, "has no intermediate_size"), ({"num_hidden_layers": 4}, "at least 5 layers, has 4")],
)
def test_a_model_of_another_form_has_no_head(changes: dict[str, Any], sentence: str) -> None:
    target = SimpleNamespace(**CONFIG | {"max_position_embeddings": 64, "num_hidden_layers": 6} | changes)
    with pytest.raises(ValueError, match=sentence):
        head_config(target)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return folder_with(tmp_path / "model", num_hidden_layers=6, model_type="llama", tie_word_embeddings=False)


@pytest.mark.parametrize(
    ("flag", "path", "content"),
    [
        ("--output", "a file/head", ""),
        ("--check-file", "nowhere/check", ""),
        ("--texts", "a file", "no JSON"),
        ("--texts", "a file", '{"token_ids": []}'),
        ("--texts", "a file", ""),
    ],
)
def test_flags_that_cannot_be_used_are_named(model: Path, tmp_path: Path, flag: str, path: str, content: str) -> None:
    (tmp_path / "a file").write_text(content)
    result = CliRunner().invoke(main, ["--model", str(model), "--output", str(tmp_path), flag, str(tmp_path / path)])
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(f"Error: {flag}: ")


def test_a_head_is_trained_and_kept(model: Path, tmp_path: Path) -> None:
    write_weights(model, num_layers=6)
    rng = random.Random(0)
    texts = tmp_path / "texts.jsonl"
    made = [Text([rng.randrange(3, 40) for _ in range(20)], 5) for _ in range(16)]
    texts.write_text("".join(json.dumps(vars(text)) + "\n" for text in made))
    assert kept_texts(texts) == made
    output, check = tmp_path / "head", tmp_path / "check.safetensors"
    flags = ["--model", model, "--output", output, "--texts", texts, "--check-file", check]
    flags += ["--minutes", 0.02, "--draft-vocab-size", 16]
    result = CliRunner().invoke(main, [str(flag) for flag in flags])
    assert result.exit_code == 0, result.output
    assert "16 draft tokens; right in held-out texts at steps 0 to 2: " in result.output

    config, kept = json.loads((output / "config.json").read_text()), load_file(output / "model.safetensors")
    assert (config["architectures"], config["draft_vocab_size"]) == (["LlamaForCausalLMEagle3"], 16)
    shapes = {name: list(tensor.shape) for name, tensor in kept.items()}
    assert shapes["fc.weight"] == [16, 48]
    assert shapes["midlayer.self_attn.k_proj.weight"] == [8, 32]
    assert shapes["lm_head.weight"] == [16, 16]
    target_ids = kept["t2d"].nonzero()[:, 0]
    assert torch.equal(torch.arange(16) + kept["d2t"], target_ids)
    checked = load_file(check)
    assert checked["token_ids"].tolist() == made[-2].token_ids, "the first that is held out"
    embeddings = load_file(model / "model.safetensors")["model.embed_tokens.weight"].bfloat16().float()
    drafter = Drafter({name: tensor.float() for name, tensor in kept.items()})
    for i, expected in enumerate(checked["logits"]):
        features = checked["features"][i].float()
        out = drafter.read(embeddings[checked["token_ids"][i + 1]], kept["fc.weight"].float() @ features)
        found = kept["lm_head.weight"].float() @ rms_norm(out, (16,), kept["norm.weight"].float(), 1e-6)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
