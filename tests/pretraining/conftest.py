import pytest


@pytest.fixture(scope="session", autouse=True)
def stated_peak() -> object:
    """Measuring the machine's peak takes longer than most tests here."""
    import biphase.pretraining.loop as loop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "peak_flops", lambda device, dtype: 1e12)
        yield
