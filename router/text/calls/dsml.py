"""Calls as DeepSeek V3.2 writes them: texts between tags that say of each value whether it is a string.

    deepseek_v32   <｜DSML｜function_calls>\\n<｜DSML｜invoke name="get_weather">\\n
                   <｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\\n
                   <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\\n
                   </｜DSML｜invoke>\\n</｜DSML｜function_calls>, which may be around several calls

DeepSeek describes this in encoding/encoding_dsv32.py of deepseek-ai/DeepSeek-V3.2. ｜DSML｜ is a single token. A value
that is marked as a string is one, unless the tool's schema allows none there; any other value is read by the schema.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.text.calls.call_format import CallReader, GrammarLines
from router.text.calls.tagged import TaggedFormat, TaggedReader
from router.text.calls.text_values import STRING, Schema

DSML = "｜DSML｜"
_IS_STRING, _IS_OTHER = ' string="true">', ' string="false">'
_MARK = re.compile(r'\s*(?:string\s*=\s*"(\w*)"\s*)?>')
MAX_MARK_CHARS = 64
"""Maximum length of what stands between an argument's name and its value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DsmlFormat(TaggedFormat):
    @property
    def words(self) -> tuple[str, ...]:
        return (DSML, self.call, self.call_end, self.function, self.function_end, self.key, self.value_end)

    def reader(self, begin: str, schemas: Mapping[str, Schema]) -> CallReader:
        return DsmlReader(self, begin, schemas)

    def _value(self, lines: GrammarLines, schema: Schema, of: Any) -> str:
        types, values = schema.types(of), schema.values(of)
        if values is not None:
            marked = [
                (_IS_STRING, [each for each in values if isinstance(each, str)], STRING),
                (_IS_OTHER, [each for each in values if not isinstance(each, str)], types - STRING),
            ]
            texts = [mark + each for mark, some, kinds in marked if some for each in self._texts_of(some, kinds)]
            if not texts:
                raise ValueError("no value fits it")
            return f"({' | '.join(lines.literal(each + self._behind_value) for each in texts)})"
        if types == STRING:
            return f"{lines.literal(_IS_STRING)} {self._value_text(lines, schema, of)}"
        if "string" not in types:
            return f"{lines.literal(_IS_OTHER)} {self._value_json(lines, schema, of)}"
        return self._free_value(lines)

    @property
    def _never_in_text(self) -> tuple[str, ...]:
        return (f"</{DSML}",)  # all tags: without its token, their whole names would exceed llguidance's limits

    def _free_value(self, lines: GrammarLines) -> str:
        return f"({lines.literal(_IS_STRING)} | {lines.literal(_IS_OTHER)}) {self._text(lines)}"


class DsmlReader(TaggedReader):
    def _read_before_value(self, text: str) -> bool:
        end = text.find(">", self._at, self._at + MAX_MARK_CHARS) + 1
        if not end and len(text) - self._at < MAX_MARK_CHARS:
            return False
        match = _MARK.fullmatch(text, self._at, end) if end else None
        if match is None:
            self._go_on_between()
            return True
        types = self._schema.types_of(self._key)
        if match[1] == "true":
            types = types & STRING or types
        elif match[1] == "false":
            types = types - STRING or types
        self._begin_value(end, types)
        return True


DEEPSEEK_V32 = DsmlFormat(
    name="deepseek_v32", begins=(f"<{DSML}function_calls>", f'<{DSML}invoke name="'), call=f"<{DSML}function_calls>",
    call_end=f"</{DSML}function_calls>", is_around_all=True, function=f'<{DSML}invoke name="', name_end='">',
    function_end=f"</{DSML}invoke>", key=f'<{DSML}parameter name="', key_end='"', value_end=f"</{DSML}parameter>",
    space="\n", between="\n", known_by=(DSML, "function_calls"),
)  # fmt: skip
