"""Adapters are added to an engine, exchanged and removed between steps, while other requests run."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from handover import alone, handed_over
from lora_folders import PRODUCTS, write_adapter, write_model

from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.lora.modules import WEIGHTS_FILE
from engine.lora.table import AdapterGone, NoRoomForAdapter
from engine.model_loader import create_engine_config, model_config
from engine.sampling_params import SamplingParams

PROMPT = [(11 * i) % 290 + 5 for i in range(40)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
NAMES = ("a", "b", "some")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"dtype": "float32", "attention_backend": "torch"},
    "kernels": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "transformers": {"dtype": "bfloat16", "model_impl": "transformers"},
    "ranks": {"dtype": "bfloat16", "tensor_parallel_size": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loras")
    write_model(folder / "model")
    write_adapter(folder / "a", rank=4, seed=1)
    write_adapter(folder / "b", rank=3, seed=2)
    some = {name: PRODUCTS[name] for name in ("self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")}
    write_adapter(folder / "some", rank=16, seed=3, products=some)
    write_adapter(folder / "large", rank=17, seed=4)
    return folder


def engine_of(folder: Path, kind: str, names: tuple[str, ...] = (), **settings: Any) -> LLMEngine:
    adapters = ",".join(f"{name}={folder / name}" for name in names)
    args = EngineArgs(
        model=str(folder / "model"), load_format="dummy", device="cpu", num_threads=1, num_kv_blocks=60,
        lora_modules=adapters, **KINDS[kind] | settings,
    )  # fmt: skip
    return LLMEngine(create_engine_config(args))


def add(engine: LLMEngine, folder: Path, name: str, source: str = "") -> None:
    module = engine.find_lora(name, folder / (source or name))
    engine.add_lora(module, engine.read_lora(module))


def free_all(engine: LLMEngine) -> list[int]:
    return engine.free_loras(engine.loras.leaving)


# test_loras_on_ranks.py covers ranks, too.
@pytest.fixture(scope="module", params=[*list(KINDS)[:-1], pytest.param("ranks", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param != "plain":
        probe = create_engine_config(EngineArgs(model=str(request.getfixturevalue("folder") / "model"),
            load_format="dummy", device="cpu", dtype="bfloat16"))  # fmt: skip
        if probe.device.attention_backend != "cpu":
            pytest.skip("no C++ compiler: there are no CPU kernels")
    return str(request.param)


@pytest.fixture(scope="module")
def expected(folder: Path, kind: str) -> dict[str, list[int]]:
    """The answers of an engine that has the adapters from the start."""
    with closing(engine_of(folder, kind, NAMES)) as engine:
        answers = {name: alone(engine, PROMPT, GREEDY, lora_name=name) for name in ("", *NAMES)}
    assert len({tuple(tokens) for tokens in answers.values()}) == len(answers)
    return answers


def test_they_answer_as_if_they_had_been_there(folder: Path, kind: str, expected: dict[str, list[int]]) -> None:
    """Another adapter stays. Adapter numbers are reused, and nothing of a number's previous adapter is left."""
    with closing(engine_of(folder, kind, ("a",), max_loras=1)) as engine:
        for name in ("b", "some", "b"):
            add(engine, folder, name)
            assert [module.name for module in engine.loras.served] == sorted(("a", name))
            for asked in ("", "a", name):
                assert alone(engine, PROMPT, GREEDY, lora_name=asked) == expected[asked], (name, asked)
            with pytest.raises(NoRoomForAdapter, match="adapter 'large': max_loras=1 are loaded"):
                engine.loras.check_may_add("large")
            engine.remove_lora(name)
            assert free_all(engine) == []
            with pytest.raises(ValueError, match=rf"lora_name must be a loaded adapter \(a\), is '{name}'"):
                engine.add_request("r", PROMPT, GREEDY, lora_name=name)


