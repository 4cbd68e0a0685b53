"""Draft models: what they guess, when they catch up, and that no token depends on them.

Where the draft model is the model itself, every guess must be right: with the CPU kernels a token's bits do not depend
on the batch, and both draw with the same random numbers. So a wrong guess shows that the draft model has read something
else than the sequence.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from handover import alone, finish, handed_over
from many_endings import BAD_WORDS, BUDGETS, answers_of, prompt_of
from many_endings import CONFIG as ENDINGS

from engine.engine_args import EngineArgs
from engine.llm_engine import LLMEngine
from engine.model_loader import create_engine_config
from engine.running.draft_model import DraftModel, _OfOtherVocabulary
from engine.sampling_params import SamplingParams
from engine.scheduling.sequence import DraftPart
from engine.scheduling.thinking import ThinkingBudget
from tandem import LLM
from tandem import SamplingParams as OfflineParams
from tandem.structured_outputs import StructuredOutputsParams

CONFIG = ENDINGS | {"hidden_size": 64, "head_dim": 16, "max_position_embeddings": 1024}
"""Of sizes that the CPU kernels can compute."""
SMALLER = CONFIG | {"num_hidden_layers": 1}
"""With dummy weights, its layer is the model's first one."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, top_p=0.95, seed=7, max_tokens=30, ignore_eos=True, frequency_penalty=0.3)
LONG_PROMPT = [(7 * i) % 55 + 5 for i in range(300)]


def folder_of(path: Path, config: dict[str, Any]) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config | {"initializer_range": 0.3}))
    return str(path)


def make_engine(tmp_path: Path, draft: dict[str, Any] | None, *, num_drafts: int = 4, **settings: Any) -> LLMEngine:
    """An engine with the CPU kernels, whose draft model has the configuration `draft`."""
    speculation = ""
    if draft is not None:
        model = folder_of(tmp_path / "draft", draft)
        speculation = json.dumps({"model": model, "num_speculative_tokens": num_drafts})
    defaults: dict[str, Any] = {
        "load_format": "dummy", "dtype": "bfloat16", "device": "cpu", "attention_backend": "cpu", "num_threads": 1,
        "block_size": 16, "num_kv_blocks": 72, "max_num_seqs": 16, "max_itl_ms": 0.0,
    }  # fmt: skip
    settings = {"speculative_config": speculation} | defaults | settings
    args = EngineArgs(model=folder_of(tmp_path / "model", CONFIG), **settings)
    return LLMEngine(create_engine_config(args))


def num_wrong(engine: LLMEngine) -> int:
    return engine.stats.num_draft_tokens - engine.stats.num_accepted_tokens


