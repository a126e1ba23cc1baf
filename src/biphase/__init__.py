"""biphase: text (or a decoder) and a compute budget in, the best text encoder that the budget can buy out.

What the command line does, Python does by the same functions, which are loaded when they are asked for:
`biphase.prepare`, `pretrain`, `export`, `push`, `load`, `encode`, `finetune`, `predict`, `evaluate`, `compare`,
`embed`, `search`, `study`, `advise`, `inspect`. What you can mend is a `biphase.InputError`; `biphase.silence()` ends
all lines.
"""

from importlib import import_module
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:  # what loads `typing` would come before Ctrl-C is heard
    from typing import Any

    from biphase.api import silence as silence
    from biphase.api.finetuning import finetune as finetune
    from biphase.api.finetuning import predict as predict
    from biphase.api.folders import inspect as inspect
    from biphase.api.grids import compare as compare
    from biphase.api.grids import evaluate as evaluate
    from biphase.api.networks import embed as embed
    from biphase.api.networks import encode as encode
    from biphase.api.networks import export as export
    from biphase.api.networks import load as load
    from biphase.api.networks import pretrain as pretrain
    from biphase.api.networks import push as push
    from biphase.api.networks import search as search
    from biphase.api.studies import study as study
    from biphase.api.text import advise as advise
    from biphase.api.text import prepare as prepare
    from biphase.api.text import train_tokenizer as train_tokenizer
    from biphase.errors import InputError as InputError

__version__ = "0.1.0"

OFFERED = {
    **dict.fromkeys(("train_tokenizer", "prepare"), "api.text"),
    **dict.fromkeys(("pretrain", "export", "push", "load", "encode"), "api.networks"),
    **dict.fromkeys(("finetune", "predict"), "api.finetuning"),
    **dict.fromkeys(("evaluate", "compare"), "api.grids"),
    **dict.fromkeys(("embed", "search"), "api.networks"),
    "study": "api.studies",
    "advise": "api.text",
    "inspect": "api.folders",
    "silence": "api",
    "InputError": "errors",
}
"""The names of this package, and the modules that they are from."""


def __getattr__(name: str) -> "Any":
    if name not in OFFERED:
        raise AttributeError(f"module 'biphase' has no attribute '{name}'")
    if OFFERED[name].startswith("api"):
        from biphase.machine import prepare_process

        prepare_process()
    return getattr(import_module(f"biphase.{OFFERED[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *OFFERED])


class VerbFolder(ModuleType):
    # Python's import sets `biphase.study` to the folder of that name: called, or asked for `help`, it is the verb.
    @property
    def __doc__(self) -> str:  # type: ignore[override]
        from inspect import getdoc, signature

        verb = __getattr__(self.__name__.removeprefix("biphase."))
        return f"{verb.__name__}{signature(verb)}\n\n{getdoc(verb)}"

    def __call__(self, *arguments: "Any", **settings: "Any") -> "Any":
        return __getattr__(self.__name__.removeprefix("biphase."))(*arguments, **settings)
