"""lwray trains models on Ray clusters whose machines come and go."""

__version__ = "0.1.0"
