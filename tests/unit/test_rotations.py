"""Rotations of transformers' code that our kernels do instead: which, and that nothing else is taken for one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_bench import SMALL, Bench, engine_config, logits_of_backends, random_tokens, reference, save_model
from test_transformers_models import CONFIGS
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.models.rotation_probe import WatchedRotations
from engine.models.rotations import cos_sin_of
from engine.models.scores import ROTATIONS, Rotation
from engine.models.transformers_attention import PagedStep
from engine.models.transformers_config import TransformersConfig

pytestmark = pytest.mark.usefixtures("one_thread")

HALVES, SHORT, NEIGHBOURS, NEIGHBOURS_TWICE = ROTATIONS
FURTHER: dict[str, Any] = {
    "ernie4-5": lambda: transformers.Ernie4_5Config(**SMALL, head_dim=16),
    "wide-cohere2": lambda: transformers.Cohere2Config(
        **SMALL | {"hidden_size": 96}, logit_scale=0.25, sliding_window=8, pad_token_id=0
    ),
    "glm4": lambda: transformers.Glm4Config(**SMALL, head_dim=16, partial_rotary_factor=0.5, pad_token_id=0),
    "helium": lambda: transformers.HeliumConfig(**SMALL, head_dim=8, pad_token_id=0),
    "smollm3": lambda: transformers.SmolLM3Config(**SMALL, no_rope_layers=[1, 0, 1], pad_token_id=0),
}  # fmt: skip
EXPECTED: dict[str, list[Rotation | None]] = {
    "cohere2": [NEIGHBOURS] * 3, "gemma3": [HALVES] * 3, "gemma4": [None] * 5, "glm4-moe": [HALVES] * 3,
    "gpt-oss": [SHORT] * 3, "gpt2": [None] * 3, "phi": [None] * 3,
    "ernie4-5": [NEIGHBOURS_TWICE] * 3, "glm4": [NEIGHBOURS_TWICE] * 3, "helium": [NEIGHBOURS_TWICE] * 3,
    "smollm3": [HALVES, None, HALVES],
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_which_rotations_families_have(name: str) -> None:
    config = (CONFIGS | FURTHER)[name]()
    names = {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]}
    model = TransformersConfig.from_hf(config.to_dict() | names)
    assert [module.rotation for module in model.attention] == EXPECTED[name]


@pytest.mark.parametrize("name", FURTHER)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = save_model(FURTHER[name](), tmp_path)
    bench = Bench(engine_config(tmp_path, model_impl="transformers"))
    early, late = bench.sequence(random_tokens(13, seed=1)), bench.sequence(random_tokens(29, seed=2))
    bench.logits((early, 12), (late, 20))
    logits = bench.logits((early, 1), (late, 9))
    assert logits is not None
    torch.testing.assert_close(
        logits, torch.stack([reference(model, seq.token_ids) for seq in (early, late)]), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", ["cohere2", "glm4", "gpt-oss"])
def test_their_own_function_is_not_called(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And stays as it is for others in the process."""
    config = (CONFIGS | FURTHER)[name]()
    save_model(config, tmp_path)
    bench = Bench(engine_config(tmp_path, model_impl="transformers"))
    module = getattr(transformers.models, config.model_type)
    code = getattr(module, f"modeling_{config.model_type}")
    calls: list[int] = []
    theirs = code.apply_rotary_pos_emb
    monkeypatch.setattr(code, "apply_rotary_pos_emb", lambda *args, **named: calls.append(1) or theirs(*args, **named))
    bench.logits((bench.sequence(random_tokens(13, seed=1)), 13))
    assert not calls
    kind = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    getattr(transformers, kind)(config)(input_ids=torch.tensor([[1, 2, 3]]))
    assert len(calls) == config.num_hidden_layers


@pytest.mark.parametrize("name", ["ernie4-5", "glm4", "wide-cohere2"])
def test_with_the_cpu_kernels(name: str, tmp_path: Path) -> None:
    save_model((CONFIGS | FURTHER)[name](), tmp_path)
    ours, plain, exact = logits_of_backends(tmp_path, model_impl="transformers")
    assert (ours - exact).norm() < 2 * (plain - exact).norm()
    assert (ours - exact).norm() < 0.1 * exact.norm()


# -- what else a module may do --------------------------------------------------------------------------------------


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


usual = apply_rotary_pos_emb


