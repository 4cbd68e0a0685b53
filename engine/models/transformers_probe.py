"""Observes transformers' code in a step of a model without weights, to learn what it computes.

    config.json ──causal_lm_config──> transformers' config ──watch_a_step──> Step, or ValueError that says why not

The model is on torch's meta device, which has shapes without numbers: 70 billion parameters take a second and no
memory. Our own attention (by transformers' `AttentionInterface`) and masks (by `AttentionMaskInterface`) record their
arguments and compute nothing.

A model can be served if its tokens interact only in attention, once per layer, causally, in full or in a sliding
window, with keys and values of one size. That tokens do not interact elsewhere can only be tested with weights:
engine/models/transformers_model.py does that. Some layers that keep a state are replaced by our own
(recurrent_probe.py).
"""

from __future__ import annotations

import inspect
import json
import math
import tempfile
import threading
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from engine.models.head_shape import HeadShape, pool_shape, why_not_together
from engine.models.mask_probe import watched_mask, window_of
from engine.models.product_probe import WatchedProducts, splits_of
from engine.models.recurrent_probe import CannotServeError, take_recurrent_layers, why_not_its_states
from engine.models.recurrent_shape import RecurrentLayer
from engine.models.replaced_experts import sizes_of_experts
from engine.models.rotation_probe import WatchedRotations
from engine.models.scores import AttentionModule, Scores
from engine.models.split import Split
from engine.models.stored_weights import QUANTIZATIONS
from engine.models.transformers_head import Head
from engine.models.transformers_products import is_product, sizes_of_products

WATCHED = "tandem_watched"
"""The name of the recording attention in transformers."""
NUM_TOKENS = 5
MOST_LAYERS = 1024
"""Making one layer without weights takes a millisecond or two."""
MAKING = threading.RLock()
"""While transformers makes a model, it changes torch's default dtype for all threads: two at once might not restore it,
and code that is watched meanwhile would compute in another dtype."""
SINKS = "s_aux"
"""transformers' name of attention sinks: scores without values, one per query head."""
KEEPING_NOTHING = frozenset({"mlp", "moe"})
"""transformers' kinds of layers that only feed forward, which Nemotron-H has."""
STATELESS_KINDS = KEEPING_NOTHING | {"full_attention"}
HARMLESS = frozenset({
    "scaling", "softcap", "sliding_window", "dropout", "position_ids", "use_cache", "output_attentions", "is_causal",
    SINKS,
})  # fmt: skip
"""Attention arguments that are read here, that repeat what the masks say, or that change nothing."""


@dataclass(frozen=True, slots=True)
class Step:
    attention: tuple[AttentionModule, ...]
    """In the order of the calls."""
    recurrent_layers: tuple[RecurrentLayer, ...]
    pool_layers: tuple[int, ...]
    """Where each module's keys and values are in the pool, if some modules attend to those of others."""
    heads: HeadShape
    """The pool's."""
    head_shapes: tuple[HeadShape, ...]
    """Each module's, if they differ."""
    hidden_size: int
    vocab_size: int
    num_expert_tensors: int
    num_fixed_expert_tensors: int
    expert_sizes: tuple[tuple[int, int], ...]
    products: tuple[tuple[int, int], ...]
    adaptable: tuple[str, ...]
    siblings: tuple[tuple[str, ...], ...]
    splits: tuple[Split, ...]
    """For these see `TransformersConfig`."""
    body: str


