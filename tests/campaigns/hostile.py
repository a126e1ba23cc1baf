"""Models, tokenizers and data that want their code to be run, or a file of somebody else's to be opened or replaced.

    python tests/campaigns/hostile.py        (a part of make campaigns)

Every payload would write a file of its name; every command that reads a model or data is called on every one of them.
Lost is an attempt after which such a file is there, or another file outside of what the command makes is not what it
was, or that ends in a traceback.
"""

import argparse
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from killing import fork_call, fresh
from small_world import Outcome, evaluation, finetune, open_world, run_campaign, run_in, standing_in

CODE = """
from pathlib import Path
Path({canary!r}).write_text("ran")
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
class C(PretrainedConfig):
    model_type = "eurobert"
class M(PreTrainedModel):
    config_class = C
class T(PreTrainedTokenizerFast):
    pass
"""


class Payload:
    """An object whose pickle writes a file when it is opened."""

    def __init__(self, canary: str) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.system, (f"touch {self.canary}",)


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def pickled_weights(model: Path, canary: str, name: str) -> None:
    (model / "model.safetensors").unlink()
    (model / name).write_bytes(pickle.dumps(Payload(canary)))


def pickle_beside(model: Path, canary: str, name: str) -> None:
    (model / name).write_bytes(pickle.dumps(Payload(canary)))


