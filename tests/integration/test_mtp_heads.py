"""Heads in the model's own checkpoint (MTP): what they guess, where their keys and values come from, and that no token
depends on them."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from grammar_cases import grammar_text, tokenizer
from handover import alone, finish, handed_over
from heads_at_work import Drafts, agreement, drafted
from many_endings import answers_of, prompt_of
from model_bench import SMALL
from mtp_cases import CONFIGS, CPU, NUM_LAYERS, PLAIN, PREFIX, Reference, change_tensors, make_engine
from quantized_checkpoints import FORMS, quantized, save_checkpoint
from safetensors.torch import load_file
from transformers import LlamaConfig

from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader.settings import check_settings
from engine.models.stored_weights import AS_STORED
from engine.sampling_params import SamplingParams
from engine.scheduling import drafting
from engine.scheduling.speculation import DraftHistory

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LONG_PROMPT = [(7 * i) % 55 + 5 for i in range(80)]


@pytest.fixture(autouse=True)
def always_guessing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after wrong guesses."""
    monkeypatch.setattr(DraftHistory, "num_wanted", lambda self, length: 3)


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, Reference(folder, request.param)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek")
    Reference(folder, "DeepseekV3")
    return folder


def copied(folder: Path, to: Path, changes: dict[str, torch.Tensor | None] | None = None, **fields: Any) -> Path:
    """A copy of the checkpoint with other tensors and fields of config.json."""
    to.mkdir(exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | fields
    (to / "config.json").write_text(json.dumps(config))
    (to / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    change_tensors(to, changes or {})
    return to


def answered(engine: LLMEngine, num: int = 4) -> Drafts:
    """Answers to several prompts at once: the guesses."""
    collected = drafted(engine)
    for number in range(num):
        engine.add_request(str(number), prompt_of(number + 3), GREEDY)
    finish(engine)
    return collected


# -- what they guess --------------------------------------------------------------------------------------------


def test_the_reference_is_that_of_transformers(model: tuple[Path, Reference]) -> None:
    """Except for the first token, which has no feature: transformers leaves it out."""
    model[1].check_against_transformers(LONG_PROMPT)


def test_guesses_are_those_of_the_reference(model: tuple[Path, Reference]) -> None:
    """Prompts in chunks, several sequences."""
    folder, reference = model
    collected = answered(make_engine(folder, prefill_chunk_tokens=7, **PLAIN))
    assert sum(len(guesses) for _, guesses in collected) > 100
    for token_ids, guesses in collected:
        assert guesses == reference.guesses(token_ids, len(guesses))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_cpu_kernels_guess_as_the_reference_does_but_for_rounding(
    model: tuple[Path, Reference], quantization: str
) -> None:
    folder, reference = model
    collected = answered(make_engine(folder, num_drafts=1, quantization=quantization, **CPU))
    expected = [(token_ids, reference.guesses(token_ids, 1)) for token_ids, _ in collected]
    assert agreement(collected, expected) > (0.75 if quantization == "none" else 0.6)


def test_where_a_grammar_leaves_a_choice_the_head_guesses(
    deepseek: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is looked up, as with other heads."""

    def look_up(*_: object) -> list[int]:
        raise AssertionError("looked up")

    monkeypatch.setattr(drafting, "propose", look_up)
    folder = copied(deepseek, tmp_path)
    tokenizer().save(str(folder / "tokenizer.json"))
    engine = make_engine(folder, **CPU)
    collected = drafted(engine)
    engine.add_request("r", [7, 8, 9] * 6, replace(GREEDY, ignore_eos=False, grammar=grammar_text("grammar")))
    finish(engine)
    assert sum(len(guesses) for _, guesses in collected) > 0


def test_answers_that_end_in_every_way(deepseek: Path) -> None:
    """All parameters, in batches, with a pool in which sequences are preempted."""
    expected = answers_of(make_engine(deepseek, num_drafts=0, **CPU), range(24))
    cramped = make_engine(deepseek, num_kv_blocks=14, max_model_len=160, prefill_chunk_tokens=7, **CPU)
    assert answers_of(cramped, range(24)) == expected
    assert cramped.stats.num_preemptions > 0
    assert cramped.stats.num_drafts > 20


@pytest.mark.parametrize("name", ["shared_head.head", "embed_tokens"])
def test_logits_and_embedding_may_be_the_heads_own(deepseek: Path, tmp_path: Path, name: str) -> None:
    """Checkpoints store both again; they are shared if they are equal to the model's, or not there."""
    tensors = load_file(deepseek / "model.safetensors")
    stored = f"{PREFIX}{name}.weight"
    folders = {
        "twice": deepseek,
        "once": copied(deepseek, tmp_path / "once", {stored: None}),
        "other": copied(deepseek, tmp_path / "other", {stored: tensors[stored].roll(1, 0)}),
    }
    engines = {each: make_engine(folder, **PLAIN) for each, folder in folders.items()}
    of = {each: answered(engine) for each, engine in engines.items()}
    assert of["once"] == of["twice"]
    assert agreement(of["other"], of["twice"]) < 0.5
    for each, engine in engines.items():
        head, whole = engine.executor._worker.drafter._head, engine.executor._worker.runner._model  # type: ignore[union-attr]
        assert (head._lm_head is whole.lm_head) == (each != "other" or name == "embed_tokens")  # type: ignore[attr-defined]
        assert (head._embedding_VD is whole.embedding_VD) == (each != "other" or name == "shared_head.head")  # type: ignore[attr-defined]


def test_a_head_beside_tied_embeddings(deepseek: Path, tmp_path: Path) -> None:
    """The product of logits is the embedding, whose copy the head has, too; and buffers are passed over."""
    tensors = load_file(deepseek / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    changes = {"lm_head.weight": None, f"{PREFIX}shared_head.head.weight": embedding.clone()}
    changes[f"{PREFIX}self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    engine = make_engine(copied(deepseek, tmp_path, changes, tie_word_embeddings=True), **PLAIN)
    assert sum(len(guesses) for _, guesses in answered(engine)) > 100
    assert engine.executor._worker.drafter._head._lm_head is engine.executor._worker.runner._model.lm_head  # type: ignore


@pytest.mark.parametrize(
    ("form", "backend", "is_plain"),
    [
        ("int channel", CPU, False),
        ("int channel", CPU, True),
        ("fp8 blocks", PLAIN, True),
        ("int channel", PLAIN, False),
    ],
    ids=["int8, kept", "int8, kept, eh_proj plain", "fp8, dequantised, eh_proj plain", "int8, dequantised"],
)
def test_a_checkpoint_with_weights_in_8_bits(
    deepseek: Path, tmp_path: Path, form: str, backend: dict[str, Any], is_plain: bool
) -> None:
    """Guesses are those with the plain weights that these stand for, but for the rounding of products of kept ones."""
    config = json.loads((deepseek / "config.json").read_text())
    stored, plain = quantized(load_file(deepseek / "model.safetensors"), FORMS[form])
    joined = f"{PREFIX}eh_proj.weight"
    if is_plain:  # as in DeepSeek-V3's own checkpoint
        stored = {name: each for name, each in stored.items() if not name.startswith(joined)} | {joined: plain[joined]}
    narrow = config | {"quantization_config": FORMS[form].quantization_config}
    kept = make_engine(save_checkpoint(tmp_path / "kept", narrow, stored), num_drafts=1, **backend)
    assert kept.config.model.quantization == (AS_STORED if backend is CPU else "none")
    found = answered(kept)
    expected = answered(make_engine(save_checkpoint(tmp_path / "plain", config, plain), num_drafts=1, **backend))
    assert agreement(found, expected) > (0.75 if backend is CPU else 0.99)


# -- where keys and values come from ----------------------------------------------------------------------------


@pytest.mark.one_in(3)
def test_a_prompt_from_another_engine(model: tuple[Path, Reference]) -> None:
    """It brings the head's latents as those of one more layer. The first token after it has no feature."""
    folder, reference = model
    whole, prefill, decode = (make_engine(folder, **PLAIN) for _ in range(3))
    assert prefill.executor.kv_shape.num_layers == NUM_LAYERS + 1
    found = drafted(decode)
    assert handed_over(prefill, decode, LONG_PROMPT, GREEDY) == alone(whole, LONG_PROMPT, GREEDY)
    check_without_feature(found, reference, len(LONG_PROMPT))


@pytest.mark.one_in(3)
def test_blocks_of_the_prefix_cache_have_the_heads_latents(model: tuple[Path, Reference]) -> None:
    """The head reads what it has not computed. The first token after them has no feature."""
    folder, reference = model
    cold, warm = (make_engine(folder, **PLAIN) for _ in range(2))
    alone(warm, LONG_PROMPT[:70], replace(GREEDY, max_tokens=1))
    found = drafted(warm)
    assert alone(cold, LONG_PROMPT, GREEDY) == alone(warm, LONG_PROMPT, GREEDY)
    assert warm.stats.num_prefix_hits_tokens == 64
    check_without_feature(found, reference, 64)


def check_without_feature(found: Drafts, reference: Reference, place: int) -> None:
    assert sum(guesses != [] for _, guesses in found) > 15
    for token_ids, guesses in found:
        assert guesses == reference.guesses(token_ids, len(guesses), missing=place)


def test_what_other_engines_get_on_the_cpu_kernels(deepseek: Path) -> None:
    """The head's latents of a prompt are to the bit those that are computed in other chunks."""
    pools = []
    for chunk in (80, 16):
        engine = make_engine(deepseek, prefill_chunk_tokens=chunk, **CPU)
        alone(engine, LONG_PROMPT, replace(GREEDY, max_tokens=1))
        pools.append(engine.executor.kv_pool[:, :5].clone())
    assert pools[0][-1].count_nonzero() > 0
    assert torch.equal(*pools)


def test_only_engines_with_the_head_exchange_blocks(deepseek: Path) -> None:
    digests = [make_engine(deepseek, num_drafts=num, **PLAIN).config.compat_digest for num in (0, 1, 3)]
    assert digests[0] != digests[1] == digests[2]
    assert digests[1] == f"{digests[0]}; mtp_head={NUM_LAYERS}"


def test_ranks_guess_what_one_rank_guesses(deepseek: Path) -> None:
    one = make_engine(deepseek, **PLAIN)
    expected = drafted(one)
    tokens = alone(one, prompt_of(11), GREEDY)
    with closing(make_engine(deepseek, tensor_parallel_size=2, **PLAIN)) as engine:
        found = drafted(engine)
        assert alone(engine, prompt_of(11), GREEDY) == tokens
    assert agreement(found, expected) == 1.0


@pytest.mark.slow
def test_ranks_on_the_cpu_kernels(deepseek: Path) -> None:
    """Their tokens are those without guesses."""
    answers = []
    for num_drafts in (0, 3):
        with closing(make_engine(deepseek, num_drafts=num_drafts, tensor_parallel_size=2, **CPU)) as engine:
            answers.append(alone(engine, prompt_of(11), GREEDY))
            num_drafted = engine.stats.num_draft_tokens
    assert answers[0] == answers[1]
    assert num_drafted > 20


# -- what is refused --------------------------------------------------------------------------------------------

NO_HEAD = r"speculative_config method 'mtp': the model brings no head along: its config\.json has no num_nextn_predict"


def check_refused(folder: Path, message: str, **settings: Any) -> None:
    """At the start of an engine, and before any process is started."""
    with pytest.raises(ValueError, match=message):
        make_engine(folder, **PLAIN | settings)
    speculation = '{"method": "mtp", "num_speculative_tokens": 1}'
    with pytest.raises(ValueError, match=message):
        check_settings(EngineArgs(model=str(folder), device="cpu", speculative_config=speculation, **settings), folder)


def test_models_without_a_head_are_refused(deepseek: Path, tmp_path: Path) -> None:
    check_refused(copied(deepseek, tmp_path / "none", num_nextn_predict_layers=0), NO_HEAD)
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"architectures": ["LlamaForCausalLM"]}))
    check_refused(tmp_path, NO_HEAD, load_format="dummy")


def test_too_small_a_pool_is_refused(deepseek: Path) -> None:
    block_bytes = NUM_LAYERS * 48 * 4 * 16
    blocks_of_a_sequence = 512 // 16
    gib = blocks_of_a_sequence * block_bytes / 2**30
    message = (
        r"speculative_config method 'mtp': with it, kv_cache_gib must be at least .*, what max_model_len=512 needs"
    )
    check_refused(deepseek, message, num_kv_blocks=0, kv_cache_gib=gib)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{PREFIX}eh_proj.weight": None}, rf"lack the tensor {PREFIX}eh_proj.weight"),
        ({f"{PREFIX}mlp.experts.7.up_proj.weight": None}, rf"lack the tensor {PREFIX}mlp.experts.7.up_proj.weight"),
        ({f"{PREFIX}hnorm.weight": torch.ones(3)}, rf"{PREFIX}hnorm.weight has shape \(3,\), expected \(64,\)"),
        (
            {f"{PREFIX}fnorm.weight": torch.ones(3)},
            rf"the architecture does not use: {PREFIX}fnorm.weight",
        ),
    ],
)
def test_weights_that_do_not_fit(
    deepseek: Path, tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    with pytest.raises(ValueError, match=f"speculative_config method 'mtp': the weights in .* {message}"):
        make_engine(copied(deepseek, tmp_path, changes), **PLAIN)


def test_transformers_code_has_no_such_head(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"]).to_json_string())
    message = "speculative_config method 'mtp': transformers' code computes the model, and only our own decoder has"
    check_refused(tmp_path, message, model_impl="transformers", load_format="dummy")


def test_all_ranks_look_for_what_is_left(deepseek: Path, tmp_path: Path) -> None:
    changes = {f"{PREFIX}fnorm.weight": torch.ones(3)}
    with pytest.raises(ValueError, match=f"the architecture does not use: {PREFIX}fnorm.weight"):
        make_engine(copied(deepseek, tmp_path, changes), tensor_parallel_size=2, **PLAIN)
