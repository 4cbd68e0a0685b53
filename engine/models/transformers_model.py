"""A model that transformers' own code computes, over our paged pool.

Owns the weights, as transformers' modules. The tokens of all sequences are flattened into one text. transformers' code
calls our attention, which attends within each sequence. Nowhere else may a token see another, since they may belong to
two users. And transformers' code must take a token's place from its position id only. `_check_tokens_are_apart` tests
both when a model is made.

    forward(tokens) ──> transformers' body ──(layer i: q, k, v)──> AttentionBackend.project, attend ──> … ──> [T, D]
                                         └──(layers with a state)──> recurrent_layers.py, over RecurrentStates
    compute_logits  ──> the rest of its causal language model (transformers_head.py)

Shapes: T tokens, D hidden, V vocabulary, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from engine.attention import AttentionBackend
from engine.layers import HeadProjection
from engine.models.head_shape import HeadShape
from engine.models.layer import Features, OnLayer
from engine.models.parts import Parts
from engine.models.recurrent_layers import module_of
from engine.models.recurrent_states import RecurrentStates
from engine.models.rotation_probe import give_function
from engine.models.share import Share
from engine.models.transformers_attention import PagedAttention, PagedStep, ToItself
from engine.models.transformers_config import TransformersConfig
from engine.models.transformers_experts import FourBitExperts
from engine.models.transformers_head import Head

if TYPE_CHECKING:
    from engine.lora.adapters import Adapters

NUM_TRIED = 16
SAME = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Tolerance as a share of the largest number: rounding stays below it, a wrong position exceeds it."""


