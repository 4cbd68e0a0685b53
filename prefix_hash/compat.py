"""The compatibility digest: one text that two engines have in common if they can exchange KV.

Only ever compared as a whole. It is made of named parts, `name=value; name=value`, so that whoever refuses a peer can
say in what it differs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_MAX_SHOWN = 64
_MAX_CHARS = 4096
"""Of a digest that is looked into: several times what ours have."""
_MAX_OTHER_PARTS = 16


def join_parts(parts: Mapping[str, object]) -> str:
    """The digest of `parts`. Long values are to be hashed before."""
    return "; ".join(f"{name}={value}" for name, value in parts.items())


def compat_difference(ours: str, theirs: str) -> str:
    """In what two digests differ, `ours` first, in some hundred characters at most; empty if they are equal."""
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
    """Of a part, which other settings or another version may not have."""
    return "(absent)" if value is None else repr(value[:_MAX_SHOWN])


def _parts_of(digest: str) -> dict[str, str]:
    """By name; empty for what is made otherwise."""
    parts = digest[: _MAX_CHARS + 1].split("; ")
    named = {name: value for name, equals, value in (part.partition("=") for part in parts) if equals}
    is_ours = len(digest) <= _MAX_CHARS and len(named) == len(parts)
    return named if is_ours and all(re.fullmatch(r"\w{1,32}", name) for name in named) else {}
