"""What clients see of a healthy cluster. All files of this folder share two clusters, so no test here kills or stops
one of their processes: test_migration.py and test_cli.py do that."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from clusters import RunningCluster, run_cluster
from collector import Collector, running_collector
from openai_cases import TEMPLATE, client_of

THINKING = "{{ {true: '<think>\n', false: '<think>\n\n</think>\n\n'}[enable_thinking] if enable_thinking is defined }}"
FLAGS = ("--num-threads", "1", "--max-model-len", "2048", "--http-port", "0", "--reasoning-parser", "deepseek_r1")
LITTLE_ROOM = ("--num-kv-blocks", "145", "--max-queue-tokens", "1600")
"""Room for one prompt of the maximum length and little more: further requests are refused (test_bench.py)."""


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    """Collects the traces of `cluster`, which arrive within a tenth of a second."""
    with running_collector() as collector:
        yield collector


@pytest.fixture(scope="package")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, few_layers: Path, collector: Collector
) -> Iterator[RunningCluster]:
    """For tests of grammars, counts and errors, and for tests that compare two answers, whatever the tokens are. Two
    otherwise unused tokens become <think> and </think>, as in models that think."""
    folder = tmp_path_factory.mktemp("few-layers-cluster")
    model = folder / few_layers.name
    shutil.copytree(few_layers, model, copy_function=os.link)
    tokenizer = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").unlink()
    tokenizer = tokenizer.replace("<repo_name>", "<think>").replace("<file_sep>", "</think>")
    (model / "tokenizer.json").write_text(tokenizer)
    (folder / "template").write_text(TEMPLATE.read_text().rstrip("\n") + THINKING)
    flags = (*LITTLE_ROOM, "--chat-template", str(folder / "template"), "--metrics-port", "0")
    traced = ("--otlp-traces-endpoint", collector.endpoint)
    env = {"OTEL_BSP_SCHEDULE_DELAY": "100", "CUDA_VISIBLE_DEVICES": "5,3"}  # GPUs for test_worker_gpus.py; none here
    with run_cluster(folder / "log", "--model", str(model), *FLAGS, *flags, *traced, env=env) as running:
        yield running


@pytest.fixture(scope="package")
def real_cluster(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[RunningCluster]:
    """The default model, for tests of known answers and of answers that take a while. Without tools it uses its own
    template. A file that wants this cluster redefines `cluster`."""
    folder = tmp_path_factory.mktemp("real-cluster")
    own = (model_folder / "chat_template.jinja").read_text()
    (folder / "template").write_text(f"{{% if tools %}}{TEMPLATE.read_text()}{{% else %}}{own}{{% endif %}}{THINKING}")
    flags = ("--kv-cache-gib", "0.2", "--chat-template", str(folder / "template"))
    with run_cluster(folder / "log", *FLAGS, *flags) as running:
        yield running


@pytest.fixture
def client(cluster: RunningCluster) -> Iterator[openai.OpenAI]:
    with client_of(cluster) as client:
        yield client


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id
