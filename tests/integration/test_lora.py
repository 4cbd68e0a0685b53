"""Adapters of a model: each request gets the tokens of its own adapter, whatever is computed beside it and wherever."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from handover import alone, handed_over
from lora_folders import ALPHA, CONFIG, PRODUCTS, merge, write_adapter

from engine.config import EngineConfig
from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.models.layer import PlainLayers
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from prefix_hash import block_hashes, salted_key
from tandem import LLM, LoRARequest
from tandem import SamplingParams as ClientSamplingParams

PROMPTS = [[(37 * number + 11 * i) % 290 + 5 for i in range(length)] for number, length in enumerate((5, 33, 70, 18))]
NAMES = ["", "a", "b", "some"]
"""Names of adapters; "": none. `some` changes only two products."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=1)
SEEDED = replace(GREEDY, temperature=0.9, seed=4)
Asked = tuple[int, str, bool]
"""Number of the prompt, adapter, and whether the answer is sampled with a seed (else greedy)."""
ASKED: list[Asked] = [(number, name, is_seeded) for number in range(4) for name in NAMES for is_seeded in (False, True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, adapters, and for each adapter the model with the adapter merged into its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM  # not above: imports Triton, see tests/unit/conftest

    folder = tmp_path_factory.mktemp("lora")
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(folder / "model")
    write_adapter(folder / "a", rank=4, seed=1)
    write_adapter(folder / "b", rank=3, seed=2)
    write_adapter(
        folder / "some",
        rank=16,
        seed=3,
        products={name: PRODUCTS[name] for name in ("self_attn.v_proj", "mlp.up_proj")},
    )
    for name, rank in (("a", 4), ("b", 3), ("some", 16)):
        merged = folder / f"merged-{name}"
        merged.mkdir()
        (merged / "config.json").write_text((folder / "model" / "config.json").read_text())
        merge(folder / "model" / "model.safetensors", folder / name, ALPHA / rank, merged)
    return folder


def config_of(folder: Path, model: str = "model", **settings: Any) -> EngineConfig:
    adapters = ",".join(f"{name}={folder / name}" for name in NAMES[1:]) if model == "model" else ""
    args = {"dtype": "float32", "num_kv_blocks": 60, "block_size": 16, "num_threads": 1, "device": "cpu"} | settings
    return create_engine_config(EngineArgs(model=str(folder / model), lora_modules=adapters, **args))


def ask(engine: LLMEngine, asked: list[Asked]) -> list[list[RequestOutput]]:
    """Run all requests at once."""
    for i, (number, name, is_seeded) in enumerate(asked):
        engine.add_request(str(i), PROMPTS[number], SEEDED if is_seeded else GREEDY, lora_name=name)
    answers: list[list[RequestOutput]] = [[] for _ in asked]
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers[int(output.request_id)].append(output)
    _, problems = engine.audit()
    assert not problems
    return answers


def tokens_of(answer: list[RequestOutput]) -> list[int]:
    return [token for output in answer for token in output.token_ids]


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[Asked, list[int]]:
    """The answers of engines without adapters, of the merged models."""
    answers = {}
    for name in NAMES:
        config = config_of(folder, f"merged-{name}" if name else "model")
        engine = LLMEngine(replace(config, lora_modules=()))
        asked = [each for each in ASKED if each[1] == name]
        told = ask(engine, [(number, "", is_seeded) for number, _, is_seeded in asked])
        answers |= {key: tokens_of(answer) for key, answer in zip(asked, told, strict=True)}
    assert len({tuple(answers[2, name, False]) for name in NAMES}) == len(NAMES), "all say something else"
    return answers


@pytest.mark.parametrize("is_ahead", [False, True], ids=["a step at a time", "a step ahead"])
def test_tokens_are_those_of_the_model_with_the_adapter_in_its_weights(
    folder: Path, expected: dict[Asked, list[int]], is_ahead: bool
) -> None:
    """All requests run at once, with prompts in chunks, and with so few blocks that some are preempted."""
    config = config_of(folder, max_num_batched_tokens=48, max_num_seqs=20, num_kv_blocks=17)
    engine = LLMEngine(replace(config, scheduler=replace(config.scheduler, async_scheduling=is_ahead)))
    answers = ask(engine, ASKED)
    assert {key: tokens_of(answer) for key, answer in zip(ASKED, answers, strict=True)} == expected
    assert engine.stats.num_preemptions > 0


@pytest.mark.slow
def test_ranks_have_parts_of_adapters(folder: Path, expected: dict[Asked, list[int]]) -> None:
    """Covers products that are summed over ranks and products that are not, in one batch."""
    with closing(
        LLMEngine(config_of(folder, max_num_batched_tokens=48, max_num_seqs=20, tensor_parallel_size=2))
    ) as engine:
        answers = ask(engine, ASKED)
    assert {key: tokens_of(answer) for key, answer in zip(ASKED, answers, strict=True)} == expected


@pytest.mark.slow
def test_the_same_bits_alone_and_together_on_ranks(folder: Path) -> None:
    config = config_of(folder, dtype="bfloat16", tensor_parallel_size=2)
    if config.device.attention_backend != "cpu":
        pytest.skip("no CPU kernels here")
    asked: list[Asked] = [(2, name, False) for name in NAMES]
    with closing(LLMEngine(config)) as engine:
        together = ask(engine, asked)
    with closing(LLMEngine(config)) as engine:
        for each, answer in zip(asked, together, strict=True):
            (by_itself,) = ask(engine, [each])
            assert [(o.token_ids, o.logprobs) for o in by_itself] == [(o.token_ids, o.logprobs) for o in answer]


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[LLMEngine, LLMEngine]]:
    """Two engines that use the CPU kernels."""
    config = config_of(folder, dtype="bfloat16")
    if config.device.attention_backend != "cpu":
        pytest.skip("no CPU kernels here")
    with closing(LLMEngine(config)) as engine, closing(LLMEngine(config)) as other:
        yield engine, other


def test_the_same_bits_alone_and_together(served: tuple[LLMEngine, LLMEngine]) -> None:
    """This holds for requests without an adapter, too."""
    together, by_itself = served
    for key, answer in zip(ASKED, ask(together, ASKED), strict=True):
        [own] = ask(by_itself, [key])
        assert [(o.token_ids, o.logprobs) for o in answer] == [(o.token_ids, o.logprobs) for o in own]


def test_fused_layers_add_what_their_products_add(
    served: tuple[LLMEngine, LLMEngine], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitwise. tests/unit/test_cpu_adapters.py checks the single products."""
    from engine.kernels import cpu_adapters

    monkeypatch.setattr(cpu_adapters, "fastest_stack", lambda layers, adapter_ids: PlainLayers(layers))
    with closing(LLMEngine(config_of(folder, dtype="bfloat16"))) as engine:
        asked = ASKED[:8]
        plain, fused = ask(engine, asked), ask(served[0], asked)
    assert [[(o.token_ids, o.logprobs) for o in answer] for answer in fused] == [
        [(o.token_ids, o.logprobs) for o in answer] for answer in plain
    ]


def test_blocks_are_shared_within_an_adapter_alone(folder: Path) -> None:
    engine = LLMEngine(config_of(folder))
    for name in NAMES:
        [first] = ask(engine, [(2, name, False)])
        [second] = ask(engine, [(2, name, False)])
        assert first[0].num_cached_tokens == 0
        assert second[0].num_cached_tokens == 64
        assert tokens_of(first) == tokens_of(second)


def test_one_prefills_and_another_decodes(served: tuple[LLMEngine, LLMEngine]) -> None:
    prefill, decode = served
    for name in NAMES:
        for params in (GREEDY, SEEDED):
            expected = alone(prefill, PROMPTS[1], params, lora_name=name)
            assert handed_over(prefill, decode, PROMPTS[1], params, lora_name=name) == expected


def test_two_engines_tell_whether_they_mean_the_same(served: tuple[LLMEngine, LLMEngine]) -> None:
    """Prompt digests differ if token ids or adapter differ. A salt does not change the KV, nor the digest."""
    prefill, decode = served
    prompt = PROMPTS[1]
    promised = decode.reserve("r", prompt, GREEDY, lora_name="a", cache_salt="x")
    decode.abort("r")
    assert promised is not None
    for tokens, name in ((prompt, "a"), ([*prompt[:-1], 7], "a"), (prompt[:-1], "a"), (prompt, "some"), (prompt, "")):
        computed = prefill.add_prefill("r", tokens, GREEDY, lora_name=name)
        prefill.abort("r")
        assert (computed == promised.prompt_digest) == ((tokens, name) == (prompt, "a"))


def test_a_model_in_8_bits_has_adapters_too(folder: Path) -> None:
    """What adapters add is computed in the model's dtype: the result is as close to the merged model as 8-bit weights
    are to plain ones."""
    engine = LLMEngine(config_of(folder, quantization="int8"))

    def likeliest(engine: LLMEngine, name: str) -> float:
        [answer] = ask(engine, [(2, name, False)])
        assert answer[0].logprobs is not None
        return answer[0].logprobs[0].top[0].logprob

    for name in NAMES[1:]:
        plain = LLMEngine(config_of(folder, f"merged-{name}"))
        assert likeliest(engine, name) == pytest.approx(likeliest(plain, ""), abs=0.05)


def test_unknown_adapters_are_refused(folder: Path) -> None:
    engine = LLMEngine(config_of(folder))
    with pytest.raises(ValueError, match=r"lora_name must be a loaded adapter \(a, b, some\), is 'c'"):
        engine.add_request("r", PROMPTS[0], GREEDY, lora_name="c")
    assert not engine.has_unfinished_requests()
    engine.add_request("r", PROMPTS[0], GREEDY, lora_name="b")  # the request id "r" is free
    without = LLMEngine(replace(config_of(folder), lora_modules=()))
    with pytest.raises(ValueError, match=r"a loaded adapter \(none\)"):
        without.add_request("r", PROMPTS[0], GREEDY, lora_name="a")


def test_vllms_own_way_to_ask(folder: Path, model_folder: Path, expected: dict[Asked, list[int]]) -> None:
    shutil.copy(model_folder / "tokenizer.json", folder / "model")
    llm = LLM(
        str(folder / "model"), dtype="float32", device="cpu", num_threads=1, num_kv_blocks=60, enable_lora=True,
        max_lora_rank=16,
    )  # fmt: skip
    params = ClientSamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompt = {"prompt_token_ids": PROMPTS[2]}
    for number, name in enumerate(("a", "b"), start=1):
        asked = LoRARequest(name, number, str(folder / name))
        [output] = llm.generate(prompt, params, use_tqdm=False, lora_request=asked)
        assert list(output.outputs[0].token_ids) == expected[2, name, False]


def test_offline_adapters_that_requests_bring(
    folder: Path, model_folder: Path, expected: dict[Asked, list[int]]
) -> None:
    """Requests bring adapters as in vLLM. The least recently used adapter makes room."""
    shutil.copy(model_folder / "tokenizer.json", folder / "model")
    llm = LLM(
        str(folder / "model"), dtype="float32", device="cpu", num_threads=1, num_kv_blocks=60, max_loras=2,
        lora_modules={"b": folder / "b"}, enable_lora=True,
    )  # fmt: skip
    params = ClientSamplingParams(temperature=0, max_tokens=30, ignore_eos=True)

    def ask(*requests: LoRARequest | None) -> list[list[int]]:
        prompts = [{"prompt_token_ids": PROMPTS[2]}] * len(requests)
        said = llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
        return [list(output.outputs[0].token_ids) for output in said]

    def bring(name: str, source: str = "") -> LoRARequest:
        return LoRARequest(name, 1, str(folder / (source or name)))

    def there() -> list[str]:
        return [module.name for module in llm.llm_engine.loras.served]

    def told(name: str) -> list[int]:
        return expected[2, name, False]

    a, some = bring("a"), bring("some")
    assert ask(a, None, LoRARequest("b"), some) == [told("a"), told(""), told("b"), told("some")]
    assert there() == ["a", "b", "some"]
    assert ask(LoRARequest("a"), bring("x", "b")) == [told("a"), told("b")], "it needs no folder any more"
    assert there() == ["a", "b", "x"], "some was asked for longest ago"
    assert ask(bring("x", "some")) == [told("some")], "another one by that name"
    with pytest.raises(ValueError, match="names 'some', which is not loaded: also give its folder, as lora_path"):
        ask(LoRARequest("some"))
    with pytest.raises(ValueError, match="one call may ask for max_loras=2 adapters beside lora_modules, asks for 3"):
        ask(a, some, bring("y", "a"))
    with pytest.raises(ValueError, match=r"'a' is asked for from .* and from"):
        ask(a, bring("a", "b"))
    with pytest.raises(ValueError, match=r"'b' was loaded from .*, not "):
        ask(bring("b", "a"))
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere"):
        ask(bring("nowhere"))
    with pytest.raises(ValueError, match="lora_path must be a folder's path, is 3"):
        ask(LoRARequest("z", 1, 3))  # type: ignore[arg-type]
    assert there() == ["a", "b", "x"]
    assert ask(a, LoRARequest("x")) == [told("a"), told("some")]


def test_offline(model_folder: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path, rank=8, products={"self_attn.v_proj": (192, 576)}, config={"lora_alpha": 40})
    llm = LLM(str(model_folder), lora_modules={"poet": tmp_path}, max_model_len=256, kv_cache_gib=0.1, num_threads=1)
    params = ClientSamplingParams(temperature=0, max_tokens=8)
    poet = LoRARequest("poet", 1, str(tmp_path))
    prompt = "The capital of France is"
    texts = [
        [
            output.outputs[0].text
            for output in llm.generate([prompt, prompt], params, use_tqdm=False, lora_request=whose)
        ]
        for whose in (None, poet, [poet, None])
    ]
    plain, other = texts[0][0], texts[1][0]
    assert texts == [[plain, plain], [other, other], [other, plain]]
    assert plain != other
    said = llm.generate([prompt, prompt], params, use_tqdm=False, lora_request=[poet, None])
    names = [each.lora_request and each.lora_request.lora_name for one in said for each in (one, *one.outputs)]
    assert names == ["poet", "poet", None, None]
    with pytest.raises(
        ValueError, match=r"lora_request names 'painter', but lora_modules has poet\. Give the folders of"
    ):
        llm.generate(prompt, params, use_tqdm=False, lora_request=LoRARequest("painter"))
    with pytest.raises(ValueError, match=f"'poet' was loaded from {tmp_path}, not /elsewhere"):
        llm.generate(prompt, params, use_tqdm=False, lora_request=LoRARequest("poet", 1, "/elsewhere"))
    with pytest.raises(ValueError, match=r"lora_request must be a LoRARequest, as LoRARequest\('name'\), is 'poet'"):
        llm.generate(prompt, params, use_tqdm=False, lora_request="poet")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lora_request has 1 entries for 2 prompts"):
        llm.generate([prompt, prompt], params, use_tqdm=False, lora_request=[poet])


def test_routers_find_the_blocks_of_an_adapter_by_its_digest(folder: Path) -> None:
    config = config_of(folder)
    with closing(LLMEngine(config)) as engine:
        prompt = PROMPTS[2]
        engine.add_request("r", prompt, replace(GREEDY, max_tokens=1), lora_name="b")
        while engine.has_unfinished_requests():
            engine.step()
        digests = {module.name: module.digest for module in config.lora_modules}
        key = salted_key(config.prefix_key, "", digests["b"])
        assert set(engine.cached_hashes()) == set(block_hashes(prompt, 16, key))
