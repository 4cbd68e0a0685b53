"""A model that transformers' code computes, with the attention of the Triton kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from triton_device import DEVICE  # isort: skip - before the kernels

from engine_steps import arguments, logits_of_steps
from transformers_cases import GEMMA2

pytestmark = pytest.mark.usefixtures("one_thread")


def test_an_engine_computes_what_it_does_with_plain_torch(tmp_path: Path) -> None:
    """Steps are not recorded."""
    (tmp_path / "config.json").write_text(json.dumps(GEMMA2))
    ours = logits_of_steps(arguments(tmp_path, "triton", DEVICE), records=False)
    plain = logits_of_steps(arguments(tmp_path, "torch", DEVICE), records=False)
    for triton_logits, torch_logits in zip(ours, plain, strict=True):
        assert torch_logits.std() > 1e-2
        torch.testing.assert_close(triton_logits, torch_logits, rtol=1e-4, atol=1e-5)
