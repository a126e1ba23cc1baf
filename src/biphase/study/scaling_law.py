"""Parameters and tokens → predicted loss, by the law of Muennighoff et al. 2023 (arXiv 2305.16264, appendix A).

    loss = FLOOR + A / parameters ^ EXPONENT + B / tokens ^ EXPONENT

is Chinchilla's law with one exponent. Text that is read again counts as fewer tokens, and parameters beyond what the
text can fill count as fewer parameters. The constants were fitted on decoders of 10M to 9B parameters; no such law is
published for encoders. So the losses rank candidates, and are good for nothing else.
"""

import math

A, B, FLOOR = math.exp(6.255414), math.exp(7.3049974), math.exp(0.6254804)
EXPONENT = 0.3526596
TOKENS_DECAY, PARAMETERS_DECAY = 15.387756, 5.309743
"""How many repeats, and how many times too many parameters, it takes until each further one counts 1/e."""


def predict_loss(parameters: float, tokens: float, unique_tokens: float) -> float:
    """The loss of a network trained on `tokens`, of which `unique_tokens` at most are different text."""
    read = min(tokens, unique_tokens)
    # Read four times, tokens / read - 1 = 3 repeats: worth 3 times new text at the most, ever less as they grow.
    effective_tokens = discounted(read, tokens / read - 1, TOKENS_DECAY)
    # The parameters that are optimal for `read` tokens: with one exponent for both, a fixed share of them.
    filled = min(parameters, read * (A / B) ** (1 / EXPONENT))
    effective_parameters = discounted(filled, parameters / filled - 1, PARAMETERS_DECAY)
    return FLOOR + A / effective_parameters**EXPONENT + B / effective_tokens**EXPONENT


def discounted(amount: float, excess: float, decay: float) -> float:
    """`amount` and `excess` times as much on top, of which the n-th time counts about exp(-n / decay)."""
    return amount * (1 + decay * (1 - math.exp(-excess / decay)))