class Attending(nn.Module):
    """q, k, cos, sin -> what it attends with."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k


class Scaled(Attending):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q * 1.0, k


class UsedElsewhere(Attending):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        self.gate = torch.sigmoid(input=q)
        return q, k


class ViewedByAnAttribute(Attending):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        self.turned = q.mT * 2
        return q, k


class WhoseInputsChange(Attending):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        rotated = apply_rotary_pos_emb(q, k, cos, sin)
        k.mul_(2)
        return rotated


class InAnotherDirection(Attending):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return apply_rotary_pos_emb(q, k, cos, sin, is_backwards=True)  # type: ignore[call-arg]


class WithCellsAndDefaults(Attending):
    """Whose `forward` refers to its class, and has defaults of all kinds."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: int, is_real: bool = True
    ) -> Any:
        assert not super().extra_repr()
        assert is_real
        return apply_rotary_pos_emb(q, k, cos, sin)


class WithForwardOfItsOwn(Attending):
    """Which may not be that of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.of_neighbours

    def of_neighbours(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return q * cos, k * sin


class Twice(Attending):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        self.other = apply_rotary_pos_emb(q, k, cos, sin)
        return apply_rotary_pos_emb(q, k, cos, sin)


class AlongAnotherDim(Attending):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return apply_rotary_pos_emb(q, k, cos[:, :1], sin[:, :1], unsqueeze_dim=2)


class Swapped(Attending):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return k, q


class ByFinerTables(Attending):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return apply_rotary_pos_emb(q, k, cos.double(), sin.double())


class BySinesOfAnotherDtype(Attending):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return apply_rotary_pos_emb(q, k, cos, sin.bfloat16())


class ByOneRowOfSines(Attending):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return apply_rotary_pos_emb(q, k, cos, sin[:, :1])


class ByOneRow(Attending):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return apply_rotary_pos_emb(q, k, cos[:, :1], sin[:, :1])


class WithoutNames(Attending):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return apply_rotary_pos_emb(q, k, cos[:, :1], sin[:, :1], 2)


class ByNames(Attending):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return apply_rotary_pos_emb(q, k, cos=sin, sin=cos)


class OfOneQuery(Attending):
    """Which is rotated to all positions."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return apply_rotary_pos_emb(q[:, :, :1], k, cos, sin)


class OfOneKey(Attending):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return apply_rotary_pos_emb(q, k[:, :, :1], cos, sin)


