"""Feeds runs to engines: submit, dispatch, reap, rebuild."""