def causal_lm_config(hf_config: dict[str, Any]) -> Any:
    """Return transformers' configuration of a causal language model. Raises `ValueError` if it has no code for it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names, model_type = hf_config.get("architectures") or [], hf_config.get("model_type")
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) if isinstance(model_type, str) else None
    if name is None or name not in names:
        raise ValueError(
            f"config.json: architecture {', '.join(names) or '(none given)'} with model_type {model_type!r} is not "
            f"supported: transformers {transformers.__version__} has no causal language model of that name"
        )
    # We handle quantization ourselves.
    plain = {field: value for field, value in hf_config.items() if field not in QUANTIZATIONS}
    try:
        # From a file: there transformers also reads infinities, which JSON lacks.
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(json.dumps(plain))
            file.flush()
            config = CONFIG_MAPPING[model_type].from_json_file(file.name)
    except Exception as error:  # whatever its checks raise
        raise ValueError(f"config.json: transformers {transformers.__version__} refuses it: {error}") from error
    num_layers = getattr(config, "num_hidden_layers", 0)
    if isinstance(num_layers, int) and num_layers > MOST_LAYERS:
        raise ValueError(f"config.json: num_hidden_layers must be at most {MOST_LAYERS}, is {num_layers}")
    return config


@torch.inference_mode(mode=False)  # in which tensors do not say whether they were changed
@torch.no_grad()
def watch_a_step(config: Any, max_positions: int) -> Step:
    """Run a step without weights and record it. Raises `ValueError` that says what cannot be served."""
    with MAKING:
        return _watch_a_step(config, max_positions)


def _watch_a_step(config: Any, max_positions: int) -> Step:
    name = type(config).__name__.removesuffix("Config")
    calls: list[_Call] = []
    other_states = ""
    try:
        model = model_without_weights(config)
        body = _body_of(model)
        whole_body = model.get_submodule(body)
        watched = WatchedProducts(whole_body, body)
        recurrent_layers = take_recurrent_layers(model)
        num_expert_tensors, num_fixed = _num_expert_tensors(model)
        expert_sizes = _expert_sizes(model)
        products = sizes_of_products(model)
        # Why such code fails without numbers, or attends in too few layers.
        other_states = "" if recurrent_layers else why_not_its_states(model)
        rotations = WatchedRotations(model)
        for module_name, module in model.named_modules():
            module.tandem_watcher = _Watcher(module_name, calls, max_positions, rotations)
        with rotations:
            hidden_1TD = _hidden_states(model, body, has_recurrent_layers=len(recurrent_layers) > 0)
        if not calls:
            raise CannotServeError(
                other_states
                or "its attention is its own: none of its layers attends by transformers' attention interface"
            )
        if not _takes_positions(whole_body):
            raise CannotServeError("its code counts positions by itself, and takes none")
        logits_1TV = Head(model, body).logits(hidden_1TD)
    except CannotServeError as error:
        raise ValueError(f"config.json: {name} models cannot be served: {error}") from error
    except Exception as error:  # transformers' code may raise anything
        why_not = other_states or _meaning_of(error)
        raise ValueError(f"config.json: {name} models cannot be served: {why_not}") from error
    why_not = _why_not(
        calls, getattr(config, "num_hidden_layers", 0) - _num_that_do_not_attend(config, calls, recurrent_layers)
    )
    if why_not:
        raise ValueError(f"config.json: {name} models cannot be served: {other_states or why_not}")
    return Step(
        attention=tuple(
            AttentionModule(
                name=call.name, scores=call.scores, has_sinks=call.has_sinks, rotation=rotations.of(call.name)
            )
            for call in calls
        ),
        recurrent_layers=recurrent_layers,
        pool_layers=_pool_layers(calls),
        heads=pool_shape(call.heads for call in calls),
        head_shapes=tuple(call.heads for call in calls) if len({call.heads for call in calls}) > 1 else (),
        hidden_size=hidden_1TD.shape[-1],
        vocab_size=logits_1TV.shape[-1],
        num_expert_tensors=num_expert_tensors,
        num_fixed_expert_tensors=num_fixed,
        expert_sizes=expert_sizes,
        products=products,
        adaptable=watched.adaptable(recurrent_layers, NUM_TOKENS),
        siblings=watched.siblings(),
        splits=()
        if recurrent_layers
        else splits_of(config, whole_body, body, {call.name: call.heads for call in calls}),
        body=body,
    )


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    keys: torch.Tensor
    values: torch.Tensor
    heads: HeadShape
    scores: Scores
    has_sinks: bool


@dataclass(frozen=True, slots=True)
class _Watcher:
    """An attribute of every module, by which the attention function, which is passed a module, learns its name."""

    name: str
    calls: list[_Call]
    max_positions: int
    rotations: WatchedRotations

    def note(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, arguments: dict[str, Any]) -> None:
        """q [1, N, T, H], k and v [1, K, T, H]"""
        if why_not := _why_not_call(q, k, v, mask, arguments):
            raise CannotServeError(why_not)
        if mask.window is None:  # layers share masks, and a million positions take some milliseconds
            mask.window = window_of(mask.function, self.max_positions)
        self.rotations.attends(self.name, q, k)
        head_dim, scale = q.shape[3], arguments.get("scaling")
        self.calls.append(
            _Call(
                name=self.name,
                keys=k,
                values=v,
                heads=HeadShape(q.shape[1], k.shape[1], head_dim),
                scores=Scores(
                    scale=head_dim**-0.5 if scale is None else float(scale),
                    sliding_window=mask.window,
                    soft_cap=float(arguments.get("softcap") or 0.0),
                ),
                has_sinks=arguments.get(SINKS) is not None,
            )
        )


def _why_not_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, arguments: dict[str, Any]) -> str:
    """What one call requires that our attention does not have, as a clause; empty if nothing."""
    further = sorted(
        n for n, value in arguments.items() if n not in HARMLESS and value is not None and value is not False
    )
    if further:
        return f"its attention asks for {', '.join(further)}, which our backends do not have"
    if arguments.get("is_causal") is False:
        return "its attention is not causal"
    if k.shape != v.shape or q.shape[2:] != k.shape[2:] or q.shape[2] != NUM_TOKENS:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        return f"queries, keys and values must have heads of one size, are {shapes}"
    soft_cap = arguments.get("softcap")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        return f"its attention caps its scores at {soft_cap} (attn_logit_softcapping), by which it would divide"
    sinks = arguments.get(SINKS)
    if sinks is not None and sinks.shape != q.shape[1:2]:
        return f"its attention has sinks of shape {list(sinks.shape)}, not one for each query head"
    return "it makes its masks by itself" if getattr(mask, "function", None) is None else ""


def _watched_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **arguments: Any
) -> tuple[torch.Tensor, None]:
    module.tandem_watcher.note(query, key, value, attention_mask, arguments)
    batch, num_heads, num_tokens, head_dim = query.shape
    return torch.empty(batch, num_tokens, num_heads, head_dim, dtype=query.dtype, device=query.device), None


AttentionInterface.register(WATCHED, _watched_attention)
AttentionMaskInterface.register(WATCHED, watched_mask)


def model_without_weights(config: Any) -> Any:
    """transformers' model of tensors without data, which can take a step."""
    with MAKING, torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=WATCHED, dtype=torch.get_default_dtype(), trust_remote_code=False
        )
    # On the meta device, experts' grouped products support no other dtype.
    return model.eval().to(torch.bfloat16)


