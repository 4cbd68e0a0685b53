"""What a chat may say about tools, and how it is refused otherwise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from validation_cases import MODEL

from protos import tandem_inference_pb2 as pb
from router.model_info import ModelInfo
from router.prepared import PreparedRequest
from router.served_model import Texts
from router.text.chat_template import ChatMessage, ChatTemplate
from router.text.tokenizer import Tokenizer
from router.text.tool_formats import FORMATS
from router.validation.prompt import ChatPrompt, TokenizedPrompt
from router.validation.request import validate
from router.validation.tools import MAX_TOOL_BYTES, AskedTools
from rpc.errors import InvalidRequest
from tandem.requests import generate_request
from tandem.tools import CallsStream

TEMPLATE = Path(__file__).parents[2] / "examples" / "templates" / "chatml_tools.jinja"
KNOWING = replace(MODEL, tool_call_parser="hermes", shows_tools=True)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
STRICT = {"type": "function", "function": {"name": "rain", "description": "", "parameters": SCHEMA, "strict": False}}
HI: list[Any] = [{"role": "user", "content": "Hi"}]
MADE = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
TOLD: list[Any] = [
    *HI, {"role": "assistant", "content": None, "tool_calls": [MADE]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]  # fmt: skip


def wrong_of(chat: Any, model: ModelInfo = KNOWING, **asked: Any) -> list[tuple[str, str]]:
    request = chat if isinstance(chat, pb.GenerateRequest) else generate_request(chat, **asked)
    with pytest.raises(InvalidRequest) as caught:
        validate(request, model)
    return [(wrong.field, wrong.description) for wrong in caught.value.violations]


def test_tools_in_openais_words_reach_the_template_as_they_were() -> None:
    asked = validate(generate_request(TOLD, tools=[WEATHER, NOW, STRICT]), KNOWING)
    assert isinstance(asked.prompt, ChatPrompt)
    nothing = {"name": "now", "parameters": {"type": "object", "properties": {}}}
    shown = [WEATHER, {"type": "function", "function": nothing}, STRICT]
    assert [tool.to_template() for tool in asked.asked_tools.tools] == shown
    call, result = asked.prompt.messages[1:]
    assert call.to_template() == {
        "role": "assistant", "content": "",
        "tool_calls": [{**MADE, "function": {"name": "weather", "arguments": {"city": "Oslo"}}}],
    }  # fmt: skip
    assert result.to_template() == {"role": "tool", "content": "rain", "tool_call_id": "call_1", "name": "weather"}


@pytest.mark.parametrize(
    ("asked", "parser", "is_one", "is_held"),
    [
        ({}, "hermes", False, False),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, "hermes", True, False),
        ({"tool_choice": "none"}, "", False, False),
        ({"tool_choice": "required"}, "hermes", False, True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, "hermes", True, True),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, "hermes", True, True),
    ],
)
def test_what_may_be_called(asked: dict[str, Any], parser: str, is_one: bool, is_held: bool) -> None:
    validated = validate(generate_request(HI, tools=[WEATHER, NOW], **asked), KNOWING)
    tools, form = validated.asked_tools, validated.sampling_params.structured_outputs.grammar
    assert (tools.parser, tools.is_one, bool(form)) == (parser, is_one, is_held)
    assert len(tools.tools) == 2, "the model hears of all"
    assert (tools.reader(str) is None) == (not parser)
    if is_held:
        assert ("weather" in form) == (asked["tool_choice"] == "required")


def test_an_answer_may_be_calls_or_have_a_form() -> None:
    """Agents ask for this: the model calls tools, and answers with an object when it is done."""
    forms: list[Any] = [{"json": {"type": "object", "title": "done"}}, {"json_object": True}]
    for form in forms:
        asked = generate_request(HI, tools=[WEATHER], structured_outputs=form)
        grammar = validate(asked, KNOWING).sampling_params.structured_outputs.grammar
        assert "start: call" in grammar
        assert "| form" in grammar
        assert ("done" in grammar) == ("json" in form)
    for form, choice, reason in (
        ({"regex": "a"}, "auto", "must be json or json_object together with tools, is regex"),
        ({"regex": "a"}, "required", "must be json or json_object together with tools, is regex"),
        ({"json": {"title": "x" * 70_000}}, "auto", "json must have at most 65536 bytes"),
    ):
        ((named, said),) = wrong_of(HI, tools=[WEATHER], tool_choice=choice, structured_outputs=form)
        assert named == "sampling_params.structured_outputs"
        assert reason in said
    untouched = validate(
        generate_request(HI, tools=[WEATHER], tool_choice="none", structured_outputs=forms[0]), KNOWING
    )
    assert untouched.sampling_params.structured_outputs.json


@pytest.mark.parametrize("form", [{"json": {"type": "object", "title": "done"}}, {"json_object": True}])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_required_calls_leave_nothing_that_could_have_a_form(form: Any, choice: Any) -> None:
    """Agents ask for both: a call first, and an object when they are done."""
    asked = {"tools": [WEATHER, NOW], "tool_choice": choice}
    with_form, without = (
        validate(generate_request(HI, **asked, seed=1, **further), KNOWING)
        for further in ({"structured_outputs": form}, {})
    )
    assert with_form.sampling_params == without.sampling_params
    assert with_form.asked_tools == without.asked_tools


def test_what_an_end_cuts_off_of_a_call_is_content_only_where_it_might_have_been() -> None:
    begun = '<tool_call>{"na'
    for parser, choice, form, content in (
        ("hermes", "auto", False, begun), ("hermes", "auto", True, ""), ("hermes", "required", True, ""),
        ("llama3_json", "auto", True, '{"na'),
    ):  # fmt: skip
        model = replace(KNOWING, tool_call_parser=parser)
        asked = validate(generate_request(HI, tools=[NOW], tool_choice=choice), model).asked_tools
        reader = asked.reader(str, has_form=form)
        assert reader is not None
        text = begun if parser == "hermes" else '{"na'
        assert reader.push(text).content + reader.finish().content == content


def function(**of: Any) -> dict[str, Any]:
    return {"tools": [{"function": {"name": "f", **of}}]}


@pytest.mark.parametrize(
    ("asked", "field", "reason"),
    [
        ({"tool_choice": "required"}, "chat.tool_choice", "needs tools"),
        ({"parallel_tool_calls": True}, "chat.parallel_tool_calls", "needs tools"),
        ({"tools": [WEATHER, WEATHER]}, "chat.tools", "must have distinct names, 'weather' is given twice"),
        ({"tools": [NOW] * 129}, "chat.tools", "must have at most 128 tools, has 129"),
        ({"tools": [{"function": {"name": "a b"}}]}, "chat.tools[0].name", "must be 1 to 64 letters"),
        ({"tools": [NOW, {"function": {"name": "f", "parameters": "{"}}]}, "chat.tools[1].parameters", "is not JSON"),
        (function(parameters="[]"), "chat.tools[0].parameters", "is a list"),
        (function(parameters='{"a": NaN}'), "chat.tools[0].parameters", "NaN is no"),
        (function(parameters="[" * 60_000), "chat.tools[0].parameters", "nests too deeply"),
        (function(description="x" * MAX_TOOL_BYTES), "chat.tools", "must have at most"),
        ({"tools": [NOW], "tool_choice": {"function": {"name": "then"}}}, "chat.tool_name", "must be one of the tools"),
        (function(parameters={"type": "string"}), "chat.tools[0].parameters", 'an object, is of type "string"'),
        (function(parameters={"minimum": 10**20}), "chat.tools[0].parameters", "minimum must be within 64 bits"),
        (function(parameters='{"a": ' + "9" * 5000 + "}"), "chat.tools[0].parameters", "of too many digits"),
        (
            {**function(), "tool_choice": "required", "ignore_eos": True}, "sampling_params.ignore_eos",
            "cannot be combined with tools that hold the answer",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_named(asked: dict[str, Any], field: str, reason: str) -> None:
    ((named, said),) = wrong_of(HI, **asked)
    assert named == field
    assert reason in said


def test_what_messages_tell_of_calls_is_checked() -> None:
    for arguments, reason in (
        ("3", "is a number"),
        ("[]", "is a list"),
        ("{a: 1}", "Expecting property name"),
        ('{"a": 1', "was cut off, leave the call out"),
        ("[" * 100_000, "nests too deeply"),
    ):
        call = {"function": {"name": "weather", "arguments": arguments}}
        ((named, said),) = wrong_of([*HI, {"role": "assistant", "tool_calls": [MADE, call]}])
        assert (named, reason in said) == ("chat.messages[1].tool_calls[1].arguments", True)
    nameless = {"function": {"name": "", "arguments": "{}"}}
    ((named, _),) = wrong_of([*HI, {"role": "assistant", "tool_calls": [nameless]}])
    assert named == "chat.messages[1].tool_calls[0].name"


def test_unknown_numbers_and_names_without_a_choice() -> None:
    request = generate_request(HI, tools=[NOW])
    request.chat.tool_choice = 9  # type: ignore[assignment]
    assert wrong_of(request)[0][0] == "chat.tool_choice"
    request.chat.tool_choice = pb.TOOL_CHOICE_AUTO
    request.chat.tool_name = "now"
    assert wrong_of(request) == [("chat.tool_name", "may only be given with TOOL_CHOICE_REQUIRED")]


def test_half_a_character_in_what_a_model_said_is_none() -> None:
    call = {"function": {"name": "weather", "arguments": '{"a": "\\ud83d", "b": NaN}'}}
    request = generate_request([*HI, {"role": "assistant", "tool_calls": [call]}])
    prompt = validate(request, KNOWING).prompt
    assert isinstance(prompt, ChatPrompt)
    arguments = prompt.messages[1].tool_calls[0]["function"]["arguments"]
    assert arguments["a"] == "?"


@pytest.mark.parametrize(("text", "expected"), [("null", {}), (" ", {}), ('{"a": "b\n"}', {"a": "b\n"})])
def test_what_a_model_said_and_is_nearly_json_is_taken_back(text: str, expected: dict[str, Any]) -> None:
    call = {"function": {"name": "weather", "arguments": text}}
    prompt = validate(generate_request([*HI, {"role": "assistant", "tool_calls": [call]}]), KNOWING).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1].tool_calls[0]["function"]["arguments"] == expected


def test_a_schema_that_cannot_be_held_to_is_named() -> None:
    asked = generate_request(HI, tools=[NOW, WEATHER], structured_outputs={"json_object": True})
    tools = validate(asked, KNOWING).asked_tools
    reason = "grammar: at {}(14): failed to compile JSON schema: Invalid type: strin\n 5 | tool_1: ..."
    why = "cannot be enforced: failed to compile JSON schema: Invalid type: strin"
    assert tools.problem_of_form(reason.format(6)) == ("chat.tools[1].parameters", why)
    assert tools.problem_of_form(reason.format(7)) == ("sampling_params.structured_outputs", why)
    named = AskedTools(tools=tools.tools, parser="hermes", callable=(1,))
    assert named.problem_of_form(reason.format(4)) == ("chat.tools[1].parameters", why)
    assert tools.problem_of_form("grammar: too complex") == ("chat.tools", "cannot be enforced: too complex")


def test_a_schema_that_cannot_be_said_between_tags_is_named() -> None:
    model = replace(KNOWING, tool_call_parser="glm45")
    asked = {
        "tools": [NOW, {"function": {"name": "f", "parameters": {"properties": {"a": {"const": "</arg_value>"}}}}}]
    }
    ((named, said),) = wrong_of(HI, model, tool_choice="required", **asked)
    assert named == "chat.tools[1].parameters"
    assert said == 'cannot be enforced: properties.a: "</arg_value>" would be read back as another value'
    ((named, _),) = wrong_of(HI, model, tool_choice={"function": {"name": "f"}}, **asked)
    assert named == "chat.tools[1].parameters"
    validate(generate_request(HI, **asked), model)
    validate(generate_request(HI, tool_choice={"function": {"name": "now"}}, **asked), model)


@pytest.mark.parametrize(
    "pieces", [[(1, "b")], [(0, "")], [(0, "a"), (0, "a")], [(0, "a"), (2, "c")], [(0, "a"), (1, "")]]
)
def test_pieces_of_calls_come_in_order(pieces: list[tuple[int, str]]) -> None:
    stream = CallsStream()
    *rights, wrong = [pb.ToolCallDelta(index=index, id=call_id) for index, call_id in pieces]
    assert stream.accept(rights) is None
    assert "had begun" in (stream.accept([wrong]) or "")


# -- templates --------------------------------------------------------------------------------------------------------


def of_template(source: str | None, parser: str = "auto") -> ModelInfo:
    return MODEL.with_chat(ChatTemplate(source) if source is not None else None, parser)


@pytest.mark.parametrize(
    ("source", "parser", "reason"),
    [
        (None, "auto", "has no chat template"),
        (
            "{{ messages[0].content }}",
            "hermes",
            "has no place for tools; start the router with another one (--chat-template)",
        ),
        ("{{ tools | tojson }}", "auto", "model's format (--tool-call-parser hermes|llama3_json|mistral|"),
        ("{{ tools | tojson }}{{ raise_exception('never') }}", "hermes", "refuses these messages: never)"),
        ("{# <tool_call> #}{{ tools | tojson }}", "auto", "uses no known format of tool calls"),
    ],
)
def test_a_model_that_is_given_no_tools_says_why(source: str | None, parser: str, reason: str) -> None:
    model = replace(of_template(source, parser), has_chat_template=True)
    assert model.to_proto().tool_call_parser == ""
    ((named, said),) = wrong_of(HI, model, tools=[NOW])
    assert named == "chat.tools"
    assert reason in said
    told = (
        []
        if model.shows_tools
        else [("chat.messages[1].tool_calls", f"cannot be shown to the model: {model.no_tools_because}")]
    )
    if told:
        assert wrong_of(TOLD, model) == told
    else:
        validate(generate_request(TOLD), model)


def test_how_a_model_calls_is_what_its_template_teaches_or_what_was_said() -> None:
    assert of_template(TEMPLATE.read_text()).to_proto().tool_call_parser == "hermes"
    assert of_template("{{ tools | tojson }}", "llama3_json").tool_call_parser == "llama3_json"


def test_a_template_may_take_a_tool_to_be_whole() -> None:
    """Hermes' templates do, and those that name the call of a tool's result. Other templates see that there is no
    description."""
    source = "{% for t in tools %}{{ t.function.name + ': ' + t.function.description }}{% endfor %}<tool_call>"
    source += "{% for m in messages %}{% if m.role == 'tool' %}{{ m.name + ': ' + m.content }}{% endif %}{% endfor %}"
    template = ChatTemplate(source)
    model = MODEL.with_chat(template, "auto")
    assert model.tool_call_parser == "hermes"
    validated = validate(generate_request(TOLD, tools=[NOW]), model)
    assert isinstance(validated.prompt, ChatPrompt)
    shown = [tool.to_template() for tool in validated.asked_tools.tools]
    assert template.render(validated.prompt.messages, shown) == "now: <tool_call>weather: rain"
    asks = ChatTemplate("{{ tools[0].function.description is defined }}")
    assert [asks.render([], [each]) for each in (*shown, WEATHER)] == ["False", "True"]


@pytest.mark.parametrize("tools", [None, [WEATHER, NOW]])
def test_our_template_renders_as_in_transformers(tools: list[Any] | None, tmp_path: Path) -> None:
    source = TEMPLATE.read_text()
    chat = [dict(message) for message in TOLD]
    chat[1] = {**chat[1], "content": "", "tool_calls": [{"type": "function", "function": {
        "name": "weather", "arguments": {"city": "Oslo"}}}]}  # fmt: skip
    messages = [
        ChatMessage(role=each["role"], content=each["content"], tool_calls=tuple(each.get("tool_calls", ())))
        for each in chat
    ]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=_any_tokenizer())
    theirs = tokenizer.apply_chat_template(
        chat, tools=tools, chat_template=source, tokenize=False, add_generation_prompt=True
    )
    ours = ChatTemplate(source).render(messages, tools or [])
    assert ours == theirs
    assert ("<tools>" in ours) == (tools is not None)
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>' in ours
    assert "<tool_response>\nrain\n</tool_response>" in ours


def _any_tokenizer() -> Any:
    return tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))


def test_a_template_for_tools_is_found_where_transformers_looks(tmp_path: Path) -> None:
    with_tools = "with {{ tools[0].function.name }}"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": with_tools}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    for _ in range(2):
        template = ChatTemplate.from_folder(tmp_path)
        assert template is not None
        assert template.render([], []) == "plain"
        assert template.render([], [NOW]) == "with now"
        assert template.problem_with_tools() is None
        (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
        (tmp_path / "chat_template.jinja").write_text("plain")
        (tmp_path / "additional_chat_templates").mkdir(exist_ok=True)
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(with_tools)


def test_a_template_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken").write_text("{% if %}")
    with pytest.raises(ValueError, match=r"chat_template: .*broken: the model's chat template is broken at line 1"):
        ChatTemplate.from_file(tmp_path / "broken", tmp_path)


def test_a_schema_that_is_no_json_is_no_answer_that_was_cut_off() -> None:
    ((named, said),) = wrong_of(HI, **function(parameters='{"a": "b'))
    assert named == "chat.tools[0].parameters"
    assert "Unterminated string" in said
    assert "cut off" not in said


def test_a_template_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"chat_template: .*missing cannot be read"):
        ChatTemplate.from_file(tmp_path / "missing", tmp_path)


# -- words that tell calls --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("parser", sorted(name for name, known in FORMATS.items() if known.begins))
def test_words_that_tell_calls_are_not_hidden_for_being_special(parser: str, is_special: bool) -> None:
    """In some models' vocabularies these words are special tokens, which are normally left out of the text."""
    words = FORMATS[parser].words
    assert words
    vocabulary = {word: number for number, word in enumerate(["a", *words, "<end>"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    backend.add_special_tokens(["<end>", *(words if is_special else [])])
    tokenizer = Tokenizer(backend)
    assert tokenizer.hidden_ids(words) == {vocabulary[word] for word in words if is_special}
    model = replace(KNOWING, tool_call_parser=parser, eos_token_ids=frozenset({vocabulary["<end>"]}))
    texts, said = Texts(model, tokenizer, None), "".join(words)
    for tools, text in (([NOW], said), (None, "" if is_special else said)):
        validated = validate(generate_request(HI, tools=tools), model)
        detokenizer = PreparedRequest(validated, model, texts, TokenizedPrompt([0])).detokenizer()
        ids = [vocabulary[word] for word in (*words, "<end>")]
        told = detokenizer.push(ids).text + detokenizer.finish()  # with a space between two words
        assert told.replace(" ", "") == text.replace(" ", "")


CALLS_SHOWN = "{% for m in messages %}{% for c in m.tool_calls %}{{ SAID }}{% endfor %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("'<' + c.function.arguments + '>'", '<{"city": "Oslo"}>'),
        ("'<' ~ c.function.arguments ~ '>'", '<{"city": "Oslo"}>'),
        ("'<' + (c.function.arguments | tojson) + '>'", '<{"city": "Oslo"}>'),
        ("c.function.arguments.keys() | join", "city"),
        ("c.function.arguments | items | list", "[('city', 'Oslo')]"),
    ],
)
def test_arguments_of_calls_that_were_made_are_what_the_template_takes(said: str, shown: str) -> None:
    """Objects for most templates. DeepSeek's add the arguments to their text: they take JSON."""
    prompt = validate(generate_request(TOLD), KNOWING).prompt
    assert isinstance(prompt, ChatPrompt)
    template = ChatTemplate(CALLS_SHOWN.replace("SAID", said), tool_source="{{ messages[1].tool_calls }}")
    for _ in range(2):
        assert template.render(prompt.messages) == f"Hi{shown}rain"
