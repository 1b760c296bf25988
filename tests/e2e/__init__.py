import pytest

pytest.register_assert_rewrite(f"{__name__}.harness")
