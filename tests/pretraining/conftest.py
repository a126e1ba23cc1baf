import pytest


@pytest.fixture(scope="session", autouse=True)
def stated_peak() -> object:
    """Measuring the machine's peak takes longer than most tests here."""
    import biphase.pretraining.metrics as metrics

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "peak_flops", lambda device, dtype: 1e12)
        yield
