"""A model, requests and a tokenizer for tests of which requests the router accepts."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from protos import tandem_inference_pb2 as pb
from router.generation_defaults import GenerationDefaults
from router.model_info import ModelInfo
from router.text.tokenizer import Tokenizer
from router.validation.request import validate
from rpc.errors import InvalidRequest

MODEL = ModelInfo(
    served_model_name="smol",
    max_model_len=100,
    vocab_size=1000,
    eos_token_ids=frozenset({2}),
    has_chat_template=True,
    defaults=GenerationDefaults(),
)
GREEDY = pb.SamplingParams(temperature=0)


def violations_of(request: pb.GenerateRequest, model: ModelInfo = MODEL) -> dict[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        validate(request, model)
    return {violation.field: violation.description for violation in caught.value.violations}


def text_request(**params: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hi", sampling_params=pb.SamplingParams(**params))


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<s>"])
    backend.post_processor = TemplateProcessing(single="<s>:0 $A:0", special_tokens=[("<s>", 256)])
    return Tokenizer(backend)
