"""Eight seconds of everything at once: `tandem chaos`."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from lora_folders import products_of, write_adapter


@pytest.fixture
def adapters(few_layers: Path, tmp_path: Path) -> dict[str, str]:
    """Flags: one that stays, and a folder of two that are exchanged."""
    config = json.loads((few_layers / "config.json").read_text())
    products = products_of({"head_dim": config["hidden_size"] // config["num_attention_heads"], **config})
    values = {name: sizes for name, sizes in products.items() if "v_proj" in name}  # with all, each token is the same
    for seed, name in enumerate(("stays/a", "come/b", "come/c")):
        write_adapter(tmp_path / name, seed=seed, products=values)
    return {"--lora-modules": f"a={tmp_path / 'stays' / 'a'}", "--lora-dir": str(tmp_path / "come")}


def test_eight_seconds_of_chaos(few_layers: Path, adapters: dict[str, str]) -> None:
    flags = {"--seconds": "8", "--seed": "19363", "--model": str(few_layers), **adapters}
    command = [sys.executable, "-m", "tandem", "chaos", *chain(*flags.items()), "--json"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr[-6000:]}"
    report = json.loads(result.stdout)
    assert report["passed"]
    assert sum(report["faults"].values()) > 6
    assert report["faults"].keys() >= {"muted", "deafened", "told to leave", "adapters exchanged"}
    assert report["requests"]["answered"] > 10
    assert report["tokens_checked"] > 200
    assert report["num_loaded_tokens"] > 0, "pools are so small that KV goes to host memory, and comes back"
    # Whether streams had begun as the router was killed (report["resumed"]) is up to how busy the machine is. Where
    # they certainly have: test_migration.py.
    assert report["ways"].keys() == {"gRPC", "completions", "chats"}
    assert report["models"].keys() == {"", "a", "b", "c"}
    missed = [report["requests"].get(name, 0) for name in ("cut off with their gateway", "refused: no gateway there")]
    assert sum(missed) > 0, "the gateway was killed, and was missed"
