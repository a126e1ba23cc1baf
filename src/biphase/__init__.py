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

    from biphase.errors import InputError as InputError
    from biphase.verbs import silence as silence
    from biphase.verbs.embedding import embed as embed
    from biphase.verbs.embedding import search as search
    from biphase.verbs.finetuning import finetune as finetune
    from biphase.verbs.finetuning import predict as predict
    from biphase.verbs.folders import inspect as inspect
    from biphase.verbs.grids import compare as compare
    from biphase.verbs.grids import evaluate as evaluate
    from biphase.verbs.networks import encode as encode
    from biphase.verbs.networks import export as export
    from biphase.verbs.networks import load as load
    from biphase.verbs.networks import pretrain as pretrain
    from biphase.verbs.networks import push as push
    from biphase.verbs.studies import study as study
    from biphase.verbs.text import advise as advise
    from biphase.verbs.text import prepare as prepare
    from biphase.verbs.text import train_tokenizer as train_tokenizer

__version__ = "0.1.0"

OFFERED = {
    **dict.fromkeys(("train_tokenizer", "prepare"), "verbs.text"),
    **dict.fromkeys(("pretrain", "export", "push", "load", "encode"), "verbs.networks"),
    **dict.fromkeys(("finetune", "predict"), "verbs.finetuning"),
    **dict.fromkeys(("evaluate", "compare"), "verbs.grids"),
    **dict.fromkeys(("embed", "search"), "verbs.embedding"),
    "study": "verbs.studies",
    "advise": "verbs.text",
    "inspect": "verbs.folders",
    "silence": "verbs",
    "InputError": "errors",
}
"""The names of this package, and the modules that they are from."""


def __getattr__(name: str) -> "Any":
    if name not in OFFERED:
        raise AttributeError(f"module 'biphase' has no attribute '{name}'")
    if OFFERED[name].startswith("verbs"):
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
