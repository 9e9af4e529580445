"""Captures hidden states inside an engine and publishes one dump per request."""