def test_one_that_is_exchanged_beside_its_requests(folder: Path, kind: str, expected: dict[str, list[int]]) -> None:
    """Requests that have begun keep the adapter that they began with, and its place stays taken until they end."""
    answers: dict[str, list[int]] = {"old": [], "new": []}
    with closing(engine_of(folder, kind, max_loras=2)) as engine:
        add(engine, folder, "x", source="a")
        (old,) = engine.loras.served
        engine.add_request("old", PROMPT, GREEDY, lora_name="x")
        while engine.has_unfinished_requests():
            for output in engine.step():
                answers[output.request_id] += output.token_ids
            if len(answers["old"]) == 3 and not answers["new"]:
                add(engine, folder, "x", source="b")
                assert free_all(engine) == [1]
                with pytest.raises(NoRoomForAdapter):
                    add(engine, folder, "some")
                engine.add_request("new", PROMPT, GREEDY, lora_name="x")
        assert answers == {"old": expected["a"], "new": expected["b"]}
        meant = alone(engine, PROMPT, GREEDY, lora_name="x", lora_digest=old.digest)
        assert meant == expected["a"], "who means it by its digest may have it until it is gone"
        assert free_all(engine) == []
        with pytest.raises(AdapterGone, match=r"lora_name 'x' with lora_digest '.*' is not loaded here"):
            engine.add_request("late", PROMPT, GREEDY, lora_name="x", lora_digest=old.digest)
        add(engine, folder, "some")
        assert alone(engine, PROMPT, GREEDY, lora_name="some") == expected["some"]
        assert alone(engine, PROMPT, GREEDY, lora_name="x") == expected["b"]
        _, problems = engine.audit()
        assert not problems


def test_from_one_engine_to_another_that_has_it_by_another_number(
    folder: Path, kind: str, expected: dict[str, list[int]]
) -> None:
    with (
        closing(engine_of(folder, kind, ("a",), max_loras=2)) as prefill,
        closing(engine_of(folder, kind, max_loras=3)) as decode,
    ):
        add(prefill, folder, "b")
        for name in ("some", "b"):
            add(decode, folder, name)
        assert prefill.config.compat_digest == decode.config.compat_digest
        assert handed_over(prefill, decode, PROMPT, GREEDY, lora_name="b") == expected["b"]


@pytest.mark.parametrize(
    ("name", "source", "says"),
    [
        ("large", "large", "adapter 'large': r must be at most max_lora_rank=16, is 17"),
        ("a", "b", "adapter 'a': lora_modules has an adapter of that name, which cannot be replaced"),
    ],
)
def test_what_cannot_be_added(folder: Path, name: str, source: str, says: str) -> None:
    with closing(engine_of(folder, "plain", ("a",), max_loras=1)) as engine:
        with pytest.raises(ValueError, match=says):
            add(engine, folder, name, source)
        assert [module.name for module in engine.loras.served] == ["a"]


def test_one_that_does_not_fit_changes_nothing(folder: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "x", products={"self_attn.q_proj": (64, 32)})
    write_adapter(tmp_path / "y", products={"lm_head": (64, 64)})
    with closing(engine_of(folder, "plain", max_loras=1)) as engine:
        before = alone(engine, PROMPT, GREEDY)
        for name, says in (("x", "does not fit the model"), ("y", "has weights that are not supported")):
            with pytest.raises(ValueError, match=f"adapter '{name}'.* {says}"):
                add(engine, tmp_path, name)
        assert alone(engine, PROMPT, GREEDY) == before
        with pytest.raises(ValueError, match="max_loras is 0: the engine has no room"):
            engine_of(folder, "plain").find_lora("a", folder / "a")


READS = """
import sys, threading
from contextlib import suppress
from pathlib import Path
from test_loras_that_come_and_go import engine_of

folder = Path(sys.argv[1])
weights = folder / "a" / "adapter_model.safetensors"
whole = weights.read_bytes()
engine = engine_of(folder, "plain", max_loras=1)
module = engine.find_lora("a", folder / "a")
is_over = threading.Event()

def write() -> None:
    while not is_over.is_set():
        weights.write_bytes(b"")
        weights.write_bytes(whole)

writer = threading.Thread(target=write)
writer.start()
seen = set()
while len(seen) < 2:  # each way to end: whole, and broken
    try:
        engine.read_lora(engine.find_lora("a", folder / "a"))
        seen.add("read")
    except ValueError:
        seen.add("broken")
for _ in range(300):
    with suppress(ValueError):
        engine.read_lora(engine.find_lora("a", folder / "a"))
is_over.set()
writer.join()
"""


def test_files_that_are_cut_short_while_they_are_read(folder: Path, tmp_path: Path) -> None:
    """Reading must raise an error. If the file were memory-mapped, the process would crash."""
    shutil.copytree(folder, tmp_path / "loras")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    subprocess.run([sys.executable, "-c", READS, tmp_path / "loras"], check=True, timeout=120, env=env)