class TransformersModel:
    """Raises `ValueError` at construction if tokens see each other outside of attention."""

    def __init__(
        self,
        config: TransformersConfig,
        causal_lm: Any,
        backend: AttentionBackend[Any],
        parts: Parts,
        states: RecurrentStates | None,
        share: Share | None = None,
    ) -> None:
        """`causal_lm`: transformers' model on the device, with `PAGED` attention and its products replaced
        (engine/models/transformers_products.py). This modifies it further. `states`: of `config.recurrent_layers`; None
        if there are none. `share`: this rank's, whose heads `config` has; None: one rank has the whole model."""
        self.adapters: Adapters | None = parts.adapters
        self.states = states
        self.reads_back = False  # if it does read back, the configuration has already turned recording off
        for module in causal_lm.modules():
            if isinstance(module, FourBitExperts):
                module.compute_by(parts)
        for number, layer in enumerate(config.recurrent_layers):
            assert states is not None
            module = causal_lm.get_submodule(layer.name)
            causal_lm.set_submodule(layer.name, module_of(module, layer, number, states, parts.recurrent_ops))
        self._embedding = causal_lm.get_input_embeddings()
        self._body = causal_lm.get_submodule(config.body)
        attending = [causal_lm.get_submodule(module.name) for module in config.attention]
        self._head = Head(causal_lm, config.body)
        self._check_tokens_are_apart(attending, config, share)
        own = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        shapes = config.head_shapes or (own,) * len(attending)
        layers = config.pool_layers or tuple(range(len(attending)))
        self._step = PagedStep()
        for i, (module, of, shape) in enumerate(zip(attending, config.attention, shapes, strict=True)):
            heads = HeadProjection(*shape, q_norm=None, k_norm=None)
            has_own_keys = layers[i] not in layers[:i]
            rotation = of.rotation if has_own_keys else None
            if rotation is not None:
                give_function(module, lambda _theirs: self._step.rotate_later)
            module.tandem_attention = PagedAttention(
                i, layers[i], has_own_keys, of.scores, rotation, backend, heads, self._step, share
            )
        self._num_attending = len(attending)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        plan: Any,
        kv_pool: torch.Tensor,
        on_layer: OnLayer | None,
    ) -> torch.Tensor:
        """See `Model.forward`."""
        step = self._step
        step.begin(plan, kv_pool, on_layer)
        x_TD = self._hidden(token_ids, positions)
        assert step.num_attended == self._num_attending, "transformers' code took another way than it was seen to take"
        step.end()
        return x_TD

    def compute_logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        """See `Model.compute_logits`."""
        return self._head.logits(x_TD.unsqueeze(0)).squeeze(0)

    @property
    def embedding_VD(self) -> torch.Tensor:  # noqa: N802 - named for its axes
        weight_VD: torch.Tensor = self._embedding.weight.detach()
        return weight_VD

    def let_note(self, features: Features) -> None:
        """See `FeatureSource`."""
        layers = _layers_in(self._body, self._num_attending)

        def note_input(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x_1TD = args[0] if args else kwargs["hidden_states"]
            features.take(0, x_1TD[0], None)

        def note_output_of(number: int) -> Callable[..., None]:
            def note(_module: nn.Module, _args: Any, output: Any) -> None:
                x_1TD = output[0] if isinstance(output, tuple) else output
                features.take(number + 1, x_1TD[0], None)

            return note

        layers[0].register_forward_pre_hook(note_input, with_kwargs=True)
        for number, layer in enumerate(layers):
            if number + 1 in features.layers:
                layer.register_forward_hook(note_output_of(number))

    def _hidden(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = self._body(input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
        x_TD: torch.Tensor = output.last_hidden_state.squeeze(0)
        return x_TD

    def _first_hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, *, is_shared: bool) -> torch.Tensor:
        try:
            return self._hidden(token_ids, positions)
        except RuntimeError as error:
            if not is_shared or not any(word in str(error) for word in ("size", "shape", "stride")):
                raise
            raise ValueError(
                "tensor_parallel_size must be smaller for this model, or 1: its code does not go with the plan that "
                f"splits it: {str(error).splitlines()[0]}"
            ) from error

    def _check_tokens_are_apart(
        self, attending: list[nn.Module], config: TransformersConfig, share: Share | None
    ) -> None:
        """Let each token attend only to itself. Then a NaN in one token must not reach others, the same tokens in
        another order must give the same results in that order, and default positions must be 0, 1, 2 and so on."""
        for module in attending:
            module.tandem_attention = ToItself()  # type: ignore[assignment]
        device = self._embedding.weight.device
        num_tokens = min(NUM_TRIED, config.max_positions)
        if self.states is not None:
            self.states.reserve_decodes(num_tokens)  # each token by itself
        positions = torch.arange(num_tokens, device=device)
        # Take tokens from the end of the vocabulary, where special tokens are rare: padding tokens get own positions.
        tokens = (len(self._embedding.weight) - 1 - 3 * positions).clamp_min(0)
        x_TD = self._first_hidden(tokens, positions, is_shared=share is not None).float()
        hook = self._embedding.register_forward_hook(_poison_the_second)
        try:
            is_clean = self._hidden(tokens, positions).isfinite().all(dim=1).tolist()
        finally:
            hook.remove()
        if is_clean != [place != 1 for place in range(num_tokens)]:
            raise ValueError(
                "the model cannot be served: its tokens see each other outside of attention, or its numbers are not "
                "finite"
            )
        backwards_TD = self._hidden(tokens.flip(0), positions.flip(0)).float().flip(0)
        by_itself = self._body(input_ids=tokens.unsqueeze(0), use_cache=False).last_hidden_state.squeeze(0).float()
        tolerance = SAME[self._embedding.weight.dtype] * x_TD.abs().max()
        if (backwards_TD - x_TD).abs().max() > tolerance:
            raise ValueError(
                "the model cannot be served: in transformers' code a token's place in the step counts, not its position"
            )
        if (by_itself - x_TD).abs().max() > tolerance:
            raise ValueError(
                "the model cannot be served: transformers' code does not count its positions from 0, by ones"
            )


def _layers_in(body: nn.Module, num_layers: int) -> list[nn.Module]:
    found = [each for each in body.children() if isinstance(each, nn.ModuleList) and len(each) == num_layers]
    if len(found) != 1:
        raise ValueError(
            f"an EAGLE-3 head reads hidden states between {num_layers} layers, and the model has no such list"
        )
    return list(found[0])


def _poison_the_second(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """[1, T, D]"""
    output = output.clone()
    output[:, 1] = float("nan")
    return output
