"""What may happen to a request inside a real server, each provoked."""

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in ("asking", "checking", "rig", "unharmed")))
