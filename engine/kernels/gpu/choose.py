"""Chooses the experts of each token in one launch: `engine.models.expert_choice.choose_experts`, one program per token.

The best experts are found one after the other; of equal ones, the one with the lowest number. A token's choice and
weights depend only on its own logits, which are added up in a fixed order.

Shapes: T tokens, E experts, G groups, S experts of a group, A experts of a token; G, S and A padded to powers of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.models.expert_choice import SMALLEST_SUM, Choice
from engine.models.experts_config import ExpertsConfig

NO_EXPERT: tl.constexpr = tl.constexpr(1 << 30)


def choose_experts(logits_TE: torch.Tensor, bias_E: torch.Tensor | None, config: ExpertsConfig) -> Choice:
    """See `engine.models.expert_choice.choose_experts`. `logits_TE` and `bias_E`: float32, contiguous. If logits
    include NaN, the choice is arbitrary but valid."""
    num_tokens, num_experts = logits_TE.shape
    num_chosen = config.num_experts_per_token
    experts_TA = logits_TE.new_empty(num_tokens, num_chosen, dtype=torch.int64)
    weights_TA = torch.empty_like(experts_TA, dtype=torch.float32)
    group_size = num_experts // config.num_groups
    _choose_kernel[(num_tokens,)](
        logits_TE, bias_E, experts_TA, weights_TA, config.scaling, SMALLEST_SUM,
        NUM_GROUPS=config.num_groups, GROUP_SIZE=group_size, NUM_CHOSEN_GROUPS=config.num_chosen_groups,
        NUM_CHOSEN=num_chosen, NORMS_WEIGHTS=config.norms_weights, BLOCK_G=triton.next_power_of_2(config.num_groups),
        BLOCK_S=triton.next_power_of_2(group_size), BLOCK_A=triton.next_power_of_2(num_chosen), num_warps=1,
    )  # fmt: skip
    return experts_TA, weights_TA


@triton.jit
def _choose_kernel(
    logits_ptr,
    bias_ptr,
    experts_ptr,
    weights_ptr,
    scaling,
    smallest_sum,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    NORMS_WEIGHTS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    """Program (token)."""
    NUM_EXPERTS: tl.constexpr = NUM_GROUPS * GROUP_SIZE
    token = tl.program_id(0).to(tl.int64)
    groups_G, places_S, choices_A = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_A)
    experts_GS = groups_G[:, None] * GROUP_SIZE + places_S[None, :]
    is_expert_GS = (groups_G < NUM_GROUPS)[:, None] & (places_S < GROUP_SIZE)[None, :]
    logits_GS = tl.load(logits_ptr + token * NUM_EXPERTS + experts_GS, mask=is_expert_GS, other=float("-inf"))
    if bias_ptr is None:
        scores_GS = tl.exp(logits_GS - tl.max(tl.max(logits_GS, 1), 0))
        scores_GS = scores_GS / tl.sum(tl.sum(scores_GS, 1), 0)
        preference_GS = scores_GS
    else:
        scores_GS = 1 / (1 + tl.exp(-logits_GS))
        preference_GS = scores_GS + tl.load(bias_ptr + experts_GS, mask=is_expert_GS, other=0.0)
    preference_GS = tl.where(is_expert_GS, preference_GS, float("-inf"))

    if NUM_CHOSEN_GROUPS < NUM_GROUPS:
        merit_G = tl.max(preference_GS, 1)
        if bias_ptr is not None:  # the sum of its best two
            is_best_GS = experts_GS == _first_of_rows(preference_GS, merit_G, experts_GS)[:, None]
            merit_G += tl.max(tl.where(is_best_GS, float("-inf"), preference_GS), 1)
        is_chosen_G = groups_G < 0
        for _ in tl.static_range(NUM_CHOSEN_GROUPS):
            left_G = tl.where(is_chosen_G, float("-inf"), merit_G)
            is_best_G = (left_G == tl.max(left_G, 0)) & ~is_chosen_G
            is_chosen_G = is_chosen_G | (groups_G == tl.min(tl.where(is_best_G, groups_G, NO_EXPERT), 0))
        preference_GS = tl.where(is_chosen_G[:, None], preference_GS, float("-inf"))

    chosen_A = tl.zeros([BLOCK_A], dtype=tl.int64)
    weights_A = tl.zeros([BLOCK_A], dtype=tl.float32)
    total = 0.0
    for choice in tl.static_range(NUM_CHOSEN):
        best_G = tl.max(preference_GS, 1)
        first_G = _first_of_rows(preference_GS, best_G, experts_GS)
        first = tl.min(tl.where(best_G == tl.max(best_G, 0), first_G, NO_EXPERT), 0)
        first = tl.minimum(first, NUM_EXPERTS - 1)  # with NaN, no element equals the maximum
        weight = tl.sum(tl.sum(tl.where(experts_GS == first, scores_GS, 0.0), 1), 0)
        preference_GS = tl.where(experts_GS == first, float("-inf"), preference_GS)
        chosen_A = tl.where(choices_A == choice, first.to(tl.int64), chosen_A)
        weights_A = tl.where(choices_A == choice, weight, weights_A)
        total += weight
    if NORMS_WEIGHTS:
        weights_A = weights_A / (total + smallest_sum)
    is_choice_A = choices_A < NUM_CHOSEN
    tl.store(experts_ptr + token * NUM_CHOSEN + choices_A, chosen_A, mask=is_choice_A)
    tl.store(weights_ptr + token * NUM_CHOSEN + choices_A, weights_A * scaling, mask=is_choice_A)


@triton.jit
def _first_of_rows(values_GS, best_G, experts_GS):
    """[G] the lowest expert number among those with the best value."""
    return tl.min(tl.where(values_GS == best_G[:, None], experts_GS, NO_EXPERT), 1)
