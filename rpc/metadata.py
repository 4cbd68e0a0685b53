"""What calls say beside their messages."""

from __future__ import annotations

ACCEPTED_KEY = "tandem-accepted"
"""In initial metadata: a router has taken the request on, and answers it until it ends or the router is lost."""
