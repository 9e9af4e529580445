"""A small CPU engine that speaks the part of the SGLang HTTP interface that headrace uses."""