class ByCoarserHeads(Attending):
    """Whose tables are in float32, which our kernels read, too."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return apply_rotary_pos_emb(q.bfloat16(), k.bfloat16(), cos, sin)


class ByTablesOfSequences(Attending):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return apply_rotary_pos_emb(q, k, cos.repeat(2, 1, 1), sin.repeat(2, 1, 1))


def in_another_direction(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return usual(q, k, cos, -sin)


def queries_only(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return usual(q, k, cos, sin)[0], k.clone()


def scaled(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q, k = usual(q, k, cos, sin)
    return q * 1.01, k


def either(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, is_backwards: bool = False
) -> tuple[torch.Tensor, ...]:
    return usual(q, k, cos, -sin if is_backwards else sin)


def failing(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if q.device.type == "cpu":
        raise RuntimeError("not without a GPU")
    return usual(q, k, cos, sin)


def watched(module: nn.Module) -> Rotation | None:
    model = nn.ModuleDict({"attention": module})
    rotations = WatchedRotations(model)
    table = torch.ones(1, 5, 8, device="meta")
    with rotations:
        heads = (torch.empty(1, n, 5, 8, device="meta") for n in (4, 2))
        q, k = model["attention"](*heads, table, table.clone())
        rotations.attends("attention", q, k)
    return rotations.of("attention")


@pytest.mark.parametrize(
    "kind",
    [
        Scaled,
        UsedElsewhere,
        ViewedByAnAttribute,
        WhoseInputsChange,
        Twice,
        AlongAnotherDim,
        Swapped,
        ByFinerTables,
        BySinesOfAnotherDtype,
        ByOneRowOfSines,
        ByOneRow,
        WithoutNames,
        ByNames,
        OfOneQuery,
        OfOneKey,
        ByTablesOfSequences,
    ],
)
def test_only_what_goes_straight_to_attention_is_rotated_later(kind: type[nn.Module]) -> None:
    assert watched(Attending()) == HALVES
    assert watched(kind()) is None


@pytest.mark.parametrize("function", [in_another_direction, queries_only, scaled, failing])
def test_only_what_computes_the_same_is_rotated_later(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(Attending.forward.__globals__, "apply_rotary_pos_emb", function)
    assert watched(Attending()) is None


@pytest.mark.parametrize("kind", [WithCellsAndDefaults, ByCoarserHeads])
def test_what_else_goes_straight_to_attention(kind: type[nn.Module]) -> None:
    assert watched(kind()) == HALVES


def test_a_module_with_another_forward_than_its_class_keeps_it() -> None:
    module = WithForwardOfItsOwn()
    assert watched(module) is None
    assert module.forward == module.of_neighbours


def test_a_function_that_returns_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutTheRest(Attending):
        def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
            return apply_rotary_pos_emb(q, k, cos, sin)[:2]

    names = Attending.forward.__globals__
    assert watched(WithoutTheRest()) == HALVES
    monkeypatch.setitem(names, "apply_rotary_pos_emb", lambda q, k, cos, sin: (*usual(q, k, cos, sin), cos))
    assert watched(WithoutTheRest()) is None


def test_a_function_is_judged_by_the_arguments_it_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Attending.forward.__globals__, "apply_rotary_pos_emb", either)
    assert watched(Attending()) == HALVES
    assert watched(InAnotherDirection()) is None


@pytest.mark.parametrize("shared", [0, 1])
def test_what_another_module_attends_with_too_is_not_rotated_later(shared: int) -> None:
    model = nn.ModuleDict({"first": Attending(), "second": Attending()})
    rotations, table = WatchedRotations(model), torch.ones(1, 5, 8, device="meta")
    with rotations:
        heads = [torch.empty(1, n, 5, 8, device="meta") for n in (4, 2)]
        first = model["first"](*heads, table, table.clone())
        second = list(model["second"](*heads, table, table.clone()))
        second[shared] = first[shared]
        rotations.attends("first", *first)
        rotations.attends("second", *second)
    assert [rotations.of(name) for name in model] == [None, None]


def test_queries_and_keys_that_are_not_those_that_were_to_be_rotated() -> None:
    step, (q, k, cos, sin) = PagedStep(), (torch.ones(1, 1, 1, 8) for _ in range(4))
    for wrong in ((k, k), (q, q)):
        step.rotate_later(q, k, cos[0], sin[0])
        with pytest.raises(AssertionError, match="another way"):
            step.tables_for(HALVES, *wrong)
    assert step.tables_for(HALVES, q, k)[1] == 8
    with pytest.raises(ValueError, match="values to unpack"):
        step.tables_for(HALVES, q, k)


def test_tables_are_made_once_in_a_step_for_each_that_the_code_has() -> None:
    step, (q, k) = PagedStep(), (torch.ones(1, 1, 3, 8) for _ in range(2))
    cos, sin, other_cos, other_sin = torch.randn(4, 1, 3, 8, generator=torch.Generator().manual_seed(1)).unbind()
    found = []
    for tables in ((cos, sin), (cos, other_sin), (other_cos, sin), (cos, sin)):
        step.rotate_later(q, k, *tables)
        found.append(step.tables_for(HALVES, q, k)[0])
    for (ours, signed), theirs in zip(found, ((cos, sin), (cos, other_sin), (other_cos, sin)), strict=False):
        assert torch.equal(ours[:, 0], theirs[0][0])
        assert torch.equal(signed[:, 0, 4:], theirs[1][0, :, 4:])
    assert found[3] is found[0]
    step.end()
    assert not step.cos_sin, "the tables of all steps would be kept"


def test_tables_are_kept_until_the_step_ends() -> None:
    """Each layer may have its own: in the place of one that is gone there could be another."""
    step, (q, k, cos, sin) = PagedStep(), (torch.ones(1, 1, 3, 8) for _ in range(4))
    tables = [cos[0], sin[0]]
    kept = [weakref.ref(table) for table in tables]
    step.rotate_later(q, k, *tables)
    step.tables_for(HALVES, q, k)
    tables.clear()
    assert all(table() is not None for table in kept)
    step.end()
    assert all(table() is None for table in kept)


def test_tables_lie_in_one_piece_as_our_kernels_read_them() -> None:
    table = torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(1))
    for rotation in ROTATIONS:
        ours = cos_sin_of(rotation, table[..., ::2], table[..., 1::2])
        assert all(each.is_contiguous() for each in ours)
        copied = cos_sin_of(rotation, table[..., ::2].contiguous(), table[..., 1::2].contiguous())
        assert all(map(torch.equal, ours, copied))