def _body_of(model: Any) -> str:
    """Name of the module whose last hidden state is the head's input."""
    decoder = model.get_decoder()
    body = model.base_model if is_product(decoder) else decoder  # ModernBERT's "decoder" is its logits' product
    names = [name for name, module in model.named_modules() if module is body]
    if not names or not names[0]:
        raise CannotServeError("it has no part that makes hidden states alone")
    return str(names[0])


def _takes_positions(decoder: Any) -> bool:
    return "position_ids" in inspect.signature(decoder.forward).parameters


def _hidden_states(model: Any, body: str, *, has_recurrent_layers: bool) -> torch.Tensor:
    tokens = torch.zeros(1, NUM_TOKENS, dtype=torch.long, device="meta")
    decoder = model.get_submodule(body)
    positions = {"position_ids": tokens} if _takes_positions(decoder) else {}
    hidden_1TD: torch.Tensor = decoder(
        input_ids=tokens,
        attention_mask=_masks_of(model, tokens, has_recurrent_layers),
        use_cache=False,
        **positions,
    ).last_hidden_state
    if hidden_1TD.ndim != 3 or hidden_1TD.shape[:2] != tokens.shape:
        raise CannotServeError(f"hidden states have shape {list(hidden_1TD.shape)}")
    return hidden_1TD


