"""biphase: text (or a decoder) and a compute budget in, a text encoder out.

Python offers the functions behind the command line, and loads each on its first use: `biphase.prepare`, `pretrain`,
`export`, `trim`, `push`, `load`, `encode`, `finetune`, `predict`, `score`, `evaluate`, `compare`, `equivalent`,
`judge`, `report_paper`, `embed`, `search`, `open_index`, `study`, `advise`, `inspect`, `check`. A mistake that you
can fix raises `biphase.InputError`. `biphase.silence()` turns off all bars and lines.
"""

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing `typing` would take time before Ctrl-C is handled
    from typing import Any

    from biphase.api.finetuning import compare, evaluate, finetune, predict, score
    from biphase.api.folders import inspect
    from biphase.api.networks import (
        compare_tokenizers,
        embed,
        encode,
        export,
        load,
        open_index,
        pretrain,
        search,
        train_tokenizer,
        trim,
    )
    from biphase.api.studies import advise, equivalent, judge, report_paper, study
    from biphase.console import silence
    from biphase.corpus.prepare import prepare
    from biphase.deploying.checking import check
    from biphase.errors import InputError
    from biphase.exporting.push import push

__all__ = [
    "InputError",
    "advise",
    "check",
    "compare",
    "compare_tokenizers",
    "embed",
    "encode",
    "equivalent",
    "evaluate",
    "export",
    "finetune",
    "inspect",
    "judge",
    "load",
    "open_index",
]
__all__ += [
    "predict",
    "prepare",
    "pretrain",
    "push",
    "report_paper",
    "score",
    "search",
    "silence",
    "study",
    "train_tokenizer",
    "trim",
]
__version__ = "0.1.0"

OFFERED = {
    "prepare": "corpus.prepare",
    "push": "exporting.push",
    **dict.fromkeys(
        ("train_tokenizer", "pretrain", "export", "trim", "load", "encode", "embed", "search", "open_index"),
        "api.networks",
    ),
    "compare_tokenizers": "api.networks",
    **dict.fromkeys(("finetune", "predict", "score", "evaluate", "compare"), "api.finetuning"),
    **dict.fromkeys(("study", "advise", "equivalent", "judge", "report_paper"), "api.studies"),
    "check": "deploying.checking",
    "inspect": "api.folders",
    "silence": "console",
    "InputError": "errors",
}
"""The public names of the package → the modules that define them."""


def __getattr__(name: str) -> "Any":
    if name not in OFFERED:
        raise AttributeError(f"module 'biphase' has no attribute '{name}'")
    if name != "InputError":
        from biphase.machine import prepare_process

        prepare_process()
    return getattr(import_module(f"biphase.{OFFERED[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *OFFERED])
