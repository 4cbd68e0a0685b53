"""What a request leaves open is resolved as the proto says: by the model's default, or else by a fixed one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from validation_cases import MODEL

from protos import tandem_inference_pb2 as pb
from router.generation_defaults import GenerationDefaults
from router.validation.sampling import resolve_sampling

OPTIONAL_FIELDS = [field.name for field in pb.SamplingParams.DESCRIPTOR.fields if field.has_presence]


def test_every_optional_field_is_set() -> None:
    resolved = resolve_sampling(pb.SamplingParams(), MODEL, 40)
    absent = ["logprobs", "prompt_logprobs", "structured_outputs", "thinking_token_budget"]
    assert sorted(name for name in OPTIONAL_FIELDS if not resolved.HasField(name)) == absent, "nothing stands for none"
    given = pb.SamplingParams(
        **{name: getattr(resolved, name) for name in OPTIONAL_FIELDS if name not in ("seed", *absent)}
    )
    assert given == pb.SamplingParams(
        n=1,
        priority=0,
        max_tokens=60,
        min_tokens=0,
        temperature=1,
        top_p=1,
        top_k=0,
        min_p=0,
        presence_penalty=0,
        frequency_penalty=0,
        repetition_penalty=1,
        include_stop_str_in_output=False,
        ignore_eos=False,
        skip_special_tokens=True,
    )


def test_the_request_wins_over_the_model_and_the_model_over_the_default() -> None:
    defaults = GenerationDefaults(temperature=0.5, top_p=0.75, top_k=20, min_p=0.25, repetition_penalty=1.25)
    model = replace(MODEL, defaults=replace(defaults, max_new_tokens=10))
    resolved = resolve_sampling(pb.SamplingParams(), model, 40)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
    assert [getattr(resolved, name) for name in names] == [0.5, 0.75, 20, 0.25, 1.25, 10]
    zeros = pb.SamplingParams(temperature=0, top_p=1, top_k=0, min_p=0, repetition_penalty=1, max_tokens=30, seed=0)
    zeros.stop.append("x")
    zeros.logit_bias[3] = 1.5
    zeros.stop_token_ids.append(4)
    before = zeros.SerializeToString(deterministic=True)
    resolved = resolve_sampling(zeros, model, 40)
    assert [getattr(resolved, name) for name in names] == [0, 1, 0, 0, 1, 30]
    assert (resolved.seed, list(resolved.stop), dict(resolved.logit_bias)) == (0, ["x"], {3: 1.5})
    assert list(resolved.stop_token_ids) == [4]
    assert zeros.SerializeToString(deterministic=True) == before, "the client's message is not written to"


def test_an_open_max_tokens_has_room_for_min_tokens() -> None:
    model = replace(MODEL, defaults=GenerationDefaults(max_new_tokens=10))
    assert resolve_sampling(pb.SamplingParams(min_tokens=20), model, 40).max_tokens == 20
    assert resolve_sampling(pb.SamplingParams(), model, 95).max_tokens == 5


@pytest.mark.parametrize(("asked", "resolved"), [(4, 4), (5, 5), (6, 5), (1000, 5)])
def test_a_target_of_max_tokens_is_what_there_is_room_for(asked: int, resolved: int) -> None:
    params = pb.SamplingParams(max_tokens=asked, is_max_tokens_target=True)
    assert resolve_sampling(params, MODEL, 95).max_tokens == resolved


@pytest.mark.parametrize("asked", [{}, {"seed": -1}], ids=["absent", "vLLM's -1"])
def test_seeds_are_drawn_anew_and_fit_the_wire(asked: dict[str, int]) -> None:
    seeds = {resolve_sampling(pb.SamplingParams(**asked), MODEL, 1).seed for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("seed", [-(2**63), -2, 0, 2**63 - 1])
def test_other_seeds_are_the_requests_own(seed: int) -> None:
    assert resolve_sampling(pb.SamplingParams(seed=seed), MODEL, 1).seed == seed