def _masks_of(model: Any, tokens: torch.Tensor, has_recurrent_layers: bool) -> Any:
    """The tokens, all of which are there, or with layers that keep a state the mask of each kind of layer: to make one
    for those layers, transformers' code would look whether all tokens are there. It does so even if a model of such a
    family has none of them (Granite 4 Micro)."""
    kinds = set(getattr(model.config, "layer_types", None) or ())
    has_none_of_its_family = getattr(model, "_is_stateful", False) and bool(kinds) and kinds <= STATELESS_KINDS
    if not has_recurrent_layers and not has_none_of_its_family:
        return tokens
    embeds = torch.empty(*tokens.shape, model.config.hidden_size, device="meta")
    causal = transformers.masking_utils.create_causal_mask(
        config=model.config, inputs_embeds=embeds, attention_mask=tokens, past_key_values=None, position_ids=tokens
    )
    return {"full_attention": causal, "linear_attention": None, "conv": None}


def _num_expert_tensors(model: Any) -> tuple[int, int]:
    """How many weights hold one product of all experts, and how many of these are of experts that we cannot replace. A
    convolution's weight has three dims, too."""
    num, num_fixed = 0, 0
    for module in model.modules():
        num_own = sum(parameter.ndim == 3 for parameter in module.parameters(recurse=False))
        if num_own and not isinstance(module, nn.Conv1d):
            num += num_own
            num_fixed += num_own if sizes_of_experts(module) is None else 0
    return num, num_fixed


def _expert_sizes(model: Any) -> tuple[tuple[int, int], ...]:
    found = (sizes_of_experts(module) for module in model.modules())
    return tuple(sorted({(sizes.hidden_size, sizes.intermediate_size) for sizes in found if sizes is not None}))


def _meaning_of(error: Exception) -> str:
    """What an exception in a step without weights means, as a clause."""
    if isinstance(error, KeyError) and WATCHED in str(error):
        return "their code takes no attention but its own"
    if "meta tensor" in str(error):
        return (
            "in the middle of a step their code reads values, as it does where layers keep a state, or where "
            "rotations depend on the longest text of a batch"
        )
    line = (str(error).splitlines() or [""])[0]
    return f"transformers' code, without weights, ends with {type(error).__name__}: {line}"


def _pool_layers(calls: list[_Call]) -> tuple[int, ...]:
    """One layer of the pool for each call with keys of its own; a call that is passed the very keys and values of an
    earlier one attends to that one's layer (Gemma 4). Empty if all have their own."""
    layers: list[int] = []
    own: list[_Call] = []
    for call in calls:
        earlier = (layer for layer, of in enumerate(own) if of.keys is call.keys and of.values is call.values)
        layers.append(next(earlier, len(own)))
        if layers[-1] == len(own):
            own.append(call)
    return tuple(layers) if len(own) < len(calls) else ()


def _num_that_do_not_attend(config: Any, calls: list[_Call], recurrent_layers: tuple[RecurrentLayer, ...]) -> int:
    """How many layers need not attend: those that keep a state and nothing else (Falcon-H1's do both), and those that
    keep nothing, which only Nemotron-H has."""
    attending = {call.name.rpartition(".")[0] for call in calls}
    num_alone = sum(layer.name.rpartition(".")[0] not in attending for layer in recurrent_layers)
    kinds = getattr(config, "layers_block_type", None) or ()
    return num_alone + sum(kind in KEEPING_NOTHING for kind in kinds)


def _why_not(calls: list[_Call], num_layers: int) -> str:
    """Why the recorded calls, at least one, cannot be served, as a clause; empty if they can."""
    names = [call.name for call in calls]
    if len(set(names)) != len(names):
        return "a layer attends more than once in a step"
    if len(calls) != num_layers:
        return f"{len(calls)} attentions in {num_layers} layers: the others keep something other than keys and values"
    shapes = {call.heads for call in calls}
    for num_heads, num_kv_heads, head_dim in shapes:
        if num_heads % num_kv_heads or head_dim % 2:
            return f"{num_heads} query heads, {num_kv_heads} key heads of size {head_dim}"
    return why_not_together(shapes)
