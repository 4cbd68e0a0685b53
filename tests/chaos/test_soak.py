"""Eight seconds of `tandem chaos`: all kinds of faults at random moments under load."""

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
    """Flags for one adapter that stays, and for a folder of two that are exchanged."""
    config = json.loads((few_layers / "config.json").read_text())
    products = products_of({"head_dim": config["hidden_size"] // config["num_attention_heads"], **config})
    # with all products adapted, all tokens of an answer would be the same
    values = {name: sizes for name, sizes in products.items() if "v_proj" in name}
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
    if report["requests"]["answered"] > 30:  # as many as alone on a slow machine; beside other tests, fewer
        assert report["num_loaded_tokens"] > 0, "pools are so small that KV goes to host memory, and comes back"
    # Whether streams had begun when the router was killed (report["resumed"]) depends on how busy the machine is.
    # test_migration.py covers streams that certainly have.
    assert report["ways"].keys() == {"gRPC", "completions", "chats"}
    assert report["models"].keys() == {"", "a", "b", "c"}
    missed = [report["requests"].get(name, 0) for name in ("cut off with their gateway", "refused: no gateway there")]
    assert sum(missed) > 0, "the gateway was killed, and was missed"
