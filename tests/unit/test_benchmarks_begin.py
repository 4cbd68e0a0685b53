"""The programs of benchmarks/ start: the modules and files that they need exist, and so do the servers that they ask
for. What they cannot do they say in a sentence."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import prefix_hits, serve, speculation, transfer
from tandem.bench.traces import Record


def test_a_program_may_be_run_as_a_file() -> None:
    """Python then searches the program's folder for modules first, and that folder has an engine.py."""
    done = subprocess.run([sys.executable, transfer.__file__, "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_to_be_written_again_is_there_to_be_read() -> None:
    def chat(chats: list[Any], *_: object, **__: object) -> list[Any]:
        return [SimpleNamespace(prompt_token_ids=chat[0]["content"]) for chat in chats]

    prompts = speculation.prompts(SimpleNamespace(chat=chat))  # type: ignore[arg-type]
    ((edited,), (summed_up,)) = prompts["code edited"], prompts["text summed up"]
    assert "class StepPace" in edited
    assert "Tandem" in summed_up


def test_prompts_that_come_again_are_found_in_the_memory_that_has_room() -> None:
    """Ten prompts of four blocks that begin alike, each sent twice. The last block of a prompt is never reused."""
    records = [Record(0.0, 2048, 1, (0, 10 * number + 1, 10 * number + 2, 10 * number + 3)) for number in range(10)] * 2
    first_blocks = (20 - 1) / 80
    others = 10 * 2 / 80
    assert prefix_hits.hits(records, 100, 0) == (first_blocks + others, 0)
    assert prefix_hits.hits(records, 16, 0) == (first_blocks, 0)
    assert prefix_hits.hits(records, 16, 100) == (first_blocks + others, others)
    assert prefix_hits.hits(records, 3, 100) == (0, 0), "none fits"


@pytest.mark.parametrize("name", ["1p1d", "1p1d-ipc", "2d", "vllm", "llama"])
def test_servers_have_names(name: str) -> None:
    assert callable(serve.target_of(name))


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("families --shapes gpt", "--shapes: no such model gpt; there are gemma3-270m, qwen3.5-0.8b"),
        ("serve --rates 1,x", "'--rates': must be numbers with commas between them, is '1,x'"),
        ("serve --rates 2,0", "'--rates': must be more than 0, is '2,0'"),
        ("serve --rates nan", "'--rates': must be more than 0, is 'nan'"),
        ("serve --requests 0", "'--requests': 0 is not in the range x>=1."),
        ("serve --output-tokens -5", "'--output-tokens': -5 is not in the range x>=1."),
        ("serve --rounds 0", "'--rounds': 0 is not in the range x>=1."),
        ("serve --seed -1", "'--seed': -1 is not in the range x>=0."),
        ("serve --goodput fast", "--goodput: 'fast' is not an objective: ttft:MS"),
        ("serve --trace /nowhere", "--trace: [Errno 2] No such file or directory: '/nowhere'"),
        ("serve --arrangements 1p1d,0d", "0d: --decode must be in [1, 64], is 0"),
        ("serve --against vllm", "--against: nowhere/vllm/bin/vllm is not there: install the peer, or set PEERS_DIR"),
        (
            "serve --against vllms",
            "no such server: 'vllms'; there are vllm and llama, and 1p1d, 1p1d-ipc, 2d …",
        ),
        ("engine --model /nowhere", "model '/nowhere' is neither a folder, a .gguf file, a hub id"),
        ("engine --dtype int3", "--dtype must be one of auto, float32,"),
        ("engine --batch-sizes 1,1.5", "'--batch-sizes': must be numbers with commas between them, is '1,1.5'"),
        ("engine --prompt-tokens 0", "'--prompt-tokens': must be more than 0, is '0'"),
        ("engine --num-prompts -1", "'--num-prompts': -1 is not in the range x>=1."),
        ("engine --against vllm", "--against vllm: nowhere/vllm/bin/python is not there"),
        ("offloading --model /nowhere", "model '/nowhere' is neither"),
        (
            "offloading --prompt-tokens 9000",
            "must be at most the model's max_position_embeddings=8192, is 9025",
        ),
        ("prefix_hits --trace /nowhere", "--trace: [Errno 2] No such file or directory: '/nowhere'"),
        ("adapters --model /nowhere", "model '/nowhere' is neither"),
        ("adapters --rank 0", "'--rank': 0 is not in the range x>=1."),
        ("speculation --model /nowhere", "model '/nowhere' is neither"),
        ("transfer --max-mib 0", "'--max-mib': 0 is not in the range x>=1."),
        ("overload --seconds nan", "'--seconds': nan is not a number"),
        ("overload --factor 0", "'--factor': 0.0 is not in the range x>0"),
        ("overload --decode 99", "--decode must be in [1, 64], is 99"),
        ("overload --prompt-tokens 5000", "--prompt-tokens and --output-tokens must be at most 4096 together"),
        ("train_eagle_head --output x --model /nowhere", "--model: model '/nowhere' is neither"),
        ("train_eagle_head --output x --minutes 0", "'--minutes': 0.0 is not in the range x>0"),
        ("train_eagle_head", "Missing option '--output'"),
        ("gpu --only x", "--only: no part is called x"),
        ("gpu --tiny --results-dir /proc/x", "--results-dir: [Errno 2] No such file or directory: '/proc/x'"),
    ],
)
def test_wrong_usage_is_one_sentence(command: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERS_DIR", "nowhere")
    name, *flags = command.split()
    result = CliRunner().invoke(importlib.import_module(f"benchmarks.{name}").main, flags)
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr.splitlines()[-1]
