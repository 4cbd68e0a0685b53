"""The form that a request demands of its answer, in OpenAI's and in vLLM's parameters, as the router gets it."""

from __future__ import annotations

from typing import Any

from gateway_harness import gateway

from protos import tandem_inference_pb2 as pb

FORMS: list[tuple[dict[str, Any], pb.StructuredOutputs | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, pb.StructuredOutputs(json_object=True)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {
            "name": "n", "description": "d", "strict": True, "schema": {"type": "object", "title": "é"}}}},
        pb.StructuredOutputs(json='{"type": "object", "title": "\\u00e9"}'),
    ),
    ({"structured_outputs": {"json": '{"type": "null"}'}}, pb.StructuredOutputs(json='{"type": "null"}')),
    ({"structured_outputs": {"json": {}}}, pb.StructuredOutputs(json="{}")),
    ({"structured_outputs": {"regex": "a+", "choice": None}}, pb.StructuredOutputs(regex="a+")),
    ({"structured_outputs": {"choice": ["é", "b"]}}, pb.StructuredOutputs(choice=pb.Choices(texts=["é", "b"]))),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, pb.StructuredOutputs(grammar='start: "a"')),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}}, pb.StructuredOutputs(regex="a")),
    ({"structured_outputs": None}, None),
    ({"structured_outputs": {"structural_tag": '{"a": 1}'}}, pb.StructuredOutputs(structural_tag='{"a": 1}')),
    ({"structured_outputs": {"structural_tag": {"a": 1}}}, pb.StructuredOutputs(structural_tag='{"a": 1}')),
    (
        {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}, "json_schema": None}},
        pb.StructuredOutputs(structural_tag='{"type": "structural_tag", "format": {"type": "any_text"}}'),
    ),
    (
        {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
        pb.StructuredOutputs(structural_tag='{"type": "structural_tag", "structures": [], "triggers": []}'),
    ),
]  # fmt: skip


async def test_the_form_of_an_answer_in_both_words() -> None:
    async with gateway() as (router, http):
        for fields, expected in FORMS:
            for path, body in (
                ("completions", {"prompt": "a"}),
                ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ):
                response = await http.post(f"/v1/{path}", json={**body, **fields})
                assert response.status_code == 200, response.text
                params = router.requests[-1].sampling_params
                assert params.HasField("structured_outputs") == (expected is not None), fields
                assert expected is None or params.structured_outputs == expected


BAD_FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format", "json_object"),
    ({"prompt": "a", "response_format": "json_object"}, "response_format", "must be an object"),
    ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format", "json_schema must be given with"),
    (
        {"prompt": "a", "response_format": {"type": "text", "json_schema": {"schema": {}}}},
        "response_format",
        "json_schema may only be given with type 'json_schema'",
    ),
    (
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format",
        "must be given",
    ),
    (
        {"prompt": "a", "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "response_format",
        "cannot be combined with structured_outputs",
    ),
    ({"prompt": "a", "structured_outputs": {}}, "structured_outputs", "must be exactly one of json, json_object"),
    ({"prompt": "a", "structured_outputs": "a"}, "structured_outputs", "must be an object with one of json"),
    ({"prompt": "a", "structured_outputs": {"xml": "a"}}, "structured_outputs", "xml is not known"),
    (
        {"prompt": "a", "structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs",
        "regex and choi",
    ),
    (
        {"prompt": "a", "structured_outputs": {"choice": "ab"}},
        "structured_outputs",
        "choice: must be a list of text",
    ),
    ({"prompt": "a", "structured_outputs": {"choice": [1]}}, "structured_outputs", "choice: "),
    ({"prompt": "a", "structured_outputs": {"regex": 5}}, "structured_outputs", "regex: "),
    ({"prompt": "a", "structured_outputs": {"structural_tag": 5}}, "structured_outputs", "structural_tag: must be"),
    (
        {"prompt": "a", "response_format": {"type": "structural_tag"}, "structured_outputs": {"regex": "a"}},
        "response_format",
        "cannot be combined with structured_outputs",
    ),
    ({"prompt": "a", "structural_tag": "{}"}, "structural_tag", 'structured_outputs: {"structural_tag": ...}'),
    ({"prompt": "a", "guided_json": {}}, "guided_json", 'use structured_outputs: {"json": ...} instead'),
]


async def test_a_form_that_is_wrong_is_refused_by_name() -> None:
    async with gateway() as (router, http):
        for body, param, complaint in BAD_FORMS:
            response = await http.post("/v1/completions", json=body)
            error = response.json()["error"]
            assert (response.status_code, error["type"]) == (400, "invalid_request_error")
            assert error["param"].startswith(param)
            assert complaint in error["message"]
    assert router.requests == []
