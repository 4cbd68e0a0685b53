"""The metadata keys of calls."""

from __future__ import annotations

ACCEPTED_KEY = "tandem-accepted"
"""In initial metadata: a router has accepted the request, and answers it until it ends or the router is lost."""
