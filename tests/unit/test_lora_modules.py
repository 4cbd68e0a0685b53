"""Which folders are accepted as adapters, and with which sentence the others are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_folders import write_adapter, write_model

from engine.attention import create_attention_backend
from engine.engine_args import EngineArgs
from engine.layers import Linear
from engine.lora.adapters import MAX_HEADER_BYTES, MAX_NUMBER_BYTES, Adapters
from engine.lora.modules import LoRARoom, check_lora_folder, parse_lora_modules, read_lora_module
from engine.model_loader import create_engine_config, load_model, model_config
from engine.weight_cut import INPUTS, OUTPUTS, Cut
from prefix_hash import prefix_key, salted_key


def test_names_and_folders() -> None:
    expected = {"sql": Path("/a"), "team/chat:1": Path("b")}
    assert parse_lora_modules("sql=/a, team/chat:1=b") == expected
    assert parse_lora_modules('{"sql": "/a", "team/chat:1": "b"}') == expected
    assert parse_lora_modules("") == parse_lora_modules(" ,") == {}
    assert parse_lora_modules('{"a": "/with, comma=x"}') == {"a": Path("/with, comma=x")}
    assert parse_lora_modules("a=~/x") == {"a": Path.home() / "x"}
    assert len(parse_lora_modules(",".join(f"{'s' * 125}{i:03}=/a" for i in range(256)))) == 256


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sql", "lora_modules must name each adapter's folder, as in sql=/models/sql-adapter, is 'sql'"),
        ("sql=", "lora_modules must name each adapter's folder"),
        ("=/a", "lora_modules must name each adapter's folder"),
        ('{"sql": 3}', "lora_modules must name each adapter's folder"),
        ('{"sql"', "lora_modules is not JSON"),
        ("s l=/a", "lora_modules: a name must be of 1 to 128 letters, digits and any of . / : _ -, is 's l'"),
        (f"{'s' * 129}=/a", "lora_modules: a name must be of 1 to 128"),
        ("a=/a,a=/b", "lora_modules names 'a' twice"),
        ('{"a": "/a", "a": "/b"}', "lora_modules names 'a' twice"),
        (",".join(f"a{i}=/a" for i in range(257)), "lora_modules must name at most 256 adapters, names 257"),
    ],
)
def test_what_is_no_list_of_adapters(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineArgs(model="x", lora_modules=text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "adapter 'a': peft_type must be 'LORA', is 'IA3'"),
        ({"use_dora": True}, "adapter 'a': use_dora is not supported, is True"),
        ({"bias": "all"}, "adapter 'a': bias is not supported, is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "adapter 'a': modules_to_save is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "adapter 'a': rank_pattern is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "adapter 'a': init_lora_weights is not supported, is 'pissa_niter_4'"),
        ({"r": 0}, r"adapter 'a': r must be a whole number in \[1, 512\], is 0"),
        ({"r": True}, r"adapter 'a': r must be a whole number"),
        ({"lora_alpha": True}, r"adapter 'a': lora_alpha must be a number in \[-1000000, 1000000\], is True"),
        ({"lora_alpha": "8"}, r"adapter 'a': lora_alpha must be a number in \[-1000000, 1000000\], is '8'"),
        ({"lora_alpha": float("nan")}, "adapter 'a': lora_alpha must be a number .* is nan"),
        ({"lora_alpha": float("inf")}, "adapter 'a': lora_alpha must be a number .* is inf"),
        ({"lora_alpha": 10**400}, "adapter 'a': lora_alpha must be a number .* is 10000"),
    ],
)
def test_what_an_adapter_may_not_say(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_adapter(tmp_path, config=change)
    with pytest.raises(ValueError, match=message):
        read_lora_module("a", tmp_path, lambda _: "")


def test_scales(tmp_path: Path) -> None:
    write_adapter(tmp_path, rank=4, config={"lora_alpha": 6})
    assert read_lora_module("a", tmp_path, lambda _: "x").scale == 1.5
    write_adapter(tmp_path, rank=4, config={"lora_alpha": 6, "use_rslora": True})
    assert read_lora_module("a", tmp_path, lambda _: "x").scale == 3.0


@pytest.mark.parametrize("how", [True, False, "gaussian", "eva", "orthogonal"])
def test_how_training_began_says_nothing_where_the_base_stayed_what_it_is(how: bool | str, tmp_path: Path) -> None:
    write_adapter(tmp_path, config={"init_lora_weights": how})
    assert read_lora_module("a", tmp_path, lambda _: "x").rank == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "adapter_config.json is not JSON"),
        ("[" * 200_000, "adapter_config.json is not JSON"),
        (" " * (1 << 20) + "{}", "adapter_config.json must have at most 1048576 bytes, has 1048578"),
        (" " * ((1 << 20) - 2) + "{}", "peft_type must be 'LORA', is None"),
        ("[]", "adapter_config.json must hold a JSON object"),
    ],
)
def test_a_folder_without_a_description(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(ValueError, match=f"adapter 'a': .*{message}"):
        read_lora_module("a", tmp_path, lambda _: "")


def test_what_is_no_folder_of_an_adapter(tmp_path: Path) -> None:
    """A pipe or a device, which may have no end, is not read."""
    with pytest.raises(ValueError, match=r"adapter 'a': there is no folder .*/nothing"):
        check_lora_folder("a", tmp_path / "nothing")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        write_adapter(tmp_path)
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(ValueError, match=f"adapter 'a': .*{name} is empty"):
            check_lora_folder("a", tmp_path)
        (tmp_path / name).unlink()
        with pytest.raises(ValueError, match=f"adapter 'a': .* is not an adapter's folder: it has no file {name}"):
            check_lora_folder("a", tmp_path)
        os.mkfifo(tmp_path / name)
        with pytest.raises(ValueError, match=f"it has no file {name}"):
            check_lora_folder("a", tmp_path)
        (tmp_path / name).unlink()
        (tmp_path / name).symlink_to("/dev/zero")
        with pytest.raises(ValueError, match=f"it has no file {name}"):
            check_lora_folder("a", tmp_path)
        (tmp_path / name).unlink()


def test_a_file_may_be_as_large_as_an_adapter_of_the_whole_model() -> None:
    """Of which this rank has one of two parts: half of the outputs of `q`, and half of the inputs of `o`."""
    cuts = {"q": Cut(OUTPUTS, 2, 0), "o": Cut(INPUTS, 2, 0)}
    adapters = Adapters([], "float32", "cpu", cut_of=cuts.get, room=LoRARoom(num=1, max_rank=8))
    for name, (outputs, inputs) in {"q": (6, 10), "o": (10, 6), "whole": (10, 10)}.items():
        adapters.adapt(Linear(torch.zeros(outputs, inputs)), {name: outputs}, inputs)
    assert adapters.max_bytes("a", 8) == MAX_HEADER_BYTES + MAX_NUMBER_BYTES * 8 * (22 + 22 + 20)
    with pytest.raises(ValueError, match="adapter 'a': r must be at most max_lora_rank=8, is 9"):
        adapters.max_bytes("a", 9)


def config_with(folder: Path, lora_modules: str, **settings: Any) -> Any:
    return create_engine_config(
        EngineArgs(model=str(folder), load_format="dummy", device="cpu", lora_modules=lora_modules, **settings)
    )


def test_an_engine_takes_them_where_its_model_can(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    write_adapter(tmp_path / "a")
    with pytest.raises(ValueError, match="lora_modules: 'model' is the model's own name; give the adapter another"):
        config_with(tmp_path / "model", f"model={tmp_path / 'a'}")
    with pytest.raises(ValueError, match="lora_modules: 'also' is the model's own name"):
        config_with(tmp_path / "model", f"also={tmp_path / 'a'}", served_model_name="model, also")
    with pytest.raises(ValueError, match=r"adapter 'b': .* it has no file adapter_config.json"):
        config_with(tmp_path / "model", f"b={tmp_path}")
    modules = config_with(tmp_path / "model", f"b={tmp_path / 'a'},a={tmp_path / 'a'}").lora_modules
    assert [module.name for module in modules] == ["a", "b"]


def test_folders_are_looked_at_before_kernels_and_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These may take a compiler, and minutes."""

    def too_late(*_args: object, **_kwargs: object) -> Any:
        raise AssertionError

    write_model(tmp_path / "model")
    for name in ("choose_attention_backend", "resolve_quantization", "digest_files"):
        monkeypatch.setattr(model_config, name, too_late)
    with pytest.raises(ValueError, match=r"adapter 'a': there is no folder .*/nothing"):
        config_with(tmp_path / "model", f"a={tmp_path / 'nothing'}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lm_head.lora_A.weight": (4, 64)}, "adapter 'a' has weights that are not supported: .*lm_head"),
        ({"model.layers.9.mlp.up_proj.lora_A.weight": (4, 64)}, "has weights that are not supported: .*layers.9"),
        ({"model.layers.0.mlp.up_proj.lora_A.weight": (4, 65)},
         r"adapter 'a' does not fit the model: .*up_proj.lora_A.weight has shape \(4, 65\) in torch.float32, expected"),
        ({"model.layers.0.mlp.up_proj.lora_B.weight": None}, "adapter 'a' lacks the tensor .*up_proj.lora_B.weight"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit(change: dict[str, tuple[int, int] | None], message: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    tensors = {f"base_model.model.{name}": shape and torch.zeros(shape) for name, shape in change.items()}
    write_adapter(tmp_path / "a", tensors=tensors)
    config = config_with(tmp_path / "model", f"a={tmp_path / 'a'}", dtype="float32", attention_backend="torch")
    with pytest.raises(ValueError, match=message):
        load_model(config, create_attention_backend(config))


@pytest.mark.parametrize(
    ("number", "dtype", "alpha"),
    [(float("nan"), "float32", 8), (float("inf"), "float32", 8), (1e30, "float16", 8), (3e4, "float16", 64)],
)
def test_what_is_no_number(number: float, dtype: str, alpha: int, tmp_path: Path) -> None:
    """Also if it only becomes infinite in the dtype that is served, with its scale."""
    write_model(tmp_path / "model")
    up = torch.zeros(96, 4)
    up[3, 2] = number
    tensors = {"base_model.model.model.layers.1.mlp.up_proj.lora_B.weight": up}
    write_adapter(tmp_path / "a", tensors=tensors, config={"lora_alpha": alpha})
    config = config_with(tmp_path / "model", f"a={tmp_path / 'a'}", dtype=dtype, attention_backend="torch")
    with pytest.raises(ValueError, match=r"adapter 'a': its weights for model.layers.1.mlp.up_proj are not finite in"):
        load_model(config, create_attention_backend(config))


def test_an_adapter_of_nothing(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    write_adapter(tmp_path / "a", products={})
    config = config_with(tmp_path / "model", f"a={tmp_path / 'a'}", attention_backend="torch")
    with pytest.raises(ValueError, match=r"adapter 'a': .* has no tensors"):
        load_model(config, create_attention_backend(config))


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    write_adapter(tmp_path / "a")
    weights = tmp_path / "a" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    config = config_with(tmp_path / "model", f"a={tmp_path / 'a'}", dtype="float32", attention_backend="torch")
    with pytest.raises(
        ValueError, match=r"adapter 'a': .*adapter_model.safetensors is not a safetensors file, or not a complete one"
    ):
        load_model(config, create_attention_backend(config))


def test_an_adapter_is_told_from_another_by_its_numbers(tmp_path: Path) -> None:
    """The model's own digest is the same whatever its adapters are."""
    write_model(tmp_path / "model")
    for name, seed in (("a", 1), ("same", 1), ("other", 2)):
        write_adapter(tmp_path / name, seed=seed)

    def config(*adapters: str) -> Any:
        modules = (f"{name}={tmp_path / folder}" for name, folder in map(str.split, adapters))
        return config_with(tmp_path / "model", ",".join(modules))

    def digest(folder: str) -> str:
        (module,) = config(f"x {folder}").lora_modules
        return module.digest

    assert config().compat_digest == config("x a").compat_digest == config("x other", "y a").compat_digest
    assert digest("a") == digest("same") == config("y a").lora_modules[0].digest != digest("other")
    write_adapter(tmp_path / "same", seed=1, config={"lora_alpha": 9})
    assert digest("a") != digest("same")


def test_blocks_of_adapters_are_apart() -> None:
    key = prefix_key("digest")
    pairs = [("", ""), ("a", ""), ("", "a"), ("a", "a"), ("b", "a"), ("a", "b"), ("a\0b", ""), ("", "a\0b")]
    keys = [salted_key(key, salt, name) for salt, name in pairs]
    assert len(set(keys)) == len(keys)
    assert salted_key(key, "", "") == key
