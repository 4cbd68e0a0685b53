"""Observes, in the step that transformers_probe.py watches, which modules rotate queries and keys in a way that our
kernels know, right before they attend.

    apply_rotary_pos_emb(q, k, cos, sin) ──> q', k' ──> attention

Nothing else may read q' and k', nor change q and k meanwhile: then whoever attends can rotate instead
(transformers_attention.py). What a function computes is found out with random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from engine.layers import rotated
from engine.models.rotations import cos_sin_of, in_halves
from engine.models.scores import ROTATIONS, Rotation

FUNCTION = "apply_rotary_pos_emb"
"""The name of such functions in transformers' code."""


def give_function(module: nn.Module, change: Callable[[Any], Any]) -> None:
    """Let the module's `forward` call `change(function)` instead of the function that rotates, if it calls one. Its
    code and that of others stay as they are."""
    forward = type(module).forward
    if "forward" in vars(module) or not isinstance(forward, FunctionType):
        return
    names = forward.__globals__
    if FUNCTION not in forward.__code__.co_names or FUNCTION not in names:
        return
    own = FunctionType(
        forward.__code__,
        names | {FUNCTION: change(names[FUNCTION])},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(own, module)


@dataclass(slots=True, eq=False)
class _Call:
    function: Any
    inputs: tuple[Any, ...]
    named: dict[str, Any]
    outputs: tuple[torch.Tensor, ...] = ()
    num_uses: int = 0
    """Of the outputs, by torch's functions."""
    attended_by: list[str] = field(default_factory=list)
    """The modules that attend with the outputs, once for each."""
    versions: list[int] = field(default_factory=list)

    def versions_now(self) -> list[int]:
        """How often the inputs were changed in place, as torch counts it."""
        return [x._version for x in self.inputs if isinstance(x, torch.Tensor)]


class WatchedRotations(TorchFunctionMode):
    """As a context, around the step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._calls: dict[str, list[_Call]] = {}
        self._made: dict[int, _Call] = {}
        self._attended: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, module in model.named_modules():
            calls = self._calls[name] = []
            give_function(module, partial(self._watched, calls))

    def attends(self, name: str, q_1NTH: torch.Tensor, k_1KTH: torch.Tensor) -> None:
        """A module attends with these."""
        self._attended[name] = (q_1NTH, k_1KTH)
        for call in (self._made.get(id(x)) for x in (q_1NTH, k_1KTH)):
            if call is not None:
                call.attended_by.append(name)
                call.num_uses += call.versions_now() != call.versions  # what is rotated later would be other numbers

    def of(self, name: str) -> Rotation | None:
        """After the step: how the module rotates what it attends with, if our kernels may do it."""
        calls = self._calls[name]
        if len(calls) != 1 or calls[0].num_uses or calls[0].attended_by != [name, name]:
            return None
        (call,) = calls
        if call.named.get("unsqueeze_dim", 1) != 1 or call.named.keys() - {"unsqueeze_dim"}:
            return None
        made, attended = call.outputs, self._attended[name]
        if len(made) != 2 or made[0] is not attended[0] or made[1] is not attended[1] or len(call.inputs) != 4:
            return None
        q, k, cos, sin = call.inputs
        _, _, num_tokens, head_dim = made[0].shape
        if q.shape != made[0].shape or k.shape != made[1].shape:
            return None
        if cos.ndim != 3 or cos.shape[:2] != (1, num_tokens) or sin.shape != cos.shape:
            return None
        if cos.dtype != sin.dtype or cos.dtype not in (q.dtype, torch.float32):
            return None
        return _rotation_of(call.function, head_dim, cos.shape[2])

    def __torch_function__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # Most attributes, such as a tensor's shape, do not tell its numbers.
        if getattr(func, "__name__", "") != "__get__" or isinstance(result, torch.Tensor):
            for value in torch.utils._pytree.tree_leaves((args, kwargs)):
                if id(value) in self._made:
                    self._made[id(value)].num_uses += 1
        return result

    def _watched(self, calls: list[_Call], function: Any) -> Any:
        def watched(*inputs: Any, **named: Any) -> Any:
            call = _Call(function, inputs, named)
            calls.append(call)
            outputs = function(*inputs, **named)
            call.versions = call.versions_now()
            if isinstance(outputs, tuple):
                call.outputs = outputs
                self._made |= {id(each): call for each in outputs}
            return outputs

        return watched


def _rotation_of(function: Any, head_dim: int, table_size: int) -> Rotation | None:
    """None: it computes something else."""
    generator = torch.Generator().manual_seed(1)
    q, k, cos, sin = (
        torch.randn(1, *shape, generator=generator, dtype=torch.float32)
        for shape in ((2, 3, head_dim), (1, 3, head_dim), (3, table_size), (3, table_size))
    )
    try:
        found = function(q, k, cos, sin)
    except Exception:  # its code may raise anything
        return None
    for rotation in ROTATIONS:
        if rotation.num_rotated(table_size) > head_dim or rotation.num_rotated(table_size) % 2:
            continue
        tables = cos_sin_of(rotation, cos, sin)
        is_same = [
            isinstance(theirs, torch.Tensor)
            and theirs.shape == x.shape
            and torch.allclose(
                in_halves(rotation, theirs, table_size).transpose(1, 2)[0],
                rotated(in_halves(rotation, x, table_size).transpose(1, 2)[0], tables),
                rtol=1e-5,
                atol=1e-5,
            )
            for theirs, x in zip(found, (q, k), strict=True)
        ]
        if all(is_same):
            return rotation
    return None
