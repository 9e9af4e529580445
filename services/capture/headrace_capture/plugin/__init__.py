"""The capture plugin: SGLang loads it by its entry point in each of its processes."""

from headrace_capture.plugin.start import register

__all__ = ["register"]
