"""Judges each dump of one dump folder."""
