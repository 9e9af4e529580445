"""What all headrace services share."""

__version__ = "0.1.0"
