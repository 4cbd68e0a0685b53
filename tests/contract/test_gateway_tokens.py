"""/tokenize, /detokenize and input_tokens over HTTP, with a router's real tokenizer and without workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gateway_harness import gateway
from transformers import AutoTokenizer

from router.args import RouterArgs
from router.process import load_texts
from router.served_model import Texts

TEMPLATE = Path(__file__).parents[2] / "examples" / "templates" / "chatml_tools.jinja"
TEXT = "The capital of France is Paris. 北京 🍕 <|im_end|>"
MESSAGES: list[dict[str, Any]] = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}]
LOOK_UP = {"name": "look_up", "description": "Finds.", "parameters": {"type": "object"}}
CALL = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": "a", "tool_calls": [CALL]}
TOOLS = [{"type": "function", "function": LOOK_UP}]


@pytest.fixture(scope="module")
def texts(model_folder: Path) -> Texts:
    return load_texts(RouterArgs(model=str(model_folder), served_model_name="small", chat_template=str(TEMPLATE)))


@pytest.fixture(scope="module")
def of_transformers(model_folder: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = TEMPLATE.read_text()
    return tokenizer


@pytest.mark.parametrize("special", [{}, {"add_special_tokens": False}, {"add_special_tokens": True}])
async def test_a_text(texts: Texts, of_transformers: Any, special: dict[str, bool]) -> None:
    expected = of_transformers(TEXT, **special)["input_ids"]
    async with gateway(texts) as (_, http):
        told = (await http.post("/tokenize", json={"prompt": TEXT, **special})).json()
        named = (await http.post("/tokenize", json={"prompt": TEXT, **special, "return_token_strs": True})).json()
        back = (await http.post("/detokenize", json={"tokens": expected})).json()
    assert told == {"count": len(expected), "max_model_len": 8192, "tokens": expected, "token_strs": None}
    assert named == {**told, "token_strs": of_transformers.convert_ids_to_tokens(expected)}
    assert back == {"prompt": of_transformers.decode(expected)}
    assert back["prompt"].endswith(TEXT), "special tokens are told, too"


@pytest.mark.parametrize("further", [{}, {"tools": TOOLS}, {"chat_template_kwargs": {"date_string": "today"}}])
async def test_messages(texts: Texts, of_transformers: Any, further: dict[str, Any]) -> None:
    variables = further.get("chat_template_kwargs", {})
    text = of_transformers.apply_chat_template(
        MESSAGES, tools=further.get("tools"), add_generation_prompt=True, tokenize=False, **variables
    )
    async with gateway(texts) as (_, http):
        body = {"messages": MESSAGES, "model": "small", "add_generation_prompt": True, **further}
        told = (await http.post("/tokenize", json=body)).json()
        back = (await http.post("/detokenize", json={"tokens": told["tokens"], "model": "small"})).json()
    assert told["count"] == len(told["tokens"])
    assert back == {"prompt": text}


async def test_an_empty_text_has_no_tokens(texts: Texts) -> None:
    """Who counts the tokens of texts may come across an empty one."""
    async with gateway(texts) as (_, http):
        told = (await http.post("/tokenize", json={"prompt": "", "return_token_strs": True})).json()
    assert (told["count"], told["tokens"], told["token_strs"]) == (0, [], [])


CONTINUED = {"continue_final_message": True}


@pytest.mark.parametrize("further", [{"add_generation_prompt": False}, CONTINUED, {**CONTINUED, "tools": TOOLS}])
async def test_how_a_chats_prompt_ends(texts: Texts, of_transformers: Any, further: dict[str, Any]) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Because of "}]
    asked = {"add_generation_prompt": False, **further}
    text = of_transformers.apply_chat_template(messages, tokenize=False, **asked)
    async with gateway(texts) as (_, http):
        told = (await http.post("/tokenize", json={"messages": messages, **further})).json()
        back = (await http.post("/detokenize", json={"tokens": told["tokens"]})).json()
    assert back == {"prompt": text}
    assert text.endswith("Because of " if "continue_final_message" in further else "<|im_end|>\n")


@pytest.mark.parametrize("further", [{}, {"tools": True}, {"chat_template_kwargs": {"date_string": "today"}}])
async def test_a_responses_input(texts: Texts, further: dict[str, Any]) -> None:
    """The same number of tokens as for the same messages."""
    of_chat, of_response = dict(further), dict(further)
    if "tools" in further:
        of_chat["tools"], of_response["tools"] = TOOLS, [{"type": "function", **LOOK_UP}]
    async with gateway(texts) as (_, http):
        chat = (await http.post("/tokenize", json={"messages": MESSAGES, **of_chat})).json()
        body = {"input": MESSAGES[1]["content"], "instructions": MESSAGES[0]["content"], **of_response}
        told = (await http.post("/v1/responses/input_tokens", json=body)).json()
        wrong = (await http.post("/v1/responses/input_tokens", json={"input": "a", "model": "other"})).json()
    assert told == {"object": "response.input_tokens", "input_tokens": chat["count"]}
    assert wrong["error"]["param"] == "model"


@pytest.mark.parametrize(
    ("route", "body", "param", "words"),
    [
        ("tokenize", {}, None, "one of prompt and messages must be given"),
        ("tokenize", {"prompt": "a", "messages": MESSAGES}, None, "exactly one of prompt and messages"),
        ("tokenize", {"prompt": [1, 2]}, "prompt", "a text"),
        ("tokenize", {"prompt": "a", "tools": TOOLS}, "tools", "only with messages"),
        ("tokenize", {"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "only with messages"),
        ("tokenize", {"prompt": "a", "wrong": 1}, "wrong", "is not a known parameter"),
        ("tokenize", {"prompt": "a", "model": "other"}, "model", "must be 'small' or empty, is 'other'"),
        ("tokenize", {"prompt": "a" * 200_000}, "prompt", "the maximum is 100000"),
        (
            "tokenize",
            {"messages": MESSAGES, "add_special_tokens": True},
            "add_special_tokens",
            "is only for text prompts",
        ),
        ("tokenize", {"prompt": "a", **CONTINUED}, "continue_final_message", "only with messages"),
        (
            "tokenize",
            {"messages": MESSAGES, **CONTINUED, "add_generation_prompt": True},
            "continue_final_message",
            "cannot be combined with add_generation_prompt",
        ),
        ("tokenize", {"messages": [CALLING], **CONTINUED}, "continue_final_message", "the last message has tool_calls"),
        ("tokenize", {"messages": MESSAGES, "add_generation_prompt": 0}, "add_generation_prompt", "true or false"),
        ("tokenize", {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template", "--chat-template"),
        ("tokenize", {"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role", "must be one of"),
        ("detokenize", {}, "tokens", "must be given"),
        ("detokenize", {"tokens": [5, -1]}, "tokens[1]", "at least 0"),
        ("detokenize", {"tokens": [5, 49_152]}, "tokens", "below the vocabulary's size 49152, is 49152 at 1"),
        ("detokenize", {"tokens": [5], "model": "other"}, "model", "must be 'small'"),
        ("detokenize", {"tokens": [40_000] * 50_000}, "tokens", "the maximum is 100000"),
    ],
)
async def test_what_is_wrong_is_named(
    texts: Texts, route: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    async with gateway(texts) as (_, http):
        response = await http.post(f"/{route}", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (404 if param == "model" else 400, param)
    assert words in error["message"]


@pytest.mark.parametrize(("with_names", "most"), [(False, "MAX_TOKENS"), (True, "MAX_NAMED_TOKENS")])
async def test_more_tokens_than_can_be_told(
    texts: Texts, monkeypatch: pytest.MonkeyPatch, with_names: bool, most: str
) -> None:
    monkeypatch.setattr(f"router.validation.tokens.{most}", 3)
    async with gateway(texts) as (_, http):
        fits = await http.post("/tokenize", json={"prompt": "one two three", "return_token_strs": with_names})
        more = await http.post("/tokenize", json={"prompt": "one two three four", "return_token_strs": with_names})
    assert (fits.status_code, more.status_code) == (200, 400)
    assert more.json()["error"]["param"] == "prompt"
    assert f"must be at most 3 tokens{' with return_token_strs' if with_names else ''}, has 4" in more.text


async def test_more_text_than_can_be_told(texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's text may be longer than its id in the request."""
    async with gateway(texts) as (_, http):
        answers = [await http.post("/detokenize", json={"tokens": [0] * number}) for number in (1, 99_000)]
        monkeypatch.setattr("router.validation.tokens.MAX_TEXT_BYTES", 26)
        answers += [await http.post("/detokenize", json={"tokens": [0] * number}) for number in (2, 3)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 400]
    error = answers[-1].json()["error"]
    assert (error["param"], error["message"]) == ("tokens", "tokens: must be at most 26 bytes as text, are 39")


async def test_a_deadline_is_heeded(texts: Texts) -> None:
    body = {"prompt": "word " * 15_000}
    async with gateway(texts) as (_, http):
        late, wrong, fine = [
            await http.post("/tokenize", json=body, headers={"X-Request-Timeout-Ms": ms}) for ms in ("1", "-1", "9000")
        ]
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "x-request-timeout-ms")
    assert fine.json()["count"] == 15_001


async def test_no_tokens_are_no_text(texts: Texts) -> None:
    async with gateway(texts) as (_, http):
        assert (await http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_it_is_counted_and_asks_for_the_key(texts: Texts) -> None:
    async with gateway(texts, api_key=("secret",)) as (_, http):
        refused = await http.post("/tokenize", json={"prompt": "a"})
        taken = await http.post("/tokenize", json={"prompt": "a"}, headers={"Authorization": "Bearer secret"})
        counted = (await http.get("/metrics")).text
    assert (refused.status_code, taken.status_code) == (401, 200)
    for status in (401, 200):
        assert f'tandem:gateway_requests_total{{route="tokenize",status="{status}"}} 1.0' in counted
