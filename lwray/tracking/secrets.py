"""Credentials stay out of what a run writes down."""

import re


def masked(text: str) -> str:
    """`text` with the credentials of any URI in it taken out."""
    return re.sub(r"(?<=://)[^/@\s]+@", "***@", text)
