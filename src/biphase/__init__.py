"""biphase: text (or a decoder) and a compute budget in, the best text encoder that the budget can buy out."""

__version__ = "0.1.0"
