import gc

import pytest

from confed.system.collector import collector_at_rest


def test_the_collector_rests_and_is_as_before_afterwards() -> None:
    def failing() -> None:
        with collector_at_rest():
            assert not gc.isenabled()
            with collector_at_rest():
                pass
            assert not gc.isenabled()  # the outer block goes on
            raise ValueError("faulty")

    with pytest.raises(ValueError, match="faulty"):
        failing()
    assert gc.isenabled()
