"""Our RMS norms in place of transformers': one pass over a row, where its code takes eight or more.

Norms are found by what they compute. A copy of a module that may be one, on the host, gets random rows and weights; if
it computes what one of our forms does, the form takes over its weight. Anything else stays: norms that subtract a mean,
that are gated, or that add something of their own.

Rows in another dtype than the model's are transformers' to compute: our kernels have one dtype for all.

Shapes: T rows, D numbers of a row.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.layers import RMSNorm
from engine.models.product_modules import Direct

EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
SIZES_OF_ROWS = (1.0, 1e-3, 30.0, 0.1)
"""Of one of about 0.001, epsilon is a large part."""
SIZE_WITHOUT_WEIGHT = 64
MOST_THAT_DIFFER = 0.02
"""Of all numbers, where a sum in another order rounds otherwise. The two ways to round differ in a quarter of them."""


class Form(NamedTuple):
    offset: float
    """Added to the weight, as in Gemma."""
    rounds_first: bool
    """Before the weight is multiplied, as in Llama."""


FORMS = (Form(0.0, True), Form(0.0, False), Form(1.0, False))


def replace_norms(causal_lm: nn.Module, rms_norm: type[RMSNorm], dtype: torch.dtype) -> None:
    """`rms_norm`: the part that computes norms; if it is plain torch, all stay as they are. `dtype`: the model's."""
    if rms_norm is RMSNorm:
        return
    for path, module in list(causal_lm.named_modules()):
        eps = _eps_of(module)
        if eps is None:
            continue
        weight_D: torch.Tensor | None = getattr(module, "weight", None)
        form = _form_of(module, eps, dtype)
        if form is not None:
            norm = _OfAnySize(rms_norm, eps) if weight_D is None else rms_norm(_weight(weight_D.data, form), eps)
            causal_lm.set_submodule(path, _Norm(norm, module, dtype))


class _Norm(Direct):
    """One of our norms, in place of transformers' module."""

    def __init__(self, norm: Any, replaced: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self._norm, self._replaced, self._dtype = norm, replaced, dtype

    @property
    def weight(self) -> torch.Tensor:
        """As transformers' code has it. Nemotron-H's asks for its dtype."""
        weight_D: torch.Tensor = self._replaced.weight
        return weight_D

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._norm(x) if x.dtype == self._dtype else self._replaced(x)
        return y


class _OfAnySize:
    """A norm without a weight."""

    def __init__(self, rms_norm: type[RMSNorm], eps: float) -> None:
        self._rms_norm, self._eps = rms_norm, eps
        self._of_size: dict[int, RMSNorm] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1]
        if size not in self._of_size:  # never in a step that is recorded: others come before it
            self._of_size[size] = self._rms_norm(x.new_ones(size), self._eps)
        return self._of_size[size](x)


def _eps_of(module: nn.Module) -> float | None:
    """None: the module is no norm that we could replace."""
    if "Norm" not in type(module).__name__ or [*module.children(), *module.buffers()]:
        return None
    parameters = dict(module.named_parameters())
    if parameters.keys() - {"weight"} or any(each.ndim != 1 for each in parameters.values()):
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    found = [getattr(module, name, None) for name in EPS_NAMES]
    return next((eps for eps in found if isinstance(eps, float)), None)


def _form_of(module: Any, eps: float, dtype: torch.dtype) -> Form | None:
    """None: it computes something else of rows in the model's dtype."""
    generator = torch.Generator().manual_seed(1)
    tried, weight_D = copy.copy(module), torch.ones(SIZE_WITHOUT_WEIGHT, dtype=torch.float32)
    if (own_D := getattr(module, "weight", None)) is not None:
        weight_D = torch.randn(len(own_D), generator=generator, dtype=torch.float32).to(own_D.dtype)
        tried._parameters = {"weight": nn.Parameter(weight_D, requires_grad=False)}
    size = len(weight_D)
    sizes_T = torch.tensor(SIZES_OF_ROWS, dtype=torch.float32)
    x_1TD = torch.randn(1, len(sizes_T), size, generator=generator, dtype=torch.float32) * sizes_T[:, None]
    x_1TD = x_1TD.to(dtype)
    try:
        found = tried(x_1TD)
    except Exception:  # its code may raise anything with rows of another shape
        return None
    if not isinstance(found, torch.Tensor) or found.dtype != dtype or found.shape != x_1TD.shape:
        return None
    # Where a sum in another order rounds otherwise, a number is the next one, or the next but one.
    same, close = (1e-5, 1e-5) if dtype == torch.float32 else (0.0, 2 * torch.finfo(dtype).eps)
    for form in FORMS:
        ours = RMSNorm(_weight(weight_D, form), eps)(x_1TD)
        num_other = (~torch.isclose(ours, found, rtol=same, atol=0.0)).float().mean()
        if num_other <= MOST_THAT_DIFFER and torch.allclose(ours, found, rtol=close, atol=0.0):
            return form
    return None


def _weight(weight_D: torch.Tensor, form: Form) -> torch.Tensor:
    return weight_D.contiguous() if form.rounds_first else weight_D.float() + form.offset
