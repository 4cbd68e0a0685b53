"""The tokenizer that both offline interfaces return: transformers' own, which would run a checkpoint's code if allowed
to."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

from tandem.offline_inputs import OfflineInputs


def test_no_code_of_a_checkpoint_is_run_and_nobody_is_asked_whether_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_no_tokenizer = [config for config in MODEL_FOR_CAUSAL_LM_MAPPING if config not in TOKENIZER_MAPPING]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": of_no_tokenizer[0].model_type}))
    described = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    marker = tmp_path / "ran"
    (tmp_path / "mine.py").write_text(f"open({str(marker)!r}, 'w')\nclass Mine: ...\n")
    asked: list[object] = []
    monkeypatch.setattr("builtins.input", lambda *prompt: asked.append(prompt) or "y")
    inputs = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(path=tmp_path)), _callers_tokenizer=None)
    with pytest.raises(ValueError, match="custom code"):
        OfflineInputs.callers_tokenizer(cast(OfflineInputs, inputs))
    assert not asked
    assert not marker.exists()