def test_one_whose_file_is_exchanged_before_it_is_read(folder: Path, tmp_path: Path) -> None:
    """Otherwise blocks computed with other weights would be cached under the adapter's digest."""
    shutil.copytree(folder / "a", tmp_path / "x")
    with closing(engine_of(folder, "plain", max_loras=1)) as engine:
        module = engine.find_lora("x", tmp_path / "x")
        write_adapter(tmp_path / "x", seed=9)
        with pytest.raises(ValueError, match=r"^adapter 'x': .* has changed since it was read$"):
            engine.read_lora(module)
        add(engine, tmp_path, "x")


@pytest.mark.parametrize("at_start", [True, False])
def test_a_dtype_that_nobody_can_read(folder: Path, tmp_path: Path, at_start: bool) -> None:
    write_adapter(tmp_path / "x")
    weights = tmp_path / "x" / WEIGHTS_FILE
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    text = json.dumps({name: {"dtype": "F6_E2M3", "shape": [4, 64], "data_offsets": [0, 192]}}).encode()
    weights.write_bytes(struct.pack("<Q", len(text)) + text + bytes(192))
    (tmp_path / "model").symlink_to(folder / "model")
    at_first, later = (("x",), 0) if at_start else ((), 1)

    def serve() -> None:
        with closing(engine_of(tmp_path, "plain", at_first, max_loras=later)) as engine:
            add(engine, tmp_path, "x")

    with pytest.raises(ValueError, match=r"adapter 'x': .*F6_E2M3"):
        serve()


def test_one_whose_file_is_larger_than_any_of_its_rank(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is not read: reading could block other adapters, and a worker's shutdown, for minutes."""
    read: list[Path] = []
    monkeypatch.setattr(model_config, "digest_by_reading", lambda path: read.append(path) or "")
    write_adapter(tmp_path / "x")
    with (tmp_path / "x" / WEIGHTS_FILE).open("ab") as file:
        file.truncate(1 << 21)
    with (
        closing(engine_of(folder, "plain", max_loras=1)) as engine,
        pytest.raises(ValueError, match=r"adapter 'x': .* has more than \d+ bytes"),
    ):
        add(engine, tmp_path, "x")
    assert not read


@pytest.mark.parametrize("state", ["waits", "is granted blocks", "is held"])
def test_its_place_is_not_given_away_while_a_request_is_there(folder: Path, state: str) -> None:
    with closing(engine_of(folder, "plain", max_loras=1)) as engine:
        add(engine, folder, "a")
        if state == "waits":
            engine.add_request("r", PROMPT, GREEDY, lora_name="a")
        elif state == "is granted blocks":
            assert engine.reserve("r", PROMPT, GREEDY, lora_name="a") is not None
        else:
            engine.add_prefill("r", PROMPT, GREEDY, lora_name="a")
            while engine.has_unfinished_requests():
                engine.step()
        engine.remove_lora("a")
        assert free_all(engine) == [1]
        engine.abort("r")
        assert free_all(engine) == []


def test_one_that_fails_half_way_is_not_served(folder: Path, kind: str, expected: dict[str, list[int]]) -> None:
    """A device may have no memory left for an adapter. Nothing of it is left for the next adapter with its number."""

    class Full:
        def put(self, adapter_id: int, prepared: object) -> None:
            raise MemoryError("no memory")

    with closing(engine_of(folder, kind, max_loras=2)) as engine:
        add(engine, folder, "x", source="a")
        module = engine.find_lora("x", folder / "b")
        adapter = engine.read_lora(module)
        adapter.append((Full(), None))  # type: ignore[attr-defined]
        with pytest.raises(MemoryError):
            engine.add_lora(module, adapter)
        assert alone(engine, PROMPT, GREEDY, lora_name="x") == expected["a"], "the one that it was to replace stays"
        add(engine, folder, "some")
        assert alone(engine, PROMPT, GREEDY, lora_name="some") == expected["some"]
        assert free_all(engine) == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_loras": -1}, r"max_loras must be in \[0, 256\]"),
        ({"max_loras": 257}, r"max_loras must be in \[0, 256\]"),
        ({"max_loras": 1, "max_lora_rank": 0}, r"max_lora_rank must be in \[1, 512\], is 0"),
        ({"max_lora_rank": 513}, r"max_lora_rank must be in \[1, 512\], is 513"),
    ],
)
def test_settings_that_are_out_of_bounds(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EngineArgs(model="m", **settings)
