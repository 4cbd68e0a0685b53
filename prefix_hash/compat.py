"""The compatibility digest: a text that is equal for two engines exactly if they can exchange KV.

Only compared as a whole. It consists of named parts, `name=value; name=value`, so that a refusal can say what differs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_MAX_SHOWN = 64
_MAX_CHARS = 4096
"""Maximum length of a digest that is parsed: several times the length of ours."""
_MAX_OTHER_PARTS = 16


def join_parts(parts: Mapping[str, object]) -> str:
    """The digest of `parts`. The caller must hash long values."""
    return "; ".join(f"{name}={value}" for name, value in parts.items())


def compat_difference(ours: str, theirs: str) -> str:
    """How two digests differ, `ours` first, in some hundred characters at most; empty if they are equal."""
    if ours == theirs:
        return ""
    our_parts, their_parts = _parts_of(ours), _parts_of(theirs)
    names = [*our_parts, *(name for name in their_parts if name not in our_parts)]
    differing = [name for name in names if our_parts.get(name) != their_parts.get(name)]
    is_strange = not our_parts or not their_parts or len(names) - len(our_parts) > _MAX_OTHER_PARTS
    if is_strange or not differing:
        return f"compat_digest: {ours[:_MAX_SHOWN]!r} != {theirs[:_MAX_SHOWN]!r}"
    return "compat_digest: " + ", ".join(
        f"{name} {_shown(our_parts.get(name))} != {_shown(their_parts.get(name))}" for name in differing
    )


def _shown(value: str | None) -> str:
    """The value of a part, which engines with other settings or versions may lack."""
    return "(absent)" if value is None else repr(value[:_MAX_SHOWN])


def _parts_of(digest: str) -> dict[str, str]:
    """Parse a digest to its parts by name; empty if it is not in this form."""
    parts = digest[: _MAX_CHARS + 1].split("; ")
    named = {name: value for name, equals, value in (part.partition("=") for part in parts) if equals}
    is_ours = len(digest) <= _MAX_CHARS and len(named) == len(parts)
    return named if is_ours and all(re.fullmatch(r"\w{1,32}", name) for name in named) else {}