# -- what they guess --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("num_drafts", [1, 2, 5])
def test_the_model_itself_guesses_right(tmp_path: Path, params: SamplingParams, num_drafts: int) -> None:
    engine = make_engine(tmp_path, CONFIG, num_drafts=num_drafts)
    tokens = alone(engine, prompt_of(7), params)
    assert tokens == alone(make_engine(tmp_path, None), prompt_of(7), params)
    assert num_wrong(engine) == 0
    # Each step gives one token more than guesses; the last token is never guessed.
    assert engine.stats.num_steps <= 1 + -(-29 // (num_drafts + 1)) + 1


def test_another_model_guesses_some_right(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, SMALLER)
    for number, params in enumerate((GREEDY, DRAWN)):
        assert alone(engine, prompt_of(number), params) == alone(make_engine(tmp_path, None), prompt_of(number), params)
    assert engine.stats.num_accepted_tokens > 5
    assert num_wrong(engine) > 5


def test_answers_that_end_in_every_way(tmp_path: Path) -> None:
    """All parameters, in batches, with a pool in which sequences are preempted."""
    expected = answers_of(make_engine(tmp_path, None), range(24))
    for draft in (CONFIG, SMALLER):
        cramped = make_engine(tmp_path, draft, num_kv_blocks=14, max_model_len=160, prefill_chunk_tokens=7)
        assert answers_of(cramped, range(24)) == expected
        assert cramped.stats.num_preemptions > 0
        assert cramped.stats.num_accepted_tokens > 20


def test_after_preemption_it_reads_again(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, CONFIG, num_kv_blocks=14, max_model_len=160)
    for number in range(12):
        engine.add_request(str(number), LONG_PROMPT[number : 30 + 2 * number], replace(DRAWN, max_tokens=40))
    finish(engine)
    assert engine.stats.num_preemptions > 2
    assert engine.stats.num_accepted_tokens > 20
    assert num_wrong(engine) == 0


def test_the_end_of_an_answer_is_the_models(tmp_path: Path) -> None:
    """Tokens that end answers are forbidden before `min_tokens`: those of the model, whatever the draft model's are."""
    engine = make_engine(tmp_path, CONFIG | {"eos_token_id": 17})
    params = replace(DRAWN, ignore_eos=False, min_tokens=30, logit_bias={1: 3.0, 17: 3.0})
    assert len(alone(engine, prompt_of(4), params)) == 30
    assert engine.stats.num_accepted_tokens > 10
    assert num_wrong(engine) == 0


def test_tokens_that_it_does_not_know_are_never_guessed() -> None:
    class FourTokens:
        adapters = states = None
        reads_back = False

        def compute_logits(self, x_TD: torch.Tensor) -> torch.Tensor:
            return -torch.ones(len(x_TD), 4)

    logits = _OfOtherVocabulary(FourTokens(), 4, 6).compute_logits(torch.zeros(2, 3))  # type: ignore[arg-type]
    assert logits.tolist() == [[-1.0] * 4 + [float("-inf")] * 2] * 2


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
def test_answers_with_a_form(
    tmp_path: Path, parts: list[tuple[str, int, int, int]], model_folder: Path, few_layers: Path, temperature: float
) -> None:
    """Text that the form forces is guessed without the draft model, which then guesses within the form. It never
    guesses beyond the end."""
    schema = {
        "type": "object",
        "properties": {
            "first_name": {"enum": ["Ada"]},
            "job": {"type": "string", "maxLength": 60},
            "numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 5},
        },
        "required": ["first_name", "job", "numbers"],
        "additionalProperties": False,
    }
    form = StructuredOutputsParams(json=schema)
    params = OfflineParams(max_tokens=200, temperature=temperature, seed=3, structured_outputs=form)

    def answered(draft: Path | None) -> tuple[LLM, str]:
        speculation = {} if draft is None else {"model": str(draft), "num_speculative_tokens": 4}
        llm = LLM(str(model_folder), speculative_config=speculation or None, attention_backend="cpu", dtype="bfloat16")
        [output] = llm.generate(["Who?"], params, use_tqdm=False)
        return llm, output.outputs[0].text

    _, expected = answered(None)
    assert json.loads(expected)["first_name"] == "Ada"
    llm, text = answered(model_folder)
    assert text == expected
    stats = llm.llm_engine.stats
    assert stats.num_steps < 0.5 * stats.num_generation_tokens
    assert any(num_drafts for *_, num_drafts in parts)
    assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens, "all but some texts that are cut in another way"
    assert answered(few_layers)[1] == expected


def test_thoughts_that_are_cut_off_and_bad_words(tmp_path: Path) -> None:
    """What may come next depends on guesses, too."""
    engine, plain = make_engine(tmp_path, CONFIG), make_engine(tmp_path, None)
    for number in (2, 5, 6, 7):
        params = replace(DRAWN, thinking_budget=BUDGETS[number], bad_words_token_ids=BAD_WORDS)
        assert alone(engine, prompt_of(number), params) == alone(plain, prompt_of(number), params)
    assert engine.stats.num_accepted_tokens > 50
    assert num_wrong(engine) == 0


def test_guesses_for_an_answer_that_has_not_begun(tmp_path: Path) -> None:
    """The last token of a prompt, if a step computes it alone, is computed as if it were decoded. It is no thought."""
    engine = make_engine(tmp_path, CONFIG, prefill_chunk_tokens=8)
    params = replace(GREEDY, thinking_budget=ThinkingBudget(num_tokens=3, end_token_id=7, has_begun=True))
    tokens = alone(engine, LONG_PROMPT[:9], params)
    assert tokens.index(7) == 3
    assert tokens == alone(make_engine(tmp_path, None), LONG_PROMPT[:9], params)
    assert num_wrong(engine) == 0


def test_a_stop_token_among_the_guesses_ends_the_answer(tmp_path: Path) -> None:
    plain = make_engine(tmp_path, None)
    tokens = alone(plain, prompt_of(3), GREEDY)
    stop = next(token for token in tokens[3:] if tokens.index(token) % 5 == 3)
    params = replace(GREEDY, stop_token_ids=frozenset({stop}))
    engine = make_engine(tmp_path, CONFIG)
    assert alone(engine, prompt_of(3), params) == alone(plain, prompt_of(3), params) == tokens[: tokens.index(stop) + 1]


@pytest.mark.parametrize("own_size", [40, 75])
def test_a_vocabulary_of_another_size(tmp_path: Path, own_size: int) -> None:
    """Models of one family may pad it differently. Tokens that the draft model does not know are never guessed."""
    engine = make_engine(tmp_path, CONFIG | {"vocab_size": own_size})
    params = replace(DRAWN, logit_bias={59: 4.0}, presence_penalty=0.5)
    tokens = alone(engine, prompt_of(5), params)
    assert tokens == alone(make_engine(tmp_path, None), prompt_of(5), params)
    assert 59 in tokens
    assert engine.stats.num_draft_tokens > 0


def test_numbers_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model with broken weights guesses wrong, and nothing else."""
    engine = make_engine(tmp_path, CONFIG)
    draft_model = engine.executor._worker.drafter
    assert draft_model is not None
    model = draft_model._model
    compute = model.compute_logits
    monkeypatch.setattr(model, "compute_logits", lambda x_TD: compute(x_TD).fill_(float("nan")))
    params = replace(GREEDY, repetition_penalty=1.2)
    assert alone(engine, prompt_of(5), params) == alone(make_engine(tmp_path, None), prompt_of(5), params)
    assert engine.stats.num_draft_tokens > 0


@pytest.mark.parametrize("model", ["nowhere", "/nowhere/model.gguf"])
def test_a_model_that_is_not_there(tmp_path: Path, model: str) -> None:
    speculation = json.dumps({"model": model, "num_speculative_tokens": 4})
    with pytest.raises(ValueError, match=f"^speculative_config model: model '{model}'"):
        make_engine(tmp_path, None, speculative_config=speculation)


# -- when they catch up -----------------------------------------------------------------------------------------


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int, int]]:
    """Collects the parts of all steps: request, first, end, guesses."""
    collected: list[tuple[str, int, int, int]] = []
    draft = DraftModel.draft

    def collecting(self: DraftModel, parts: list[DraftPart]) -> list[list[int]]:
        collected.extend((part.seq.request_id, part.first, part.end, part.num_drafts) for part in parts)
        return draft(self, parts)

    monkeypatch.setattr(DraftModel, "draft", collecting)
    return collected


def test_a_long_prompt_is_read_in_pieces_while_the_answer_goes_on(
    tmp_path: Path, parts: list[tuple[str, int, int, int]]
) -> None:
    engine = make_engine(tmp_path, CONFIG)
    assert alone(engine, LONG_PROMPT, DRAWN) == alone(make_engine(tmp_path, None), LONG_PROMPT, DRAWN)
    assert parts[:3] == [("r", 0, 128, 0), ("r", 128, 256, 0), ("r", 256, 303, 4)]
    assert num_wrong(engine) == 0


def test_blocks_that_are_larger_than_what_a_step_should_read(
    tmp_path: Path, parts: list[tuple[str, int, int, int]]
) -> None:
    engine = make_engine(tmp_path, CONFIG, block_size=256, num_kv_blocks=8)
    assert len(alone(engine, LONG_PROMPT * 2, DRAWN)) == 30
    assert parts[:2] == [("r", 0, 512, 0), ("r", 512, 602, 4)]
    assert num_wrong(engine) == 0


def test_blocks_that_it_has_read_for_others_are_not_read_again(
    tmp_path: Path, parts: list[tuple[str, int, int, int]]
) -> None:
    """As in a conversation: the next prompt begins with the last one and its answer."""
    engine = make_engine(tmp_path, CONFIG)
    answer = alone(engine, LONG_PROMPT, DRAWN)
    parts.clear()
    further = LONG_PROMPT + answer + [9, 11]
    assert alone(engine, further, GREEDY) == alone(make_engine(tmp_path, None), further, GREEDY)
    assert parts[0][1] == 320, "of 330 tokens, it has read all whole blocks"
    assert num_wrong(engine) == 0
    parts.clear()
    engine.add_request("salted", LONG_PROMPT, GREEDY, cache_salt="another user's")
    finish(engine)
    assert parts[0][1] == 0, "nobody else's blocks"


def test_a_block_that_has_changed_hands_is_read_again(tmp_path: Path) -> None:
    """Many prompts, each of which evicts what others had: whatever the draft model finds of a prefix is right."""
    engine = make_engine(tmp_path, CONFIG, num_kv_blocks=14, max_model_len=200)
    for number in (*range(6), *range(6), 3, 3, 2):
        prompt = [number + 5, *LONG_PROMPT[: 60 + 20 * number]]
        assert len(alone(engine, prompt, DRAWN)) == 30
    assert num_wrong(engine) == 0
    assert engine.stats.num_prefix_hits_tokens > 0


def test_a_prompt_from_another_engine(tmp_path: Path, parts: list[tuple[str, int, int, int]]) -> None:
    prefill, decode = make_engine(tmp_path, None), make_engine(tmp_path, CONFIG)
    prompt = LONG_PROMPT[:150]
    expected = alone(make_engine(tmp_path, None), prompt, DRAWN)
    assert handed_over(prefill, decode, prompt, DRAWN) == expected
    assert parts[:2] == [("r", 0, 128, 0), ("r", 128, 152, 4)]
    assert num_wrong(decode) == 0


def test_blocks_from_host_memory_are_read_again(tmp_path: Path) -> None:
    settings = {"num_kv_blocks": 12, "max_model_len": 180, "kv_offloading_size": 0.01}
    with closing(make_engine(tmp_path, CONFIG, **settings)) as engine:
        for number in (0, 1, 2, 0, 1, 2):
            alone(engine, [number + 5, *LONG_PROMPT[:120]], DRAWN)
        assert engine.stats.num_loaded_blocks > 0
        assert num_wrong(engine) == 0


def test_no_guesses_beyond_its_positions(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, CONFIG | {"max_position_embeddings": 40})
    params = replace(GREEDY, max_tokens=60)
    assert alone(engine, prompt_of(2), params) == alone(make_engine(tmp_path, None), prompt_of(2), params)
    assert len(prompt_of(2)) == 7
    assert 20 < engine.stats.num_draft_tokens < 33
    assert num_wrong(engine) == 0


def test_neighbours_wait_for_no_guess(tmp_path: Path, parts: list[tuple[str, int, int, int]]) -> None:
    """With more decoding sequences than rows for guesses there are none, and nothing is read for them."""
    engine = make_engine(tmp_path, CONFIG)
    for number in range(16):
        engine.add_request(str(number), prompt_of(number % 3), replace(GREEDY, max_tokens=8))
    finish(engine)
    assert parts == []


# -- memory -----------------------------------------------------------------------------------------------------


def test_both_pools_share_the_memory_for_kv(tmp_path: Path) -> None:
    sizes = {"num_kv_blocks": 0, "kv_cache_gib": 0.02, "max_model_len": 512}
    plain, drafting = make_engine(tmp_path, None, **sizes), make_engine(tmp_path, SMALLER, **sizes)
    num_blocks = drafting.executor.kv_shape.num_blocks
    assert num_blocks == plain.executor.kv_shape.num_blocks * 2 // 3, "the draft model has one layer, the model two"
    draft_model = drafting.executor._worker.drafter
    assert draft_model is not None
    assert draft_model._runner is not None
    assert draft_model._runner._kv_pool.shape[1] == num_blocks
    assert alone(drafting, LONG_PROMPT, DRAWN) == alone(plain, LONG_PROMPT, DRAWN)
    with pytest.raises(
        ValueError, match=r"^speculative_config model: with it, kv_cache_gib must be at least 0\.000\d+, "
    ):
        make_engine(tmp_path, SMALLER, num_kv_blocks=0, kv_cache_gib=0.0003)


# -- several ranks ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rank_0_guesses_for_all(tmp_path: Path) -> None:
    with closing(make_engine(tmp_path, None, tensor_parallel_size=2)) as engine:
        expected = alone(engine, LONG_PROMPT, DRAWN)
    with closing(make_engine(tmp_path, CONFIG, tensor_parallel_size=2)) as engine:
        assert alone(engine, LONG_PROMPT, DRAWN) == expected
        assert engine.stats.num_accepted_tokens > 10
