"""A tool for the frameworks' agents."""

from typing import Literal


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"
