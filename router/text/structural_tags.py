"""Structural tags (vLLM's and XGrammar's) as a grammar: free text in which certain words begin constrained parts.

    {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [
        {"begin": "<f=now>", "content": {"type": "json_schema", "json_schema": {...}}, "end": "</f>"}]}}

    text ── a trigger ──> the rest of a tag's begin ──> its content ──> its end ──> text …

and the old form, in which all contents are JSON: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}.

Free text ends at the first of the words that may follow it, so that a reader of the answer sees the same structure.
Errors name a field by its place in the JSON. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from llguidance import grammar_from

from router.text.calls.call_format import GrammarLines
from router.text.calls.free_text import MAX_WORD_CHARS, FreeText, pattern
from router.text.schemas import NO_FORCING, check_bounds, guided
from router.text.tag_fields import check_names, flag_of, list_of, object_of, read_tag, shown, text_of, within

MAX_WORDS = 6
"""Maximum number of words at which free text ends, or which it must not contain. Each is a lexeme together with the
text before it, and llguidance follows the text once for each. With eight to twelve, one token (of 49 thousand) would
exceed its fuel."""
MAX_TAGS = 128
"""Maximum number of tags, or of other elements, in one format."""
MAX_WORD_BYTES = 4096
"""Maximum size of a literal text. Words that end free text have a smaller bound (`calls.free_text`)."""
MAX_DEPTH = 16
"""Maximum nesting depth of formats."""
MAX_GRAMMAR_CHARS = 262_144
"""Maximum size of the grammar, which is sent to a worker with each answer."""
_OWN = {"json_schema", "schema", "pattern"}
"""Fields whose texts do not appear literally in the answer."""

Behind = tuple[str, ...] | None
"""What follows a format: one of these texts. Empty: nothing follows. None: unknown here."""
OVER: Behind = ()
_AT = re.compile(r"at (\d+)\(\d+\): (.*)", re.DOTALL)


class _Free(NamedTuple):
    """Free text up to one of some words, in the grammar."""

    text: FreeText
    said: str
    """The rule of the text before the word."""


class StructuralTag:
    """The grammar of one structural tag. Raises `ValueError` naming the field, and saying why it cannot constrain an
    answer.

    `tokens`: ids of the words within `texts_of(text)` that are single tokens (`GrammarLines`).
    """

    def __init__(self, text: str, tokens: Mapping[str, int] = MappingProxyType({})) -> None:
        self._lines = GrammarLines(tokens)
        self._fields: list[str] = []
        """Fields of the schemas and regexes, by their places in the grammar."""
        self._num_rules = 0
        self._has_regex = False
        self._is_old, asked = read_tag(text)
        self._free: dict[tuple[tuple[str, ...], tuple[str, ...]], _Free] = {}
        self._formats: dict[str, Callable[[dict[str, Any], str, Behind, int], str]] = {
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
            "tag": self._tag,
            "sequence": self._sequence,
            "or": self._or,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "const_string": self._const_string,
            "any_text": self._any_text,
        }
        self._lines.begin_with(self._format(asked, "" if self._is_old else "format", OVER, 0))
        # With tokens the grammar is a little longer, but it has passed this check without them.
        if (num_chars := len(self._lines.text)) > MAX_GRAMMAR_CHARS and not tokens:
            raise ValueError(f"makes a grammar of {num_chars} characters, the maximum is {MAX_GRAMMAR_CHARS}")

    @property
    def grammar(self) -> str:
        """The grammar for llguidance."""
        return grammar_from("lark", self._lines.text + (f"{NO_FORCING}\n" if self._has_regex else ""))

    def problem(self, reason: str) -> str:
        """llguidance's complaint about the grammar, with the name of the field that it is about."""
        match = _AT.search(reason)
        place = self._lines.place_of(int(match[1])) if match is not None else None
        if match is None or place is None:
            return reason
        said = match[2].removeprefix("failed to compile JSON schema: ").partition("\n   1 |")[0]
        return f"{self._fields[place]}: {said}"

    # -- formats: each method returns the rule of a format, including what is behind it ----------------------------

    def _format(self, value: Any, at: str, behind: Behind, depth: int) -> str:
        asked = object_of(value, at)
        kind = asked.get("type", "tag" if "begin" in asked else None)
        if not isinstance(kind, str) or kind not in self._formats:
            raise ValueError(f"{at}.type must be one of {', '.join(self._formats)}, is {shown(kind)}")
        if depth > MAX_DEPTH:
            raise ValueError(f"{at}: formats may be nested at most {MAX_DEPTH} deep")
        return self._formats[kind](asked, at, behind, depth)

    def _triggered_tags(self, asked: dict[str, Any], at: str, behind: Behind, depth: int) -> str:
        name = "structures" if self._is_old else "tags"
        check_names(asked, at, ("triggers", name, "at_least_one", "stop_after_first", "excludes"))
        at_triggers, at_tags = within(at, "triggers"), within(at, name)
        triggers = [
            text_of(trigger, f"{at_triggers}[{number}]", MAX_WORD_CHARS)
            for number, trigger in enumerate(list_of(asked.get("triggers"), at_triggers, MAX_WORDS))
        ]
        for number, trigger in enumerate(triggers):
            if other := next((other for other in triggers[:number] if trigger in other or other in trigger), None):
                raise ValueError(f"{at_triggers}[{number}] is {shown(trigger)}, and another one {shown(other)}: "
                                 "neither may contain the other")  # fmt: skip
        tags = list_of(asked.get(name), at_tags, MAX_TAGS)
        is_at_least_one, is_one = (flag_of(asked, at, flag) for flag in ("at_least_one", "stop_after_first"))
        if behind is None and not (is_at_least_one and is_one):
            raise ValueError(f"{at}: {_NO_END.format('triggered_tags')}, or with at_least_one and stop_after_first")
        begun: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        first, by_token = [], []
        for number, tag in enumerate(tags):
            begin, body = self._parts(tag, f"{at_tags}[{number}]", depth)
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), "")
            if not trigger:
                raise ValueError(f"{at_tags}[{number}].begin must begin with one of {at_triggers}, is {shown(begin)}")
            first.append(f"{self._lines.literal(begin)} {body}")
            plain, rest = self._lines.split(begin)
            if rest and len(plain) < len(trigger):
                by_token.append((plain, f"{self._lines.literal(rest)} {body}"))
                begun[trigger].append("")
            else:
                begun[trigger].append(f"{self._lines.literal(begin[len(trigger) :])} {body}")
        for number, trigger in enumerate(triggers):
            if not begun[trigger]:
                raise ValueError(f"{at_triggers}[{number}] is {shown(trigger)}, which no tag begins with")
        if is_at_least_one and is_one:
            return self._closed(_one_of(first), behind)
        assert behind is not None
        words = (*triggers, *behind, *self._excluded(asked, at))
        said = [
            f"{self._up_to(words, trigger, at)} {_one_of(bodies)}"
            for trigger in triggers
            if (bodies := list(filter(None, begun[trigger])))
        ]
        said += [f"{self._ending_with(words, plain, at)} {body}" for plain, body in by_token]
        over = self._text_over(words, behind, at)
        if is_one:
            return _one_of([over, f"{_one_of(said)} {self._closed('', behind)}"])
        return f"{_one_of(first) if is_at_least_one else ''} {_one_of(said)}* {over}"

    def _tags_with_separator(self, asked: dict[str, Any], at: str, behind: Behind, depth: int) -> str:
        check_names(asked, at, ("tags", "separator", "at_least_one", "stop_after_first"))
        tags = list_of(asked.get("tags"), f"{at}.tags", MAX_TAGS)
        separator = text_of(asked.get("separator", ""), f"{at}.separator", MAX_WORD_BYTES, may_be_empty=True)
        is_at_least_one, is_one = (flag_of(asked, at, flag) for flag in ("at_least_one", "stop_after_first"))
        first, later = [], []
        for number, tag in enumerate(tags):
            begin, body = self._parts(tag, f"{at}.tags[{number}]", depth)
            first.append(f"{self._lines.literal(begin)} {body}")
            # One literal: otherwise a common beginning of the separator and the text behind would be taken for the
            # latter.
            later.append(f"{self._lines.literal(separator + begin)} {body}")
        said = _one_of(first) if is_one else f"({_one_of(first)} {_one_of(later)}*)"
        return self._closed(said if is_at_least_one else f"{said}?", behind)

    def _tag(self, asked: dict[str, Any], at: str, behind: Behind, depth: int) -> str:
        begin, body = self._parts(asked, at, depth, behind)
        return f"{self._lines.literal(begin)} {body}"

    def _sequence(self, asked: dict[str, Any], at: str, behind: Behind, depth: int) -> str:
        check_names(asked, at, ("elements",))
        elements = list_of(asked.get("elements"), f"{at}.elements", MAX_TAGS)
        last = len(elements) - 1
        return " ".join(
            self._format(element, f"{at}.elements[{number}]", behind if number == last else None, depth + 1)
            for number, element in enumerate(elements)
        )

    def _or(self, asked: dict[str, Any], at: str, behind: Behind, depth: int) -> str:
        check_names(asked, at, ("elements",))
        elements = list_of(asked.get("elements"), f"{at}.elements", MAX_TAGS)
        return _one_of(
            [
                self._format(element, f"{at}.elements[{number}]", behind, depth + 1)
                for number, element in enumerate(elements)
            ]
        )

    def _json_schema(self, asked: dict[str, Any], at: str, behind: Behind, depth: int) -> str:
        check_names(asked, at, ("json_schema", "style"))
        field = within(at.removesuffix(".content"), "schema") if self._is_old else f"{at}.json_schema"
        if asked.get("style", "json") != "json":
            raise ValueError(f"{at}.style must be json, is {shown(asked['style'])}")
        schema = asked.get("json_schema")
        if not isinstance(schema, dict | bool) or schema is False:
            raise ValueError(f"{field} must be a schema that some text fits, is {shown(schema)}")
        try:
            check_bounds(schema)
            said = guided({} if schema is True else schema)
        except ValueError as error:
            raise ValueError(f"{field}: {str(error).removeprefix('json: ')}") from error
        return self._closed(self._rule(f"%json {json.dumps(said)}", field), behind)

    def _regex(self, asked: dict[str, Any], at: str, behind: Behind, depth: int) -> str:
        check_names(asked, at, ("pattern",))
        field = f"{at}.pattern"
        self._has_regex = True
        regex = text_of(asked.get("pattern"), field, MAX_WORD_BYTES)
        (of_regex,) = json.loads(grammar_from("regex", regex))["grammars"]
        said = of_regex["lark_grammar"].removeprefix("start: /").removesuffix("/")
        text = self._lines.terminal(f"/{said}/", place=self._place(field))
        rules = []
        for end in behind or ("",):
            # One lexeme: otherwise the regex would take text that belongs to the end.
            plain, rest = self._lines.split(end)
            lexeme = self._lines.terminal(f"{text} /{pattern(plain)}/") if plain else text
            rules.append(f"{lexeme} {self._lines.literal(rest)}")
        return _one_of(rules)

    def _const_string(self, asked: dict[str, Any], at: str, behind: Behind, depth: int) -> str:
        check_names(asked, at, ("value",))
        return self._closed(self._lines.literal(text_of(asked.get("value"), f"{at}.value", MAX_WORD_BYTES)), behind)

    def _any_text(self, asked: dict[str, Any], at: str, behind: Behind, depth: int) -> str:
        check_names(asked, at, ("excludes",))
        if behind is None:
            raise ValueError(f"{at}: {_NO_END.format('any_text')}")
        return self._text_over((*behind, *self._excluded(asked, at)), behind, at)

    def _excluded(self, asked: dict[str, Any], at: str) -> list[str]:
        """Words that free text must not contain."""
        given, field = asked.get("excludes") or [], within(at, "excludes")
        if not given:
            return []
        many = list_of(given, field, MAX_WORDS)
        return [text_of(word, f"{field}[{number}]", MAX_WORD_BYTES) for number, word in enumerate(many)]

    # -- parts of formats ------------------------------------------------------------------------------------------

    def _parts(self, value: Any, at: str, depth: int, behind: Behind = None) -> tuple[str, str]:
        """A tag's begin, and the rule of the rest of the tag, including what is `behind` it."""
        tag = object_of(value, at)
        content = {"type": "json_schema", "json_schema": tag.get("schema")} if self._is_old else tag.get("content")
        check_names(tag, at, ("begin", "schema" if self._is_old else "content", "end"))
        if tag.get("type", "tag") != "tag":
            raise ValueError(f"{at}.type must be tag, is {shown(tag['type'])}")
        begin = text_of(tag.get("begin"), f"{at}.begin", MAX_WORD_BYTES, may_be_empty=True)
        given = tag.get("end")
        many = list_of(given, f"{at}.end", MAX_WORDS) if isinstance(given, list) else [given]
        ends = [text_of(end, f"{at}.end", MAX_WORD_BYTES, may_be_empty=len(many) == 1) for end in many]
        if ends == [""]:
            return begin, self._rule(self._format(content, f"{at}.content", behind, depth + 1))
        said = self._format(content, f"{at}.content", tuple(dict.fromkeys(ends)), depth + 1)
        return begin, self._rule(self._closed(said, behind))

    def _rule(self, said: str, field: str | None = None) -> str:
        """Add a rule, and return its name. `field`: the field that complaints about this rule name."""
        self._num_rules += 1
        place = None if field is None else self._place(field)
        return self._lines.add(f"rule_{self._num_rules}", said or '""', place=place)

    def _place(self, field: str) -> int:
        self._fields.append(field)
        return len(self._fields) - 1

    def _closed(self, said: str, behind: Behind) -> str:
        return f"{said} {_one_of([self._lines.literal(end) for end in behind])}" if behind else said

    def _text_over(self, words: tuple[str, ...], behind: tuple[str, ...], at: str) -> str:
        """Text without any of `words`, followed by one of `behind`, which are among `words`."""
        return _one_of([self._up_to(words, end, at) for end in behind] or [self._ending_with(words, "", at)])

    def _up_to(self, words: tuple[str, ...], word: str, at: str) -> str:
        """Text without any of `words`, followed by `word`, which is one of them."""
        plain, rest = self._lines.split(word)
        if rest:
            return f"{self._ending_with(words, plain, at)} {self._lines.literal(rest)}"
        free = self._free_text(words, at)
        return self._lines.terminal(f"{free.said} /{free.text.up_to(word)}/")

    def _ending_with(self, words: tuple[str, ...], end: str, at: str) -> str:
        free = self._free_text(words, at, end)
        rest = free.text.ending_with(end)
        return self._lines.terminal(f"{free.said} /{rest}/" if rest else free.said)

    def _free_text(self, words: tuple[str, ...], at: str, end: str = "") -> _Free:
        key = (words, (end,))
        if key not in self._free:
            if len(words) > MAX_WORDS:
                why = f"free text may end at or exclude at most {MAX_WORDS} words, has {len(words)}"
                raise ValueError(f"{at or 'triggers'}: {why}")
            try:
                text = FreeText(words, (end,))
                self._free[key] = _Free(text, self._lines.terminal(f"/{text.said}/"))
            except ValueError as error:
                raise ValueError(f"{at or 'triggers'}: {error}") from error
        return self._free[key]


def texts_of(text: str) -> list[str]:
    """The texts of a structural tag that must appear literally in answers, or must not. Raises `ValueError` or
    `RecursionError` if it is not JSON."""
    texts, stack = [], [json.loads(text)]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            texts.append(item)
        elif isinstance(item, dict):
            stack.extend(value for name, value in item.items() if name not in _OWN)
        elif isinstance(item, list):
            stack.extend(item)
    return texts


_NO_END = "{} must be the content of a tag or the last format, since nothing else marks where its text ends"


def _one_of(said: Sequence[str]) -> str:
    return said[0] if len(said) == 1 and said[0].isidentifier() else f"({' | '.join(dict.fromkeys(said))})"
