"""Names and numbers of adapters that come and go while requests use them."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.lora.modules import LoRAModule
from engine.lora.table import AdapterGone, AdapterTable, NoRoomForAdapter


def module(name: str, digest: str) -> LoRAModule:
    return LoRAModule(name=name, path=Path("/"), rank=8, scale=1.0, digest=digest)


def named(modules: tuple[LoRAModule, ...]) -> list[tuple[str, str]]:
    return [(each.name, each.digest) for each in modules]


def test_a_request_gets_the_adapter_of_its_name_or_the_one_whose_digest_it_gives() -> None:
    table = AdapterTable([module("fixed", "f")], 3)
    assert [table.add(module(*each)) for each in (("a", "old"), ("b", "old"), ("a", "new"))] == [2, 3, 4]
    assert table.number_and_digest("", "") == (0, "")
    assert table.number_and_digest("fixed", "") == table.number_and_digest("fixed", "f") == (1, "f")
    assert table.number_and_digest("a", "") == table.number_and_digest("a", "new") == (4, "new")
    assert table.number_and_digest("a", "old") == (2, "old"), "it is leaving"
    assert table.remove("b")
    assert table.number_and_digest("b", "old") == (3, "old"), "the other one with this digest has another name"
    for name, digest in (("", "f"), ("fixed", "old"), ("b", "new"), ("c", "old")):
        with pytest.raises(AdapterGone):
            table.number_and_digest(name, digest)
    with pytest.raises(ValueError, match=r"lora_name must be a loaded adapter \(fixed, a\), is 'b'"):
        table.number_and_digest("b", "")


def test_who_leaves_is_shown_until_its_number_is_free() -> None:
    table = AdapterTable([module("fixed", "f")], 2)
    table.add(module("a", "old"))
    assert (named(table.served), table.leaving_modules) == ([("a", "old"), ("fixed", "f")], ())
    table.add(module("a", "new"))
    assert named(table.served) == [("a", "new"), ("fixed", "f")]
    assert (named(table.leaving_modules), table.leaving) == ([("a", "old")], [2])
    with pytest.raises(NoRoomForAdapter, match="max_loras=2 are loaded, including those being removed"):
        table.add(module("b", "b"))
    assert table.num_free == 0
    table.free(2)
    assert (table.leaving_modules, table.leaving, table.num_free) == ((), [], 1)
    assert table.add(module("b", "b")) == 2
    assert table.remove("a")
    assert not table.remove("a")
    assert (named(table.served), named(table.leaving_modules)) == ([("b", "b"), ("fixed", "f")], [("a", "new")])


def test_those_from_the_start_stay() -> None:
    table = AdapterTable([module("fixed", "f")], 1)
    assert not table.remove("fixed")
    with pytest.raises(ValueError, match="lora_modules has an adapter of that name, which cannot be replaced"):
        table.add(module("fixed", "new"))
    assert (named(table.served), table.leaving, table.num_free) == ([("fixed", "f")], [], 1)
