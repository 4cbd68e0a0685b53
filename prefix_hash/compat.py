"""The compatibility digest: one text that two engines have in common if they can exchange KV.

Only ever compared as a whole. It is made of named parts, `name=value; name=value`, so that whoever refuses a peer can
say in what it differs.
"""

from __future__ import annotations

from collections.abc import Mapping

_MAX_SHOWN = 64


def join_parts(parts: Mapping[str, object]) -> str:
    """The digest of `parts`. Long values are to be hashed before."""
    return "; ".join(f"{name}={value}" for name, value in parts.items())


def compat_difference(ours: str, theirs: str) -> str:
    """In what two digests differ, `ours` first, in some hundred characters at most; empty if they are equal."""
    if ours == theirs:
        return ""
    our_parts, their_parts = _parts_of(ours), _parts_of(theirs[: 2 * len(ours)])
    differing = [name for name in our_parts if our_parts[name] != their_parts.get(name)]
    if our_parts.keys() != their_parts.keys() or not differing:
        return f"compat_digest: {ours[:_MAX_SHOWN]!r} != {theirs[:_MAX_SHOWN]!r}"
    pairs = [(name, our_parts[name][:_MAX_SHOWN], their_parts[name][:_MAX_SHOWN]) for name in differing]
    return "compat_digest: " + ", ".join(f"{name} {ours!r} != {theirs!r}" for name, ours, theirs in pairs)


def _parts_of(digest: str) -> dict[str, str]:
    return dict(part.partition("=")[::2] for part in digest.split("; "))
