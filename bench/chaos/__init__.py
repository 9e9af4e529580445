"""A run of many samples while every process is killed and stopped, and an oracle that looks at what came of it."""
