"""How prompts become tokens, and which bounds hold for those."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from validation_cases import GREEDY, MODEL, byte_tokenizer, text_request, violations_of

from protos import tandem_inference_pb2 as pb
from router.text.chat_template import ChatTemplate
from router.validation.prompt import (
    INLINE_RENDER_CHARS,
    ChatPrompt,
    TextPrompt,
    TokenIdsPrompt,
    tokenize_prompt,
)
from router.validation.request import check_prompt_length, validate
from router.validation.tokens import prompt_to_tokenize
from rpc.errors import InvalidRequest


async def test_text_gets_bos_and_chats_get_what_the_template_writes() -> None:
    tokenizer = byte_tokenizer()
    template = ChatTemplate("<s>{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}")
    text = validate(pb.GenerateRequest(text="hi"), MODEL)
    assert (
        (await tokenize_prompt(text.prompt, tokenizer, None)).token_ids
        == tokenizer.encode("hi")
        == [256, *tokenizer.encode("hi", False)]
    )
    ids = validate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7, 8])), MODEL)
    assert (await tokenize_prompt(ids.prompt, tokenizer, None)).token_ids == [7, 8]
    chat = validate(pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="u", content="x")])), MODEL)
    assert (await tokenize_prompt(chat.prompt, tokenizer, template)).token_ids == [256, *tokenizer.encode("u:x", False)]
    long = pb.Chat(messages=[pb.ChatMessage(role="u", content="x" * (INLINE_RENDER_CHARS + 1))])
    num_tokens = len(
        (await tokenize_prompt(validate(pb.GenerateRequest(chat=long), MODEL).prompt, tokenizer, template)).token_ids
    )
    assert num_tokens == INLINE_RENDER_CHARS + 1 + len("u:") + 1


@pytest.mark.parametrize(
    ("num_kept", "params", "num_tokens"),
    [
        (60, {}, 60),
        (-1, {}, 99),
        (-1, {"max_tokens": 30}, 70),
        (-1, {"max_tokens": 200, "is_max_tokens_target": True}, 99),
        (-1, {"min_tokens": 40}, 60),
        (None, {}, 120),
    ],
)
async def test_of_a_long_prompt_the_end_is_used(num_kept: int | None, params: dict[str, int], num_tokens: int) -> None:
    """-1: as many tokens as the answer leaves of the context."""
    ids = pb.TokenIds(ids=range(120))
    sampling = pb.SamplingParams(**params)
    request = pb.GenerateRequest(token_ids=ids, truncate_prompt_tokens=num_kept, sampling_params=sampling)
    if num_kept is None:
        assert "must be at most 99 tokens" in violations_of(request)["token_ids"]
        return
    validated = validate(request, MODEL)
    prompt = await tokenize_prompt(validated.prompt, byte_tokenizer(), None, num_kept=validated.num_kept_tokens(MODEL))
    assert prompt.token_ids == [*range(120)][-num_tokens:]
    check_prompt_length(validated, len(prompt.token_ids), MODEL)
    short = await tokenize_prompt(
        TokenIdsPrompt((7, 8)), byte_tokenizer(), None, num_kept=validated.num_kept_tokens(MODEL)
    )
    assert short.token_ids == [7, 8]
    text = await tokenize_prompt(
        TextPrompt("x" * 200), byte_tokenizer(), None, num_kept=validated.num_kept_tokens(MODEL)
    )
    assert text.token_ids == [256, *byte_tokenizer().encode("x" * (num_tokens - 1), False)]


@pytest.mark.parametrize("num_kept", [0, -2, 101])
def test_how_much_of_a_prompt_is_used_has_bounds(num_kept: int) -> None:
    said = violations_of(pb.GenerateRequest(text="hi", truncate_prompt_tokens=num_kept))
    bound = f"must be in [1, 100] (the context), or -1 for as many as fit, is {num_kept}"
    assert said == {"truncate_prompt_tokens": bound}


def test_how_a_chat_ends_is_said_once() -> None:
    message = pb.ChatMessage(role="assistant", content="a")
    both = pb.Chat(messages=[message], add_generation_prompt=True, continue_final_message=True)
    assert (
        "cannot be combined with add_generation_prompt"
        in violations_of(pb.GenerateRequest(chat=both))["chat.continue_final_message"]
    )
    special = pb.GenerateRequest(chat=pb.Chat(messages=[message]), add_special_tokens=True)
    assert violations_of(special) == {
        "add_special_tokens": "is only for text prompts: in a chat, the template adds special tokens"
    }


@pytest.mark.parametrize("add_special_tokens", [None, True, False])
async def test_a_text_that_is_only_tokenised_gets_bos_unless_it_is_asked_for_without(
    add_special_tokens: bool | None,
) -> None:
    tokenizer = byte_tokenizer()
    request = pb.TokenizeRequest(text="hi", add_special_tokens=add_special_tokens)
    to_answer = validate(pb.GenerateRequest(text="hi", add_special_tokens=add_special_tokens), MODEL).prompt
    assert to_answer == prompt_to_tokenize(request, MODEL)
    token_ids = (await tokenize_prompt(to_answer, tokenizer, None)).token_ids
    assert token_ids == [*([] if add_special_tokens is False else [256]), *tokenizer.encode("hi", False)]


SHOWS_PARTS = (
    "{% macro text_of(said) %}{% if said is string %}{{ said }}{% else %}{% for part in said %}"
    "{{ part.text | trim }}{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}{{ text_of(m.content) }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{% for m in messages %}{{ m.content }};{% endfor %}", "a\nb;c\nd;"),
        ("{% for m in messages %}{{ m.content + ';' }}{% endfor %}", "a\nb;c\nd;"),
        ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", '"a\\nb""c\\nd"'),
        (SHOWS_PARTS, "abc\nd"),
        (SHOWS_PARTS.replace("}}{% endfor %}{% endif", "}}, {% endfor %}{% endif"), "a, bc\nd"),
    ],
    ids=["a text, or Python's words", "a text alone", "a text, or JSON", "parts", "parts, apart"],
)
def test_parts_of_a_content_are_put_together_as_the_template_does_it(source: str, shown: str) -> None:
    """As in vLLM: templates that take a text get one line per part, and so do all templates for a tool's message. An
    empty part is left out."""
    template = ChatTemplate(source)
    said = [pb.ChatMessage(role="user", parts=["a", "", "b"]), pb.ChatMessage(role="tool", parts=["c", "d"])]
    validated = validate(pb.GenerateRequest(chat=pb.Chat(messages=said)), MODEL.with_chat(template, "auto"))
    assert isinstance(validated.prompt, ChatPrompt)
    assert template.render(validated.prompt.messages) == shown
    twice = pb.ChatMessage(role="user", content="a", parts=["b"])
    assert violations_of(pb.GenerateRequest(chat=pb.Chat(messages=[twice]))) == {
        "chat.messages[0].parts": "cannot be combined with content; give one of them"
    }


async def test_a_chat_that_the_template_refuses_names_the_chat() -> None:
    chat = validate(pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="judge", content="x")])), MODEL)
    template = ChatTemplate("{{ raise_exception('unknown role ' + messages[0].role) }}")
    with pytest.raises(InvalidRequest) as caught:
        await tokenize_prompt(chat.prompt, byte_tokenizer(), template)
    [(field, description)] = caught.value.violations
    assert (field, description) == ("chat", "the model's template refuses these messages: unknown role judge")


async def test_prompts_far_too_long_name_their_field_whatever_they_are_of() -> None:
    tokenizer, template = byte_tokenizer(), ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    text = "x" * 100_000
    for request in (
        pb.GenerateRequest(text=text),
        pb.GenerateRequest(chat=pb.Chat(messages=[{"role": "u", "content": text}])),
    ):
        prompt = validate(request, MODEL).prompt
        with pytest.raises(InvalidRequest) as caught:
            await tokenize_prompt(prompt, tokenizer, template, max_model_len=100)
        [(field, description)] = caught.value.violations
        assert field == request.WhichOneof("prompt")
        assert description.startswith("must be at most 99 tokens (a context of 100, 1 for the answer), has ")
        assert len((await tokenize_prompt(prompt, tokenizer, template)).token_ids) >= 100_000, "as long as it may be"


@pytest.mark.parametrize(
    ("params", "num_prompt_tokens", "expected"),
    [
        ({}, 99, {}),
        ({}, 0, {"text": "must give at least 1 token, gives 0"}),
        ({}, 100, {"text": "must be at most 99 tokens (a context of 100, 1 for the answer), has 100"}),
        ({"max_tokens": 60}, 40, {}),
        ({"max_tokens": 61, "is_max_tokens_target": True}, 40, {}),
        ({"max_tokens": 1000, "is_max_tokens_target": True}, 99, {}),
        (
            {"max_tokens": 61, "min_tokens": 61, "is_max_tokens_target": True},
            40,
            {
                "sampling_params.min_tokens": "must be at most 60 (the context of 100 tokens minus the prompt of 40), "
                "is 61"
            },
        ),
        (
            {"max_tokens": 61, "min_tokens": 61},
            40,
            {
                f"sampling_params.{n}": "must be at most 60 (the context of 100 tokens minus the prompt of 40), is 61"
                for n in ("max_tokens", "min_tokens")
            },
        ),
    ],
)
def test_prompt_and_answer_share_the_context(
    params: dict[str, Any], num_prompt_tokens: int, expected: dict[str, str]
) -> None:
    validated = validate(text_request(**params), MODEL)
    if not expected:
        check_prompt_length(validated, num_prompt_tokens, MODEL)
        return
    with pytest.raises(InvalidRequest) as caught:
        check_prompt_length(validated, num_prompt_tokens, MODEL)
    assert dict(caught.value.violations) == expected


def test_logprobs_of_a_long_prompt_are_bounded_in_all() -> None:
    model = replace(MODEL, max_model_len=200_000)
    for num_tokens, num_each, is_too_many in ((6241, 20, False), (6242, 20, True), (131_072, 0, False)):
        validated = validate(text_request(prompt_logprobs=num_each), model)
        if not is_too_many:
            check_prompt_length(validated, num_tokens, model)
            continue
        bound = "logprobs for each are 131082, the maximum is 131072"
        with pytest.raises(InvalidRequest, match=bound):
            check_prompt_length(validated, num_tokens, model)


def test_what_an_answer_has_already_shares_the_context() -> None:
    for num_tokens, is_too_many in ((60, False), (61, True)):
        request = pb.GenerateRequest(text="x", sampling_params=GREEDY, output_token_ids=[5] * num_tokens)
        validated = validate(request, MODEL)
        if not is_too_many:
            check_prompt_length(validated, 40, MODEL)
            continue
        with pytest.raises(InvalidRequest, match="must have at most 60 ids beside a prompt of 40 tokens"):
            check_prompt_length(validated, 40, MODEL)
