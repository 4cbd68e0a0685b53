"""The adapters that a soak exchanges: which files have which name, and whose files may have answered a request."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from lora_folders import write_adapter

from tandem.chaos import exchanged
from tandem.chaos.asked import Asked
from tandem.chaos.exchanged import KNOWN_S, ExchangedAdapters, adapters_in


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    for name in "abc":
        write_adapter(tmp_path / "adapters" / name)
    return tmp_path / "adapters"


def test_each_name_in_turn_gets_the_next_one_s_files(adapters: Path, tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    folder = ExchangedAdapters(adapters_in(adapters), str(links))

    def there() -> str:
        return "".join(link.resolve().name for link in sorted(links.iterdir()))

    seen = [there()]
    for _ in range(4):
        folder.exchange()
        seen.append(there())
    assert seen == ["abc", "bbc", "bcc", "bca", "cca"]
    assert folder.exchange_all() == {"a": "b", "b": "c", "c": "a"}
    assert there() == "bca"


def test_whose_files_may_have_answered(adapters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(exchanged.time, "monotonic", lambda: now_s)
    folder = ExchangedAdapters(adapters_in(adapters), str(tmp_path))
    for at_s in (100.0, 200.0, 210.0, 220.0):  # a gets b's files, then b and c are exchanged, then a gets c's
        now_s = at_s
        folder.exchange()

    def those_of(name: str, began_s: float, ended_s: float) -> list[str]:
        return folder.those_of(Asked(0, [5], {}, model=name, began_s=began_s, ended_s=ended_s))

    assert those_of("a", 90.0, 95.0) == ["a"]
    assert those_of("a", 90.0, 105.0) == ["b", "a"], "the later first"
    assert those_of("a", 100.0 + KNOWN_S - 1, 150.0) == ["b", "a"]
    assert those_of("a", 100.0 + KNOWN_S + 1, 150.0) == ["b"]
    assert those_of("a", 225.0, 226.0) == ["c", "b"]
    assert those_of("b", 150.0, 150.0) == ["b"]
    assert those_of("", 1.0, time.monotonic()) == [""]


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ([], "must hold two adapters or more, to be exchanged; .* holds 0"),
        (["a"], "holds 1"),
        (["a", "b/c"], "adapter 'b': .* is not an adapter's folder"),
    ],
)
def test_a_folder_without_two_adapters(names: list[str], why: str, tmp_path: Path) -> None:
    (tmp_path / ".hidden").mkdir()
    for name in names:
        write_adapter(tmp_path / name)
    with pytest.raises(ValueError, match=why):
        adapters_in(tmp_path)
    with pytest.raises(ValueError, match="--lora-dir: there is no folder"):
        adapters_in(tmp_path / "nobody")
