"""Variables for chat templates: those of requests, and those of the operator for requests without."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_tools import wrong_of
from validation_cases import MODEL

from protos import tandem_inference_pb2 as pb
from router.args import RouterArgs
from router.process import load_texts
from router.text.chat_template import ChatMessage, ChatTemplate
from router.text.template_kwargs import GIVEN_NAMES, check_default_kwargs
from router.validation.prompt import MAX_TEMPLATE_KWARGS_BYTES, ChatPrompt
from router.validation.request import validate
from tandem.requests import generate_request

HI = [{"role": "user", "content": "Hi"}]


def chat_with(template_kwargs: str) -> pb.GenerateRequest:
    request = generate_request(HI)
    request.chat.template_kwargs = template_kwargs
    return request


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "must be a JSON object, is a list"),
        ("{", "must be a JSON object, is not JSON"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ("[" * 60_000, "nests too deeply"),
        ('{"a": "' + "é" * (MAX_TEMPLATE_KWARGS_BYTES // 2) + '"}', "must have at most 65536 bytes, has 65545"),
        ('{"tools": [], "messages": [], "a": 1}', "must not set messages, tools: the server sets it"),
        *((json.dumps({name: ""}), f"must not set {name}") for name in sorted(GIVEN_NAMES)),
    ],
)
def test_variables_that_cannot_be_are_refused_by_name(text: str, reason: str) -> None:
    ((field, said),) = wrong_of(chat_with(text))
    assert field == "chat.template_kwargs"
    assert reason in said


def test_given_names_are_those_that_templates_are_given(tmp_path: Path) -> None:
    for name in ("messages", "tools", "add_generation_prompt", "bos_token", "documents"):
        assert name in GIVEN_NAMES
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{{ bos_token }}", "bos_token": "<s>"})
    )
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    assert template.render([], variables={"bos_token": "mine"}) == "<s>"


def test_variables_reach_the_template_and_no_other_request() -> None:
    prompt = validate(chat_with('{"style": {"tone": ["dry", 1]}, "half": "\\ud83d"}'), MODEL).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.variables == {"style": {"tone": ["dry", 1]}, "half": "?"}
    template = ChatTemplate("{{ style.tone[0] if style is defined else 'none' }}")
    assert template.render(prompt.messages, (), prompt.variables) == "dry"
    assert template.render(prompt.messages) == "none"
    assert not validate(generate_request(HI), MODEL).prompt.variables  # type: ignore[union-attr]


def test_an_operators_variables_hold_unless_a_request_has_others(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("{{ enable_thinking }} {{ style }} {{ messages | length }}")
    args = RouterArgs(
        model=str(model_folder), chat_template=str(tmp_path / "own"),
        default_chat_template_kwargs='{"enable_thinking": false, "style": "dry"}',
    )  # fmt: skip
    template = load_texts(args).chat_template
    assert template is not None

    def text_of(template_kwargs: str) -> str:
        prompt = validate(chat_with(template_kwargs), MODEL).prompt
        assert isinstance(prompt, ChatPrompt)
        return template.render(prompt.messages, (), prompt.variables)

    assert text_of("") == "False dry 1"
    assert text_of('{"enable_thinking": true}') == "True dry 1"
    assert text_of('{"style": null, "more": 1}') == "False None 1"
    (tmp_path / "chat_template.jinja").write_text("{{ style }}")
    own = ChatTemplate.from_folder(tmp_path, defaults={"style": "wet"})
    assert own is not None
    assert own.render([]) == "wet"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("{", "must be a JSON object, is '{': "),
        ("[1]", r"must be a JSON object, is '\[1\]'$"),
        ('{"messages": []}', "must not set messages: the server sets it"),
        ("[" * 60_000, "must be a JSON object, is "),
    ],
)
def test_an_operators_variables_are_checked_at_the_door(given: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"^default_chat_template_kwargs {why}"):
        check_default_kwargs(given)
    with pytest.raises(ValueError, match=f"^default_chat_template_kwargs {why}"):
        RouterArgs(model="x", default_chat_template_kwargs=given)


def test_variables_are_counted_in_the_bytes_of_their_characters() -> None:
    given = {"a": "é" * 12_000}
    template_kwargs = generate_request(HI, chat_template_kwargs=given).chat.template_kwargs
    assert json.loads(template_kwargs) == given
    assert len(template_kwargs.encode()) < 25_000


@pytest.mark.parametrize("given", [[1], [["a", 1]], "a", {"a": {1}}, {"a": object()}])
def test_variables_that_are_no_json_are_refused_by_the_client(given: Any) -> None:
    with pytest.raises(ValueError, match="chat_template_kwargs: must be a JSON object"):
        generate_request(HI, chat_template_kwargs=given)


def test_variables_go_with_messages() -> None:
    with pytest.raises(ValueError, match="chat_template_kwargs: only with messages"):
        generate_request("Hi", chat_template_kwargs={"a": 1})
    assert generate_request("Hi", chat_template_kwargs={}).text == "Hi"
    assert generate_request(HI, chat_template_kwargs=None).chat.template_kwargs == ""


def test_a_model_that_does_not_think_has_variables_too() -> None:
    assert validate(chat_with('{"a": 1}'), replace(MODEL, reasoning_parser="")).prompt.variables  # type: ignore[union-attr]
    assert ChatMessage(role="assistant", content="x").to_template() == {"role": "assistant", "content": "x"}
