"""Stores proven dumps as rows of a dataset."""