def index_of(model: Path, canary: str, name: str) -> None:
    """An index of sharded weights that names a pickle, or a file elsewhere."""
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    (model / "elsewhere.bin").write_bytes(pickle.dumps(Payload(canary)))
    weights = {"lm_head.weight": name, "model.norm.weight": "model-00001-of-00001.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))


def remote_code(model: Path, canary: str, name: str) -> None:
    (model / "evil.py").write_text(CODE.format(canary=canary))
    kinds = {"AutoConfig": "C", "AutoModel": "M", "AutoModelForCausalLM": "M", "AutoModelForMaskedLM": "M"}
    change_json(model / "config.json", auto_map={kind: f"evil.{own}" for kind, own in kinds.items()}, model_type=name)


def remote_tokenizer(model: Path, canary: str, name: str) -> None:
    (model / "evil.py").write_text(CODE.format(canary=canary))
    change_json(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", "evil.T"]}, tokenizer_class=name)


def tokenizer_pickle(model: Path, canary: str, name: str) -> None:
    for path in model.glob("tokenizer*"):
        path.unlink()
    (model / name).write_bytes(pickle.dumps(Payload(canary)))


def template(model: Path, canary: str, name: str) -> None:
    """A chat template that reaches for Python."""
    code = "{{ ().__class__.__base__.__subclasses__() }}{% include '" + name + "' %}"
    change_json(model / "tokenizer_config.json", chat_template=code)


def far_name(model: Path, canary: str, name: str) -> None:
    change_json(model / "config.json", _name_or_path=name, attn_implementation=name, _attn_implementation=name)


def quantized(model: Path, canary: str, name: str) -> None:
    change_json(model / "config.json", quantization_config={"quant_method": name, "modules_to_not_convert": ["x"]})


Attack = Callable[[Path, str, str], None]
ATTACKS: list[tuple[Attack, tuple[str, ...]]] = [
    (pickled_weights, ("pytorch_model.bin", "model.pt", "model.pth", "last.ckpt", "model.pkl", "tf_model.h5")),
    (pickle_beside, ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "tokenizer.pkl", "adapter_model.bin")),
    (index_of, ("elsewhere.bin", "../../elsewhere.bin", "/etc/passwd", "../tokenizer/tokenizer.json", "", ".", "..")),
    (remote_code, ("eurobert", "evil", "llama", "bert")),
    (remote_tokenizer, ("T", "PreTrainedTokenizerFast", "evil.T", "LlamaTokenizer")),
    (tokenizer_pickle, ("tokenizer.model", "vocab.txt", "spiece.model", "tokenizer.pkl", "tokenizer.json")),
    (template, ("x", "/etc/passwd")),
    (far_name, ("../../x", "someone/else", "kernels-community/flash-attn", "flash_attention_2")),
    (quantized, ("gptq", "bitsandbytes", "evil", "hqq", "fp8")),
]


def list_commands() -> list[list[str]]:
    """What reads a model folder."""
    return [
        finetune("mood", "new"),
        ["evaluate", "encoder", *evaluation()[:-1], "new"],
        ["pretrain", "recipe.yaml", "init={model: encoder}", "name=adapted", "--runs", "new"],
        ["tokenizer", "from", "encoder", "--out", "new"],
        ["prepare", "text/plain.txt", "--tokenizer", "encoder", "--workers", "1", "--out", "new"],
        ["inspect", "encoder", "--verify"],
    ]


Trial = tuple[str, Callable[[Path, str], None], list[str]]
"""What is tried: its name, what it does to a world, and the command that is called then."""


def attacks_on_models() -> Iterator[Trial]:
    """Each attack on each command."""
    for attack, names in ATTACKS:
        for name in names:
            for command in list_commands():

                def spoil(place: Path, canary: str, attack: Attack = attack, name: str = name) -> None:
                    attack(place / "encoder", canary, name)

                yield f"{attack.__name__} {name}: {command[0]}", spoil, command


def attacks_by_links(run: str) -> Iterator[Trial]:
    """Links in the place of what a command writes: nothing behind them is touched."""
    take, export = ["tokenizer", "from", "tokenizer", "--out", "new"], ["export", run, "new"]
    prepare = ["prepare", "text/plain.txt", "--tokenizer", "tokenizer", "--workers", "1", "--out", "new"]
    evaluate = [*list_commands()[1][:-1], "scores"]
    again = ["pretrain", "recipe.yaml"]
    planted = [
        *(("new", command) for command in (take, export)),
        *((".new.part", command) for command in (take, export)),
        *((f"new/{name}", prepare) for name in ("token_bytes.npy", ".lock", "tokenizer")),
        *((f"{run}/{name}", again) for name in (".lock", "metrics.jsonl", ".config.yaml.1.part")),
        (f"{run}/steps/.4.part", [*again, "checkpoints.keep=[4]"]),
        ("scores/.locks", evaluate),
        ("study-small/report", ["study", "report", "study.yaml"]),
    ]
    for link, command in planted:
        for kind in ("file", "folder"):

            def spoil(place: Path, canary: str, link: str = link, kind: str = kind) -> None:
                (place / "mine").mkdir()
                (place / "mine" / "thesis.txt").write_text("the only copy")
                path = place / link
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.is_dir():
                    shutil.rmtree(path)
                path.unlink(missing_ok=True)
                path.symlink_to(place / "mine" / ("thesis.txt" if kind == "file" else ""))

            yield f"link to a {kind} at {link}: {command[0]}", spoil, command


def try_command(place: Path, canary: Path, command: list[str], before: dict[str, str]) -> str:
    """What was lost: nothing in the empty string."""
    with standing_in(place):
        _, result = fork_call(command)
    if canary.exists():
        canary.unlink()
        return "its code ran"
    if result is None or result.traceback or result.code not in (0, 2):
        return f"it ended with {result}"
    after = hashes(place)
    mine = [name for name in before if name.startswith(("text", "data", "tokenizer"))]
    changed = [name for name in mine if after.get(name) != before[name]]
    if (place / "mine").exists() and [path.read_text() for path in (place / "mine").iterdir()] != ["the only copy"]:
        return "a file behind a link was changed"
    return f"changed: {changed[:3]}" if changed else ""


def hashes(folder: Path) -> dict[str, str]:
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            found[str(path.relative_to(folder))] = sha256(path.read_bytes()).hexdigest()
    return found


def campaign(given: argparse.Namespace, folder: Path) -> Iterator[Outcome]:
    """Every n-th attack."""
    world, place, canary = open_world(folder), folder / "place", folder / "canary"
    trials = [*attacks_on_models(), *attacks_by_links(run_in(world))]
    for name, spoil, command in trials[:: given.every]:
        fresh(world, place)
        before = hashes(place)
        spoil(place, str(canary))
        lost = try_command(place, canary, command, before)
        yield name.partition(" ")[0], 1, lost and f"{name}: {lost}"


if __name__ == "__main__":
    run_campaign(campaign, __doc__, every={"type": int, "default": 1, "help": "only every n-th attack"})
