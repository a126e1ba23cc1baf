"""What goes to the hub and what stays, told by the simulated hub."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

import biphase
from biphase.errors import InputError
from biphase.exporting.push import LOCAL_PATH, push, without_folders
from biphase.files import MARK, write_json
from biphase.hub import INDEX, fetch_model
from biphase.pretraining.loop import train
from biphase.recipe import Recipe
from biphase.run import Run

from ..conftest import flip_bit
from ..simulated_hub import TOKEN, Fault, SimulatedHub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimulatedHub]:
    """In place of the hub, for this process; the account is signed in."""
    with SimulatedHub() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        address = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)  # whose server is another one
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def sent_to(hub: SimulatedHub, id: str, branch: str = "main") -> dict[str, bytes]:
    return {name: content for name, content in hub.files(id, branch).items() if name != ".gitattributes"}


@pytest.fixture(scope="module")
def run(tiny_recipe: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two updates, one of each objective, a checkpoint after each; its data lie in a folder of this machine."""
    steps = ["curriculum.0.steps=1", "curriculum.1.steps=1", "schedule.warmup_steps=0", "schedule.decay_steps=0"]
    return train(tiny_recipe(*steps), tmp_path_factory.mktemp("runs"))


@pytest.fixture
def folder(run: Run, tmp_path: Path) -> Path:
    return biphase.export(run.path, tmp_path / "encoder")


def test_a_model_goes_without_what_is_not_meant(hub: SimulatedHub, folder: Path, capsys: pytest.CaptureFixture) -> None:
    stays = ["optimizer.safetensors", "metrics.jsonl", "predictions/test.jsonl", "train.log", ".env", "notes.txt"]
    (folder / "predictions").mkdir()
    for name in stays:
        (folder / name).write_text("a text of a user")
    stays += [MARK, "pytorch_model.bin"]
    (folder / "pytorch_model.bin").symlink_to("/etc/passwd")
    biphase.push(folder, "me/encoder", license="apache-2.0", language="en,de", dry_run=True)
    told = capsys.readouterr().out
    assert {request.partition(" ")[0] for request in hub.asked} == {"GET"}, "only for what is there"
    assert "nothing sent" in told and "model.safetensors" in told
    assert "stays here: " + ", ".join(sorted(stays)) in told
    biphase.push(folder, "me/encoder", license="apache-2.0", language="en,de")
    assert {id: found.private for (_, id), found in hub.repositories.items()} == {"me/encoder": True}
    sent = sent_to(hub, "me/encoder")
    mine = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(sent) == mine - {*stays}
    assert all(sent[name] == (folder / name).read_bytes() for name in sent if name != "README.md")
    card = huggingface_hub.ModelCard(sent["README.md"].decode())
    assert (card.data.license, card.data.language) == ("apache-2.0", ["en", "de"])
    assert 'from_pretrained("me/encoder")' in card.text and "biphase" in card.data.tags
    assert f"{hub.url}/me/encoder/commit/" in capsys.readouterr().out
    assert not hub.leaked and all(TOKEN.encode() not in content for content in sent.values())
    back = fetch_model("me/encoder")
    assert (back / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert back.name == hub.repositories["models", "me/encoder"].revisions["main"]


def test_checkpoints_of_a_run_are_revisions(hub: SimulatedHub, run: Run) -> None:
    name = run.path.with_name(run.path.name.rpartition("-")[0])
    biphase.push(name, "me/encoder", license="mit", language="en")
    assert hub.repositories["models", "me/encoder"].revisions.keys() == {"main", "step-1"}
    first, last = (sent_to(hub, "me/encoder", branch) for branch in ("step-1", "main"))
    assert json.loads(first["config.json"])["model_type"] == "llama"
    assert json.loads(last["config.json"])["model_type"] == "eurobert"
    assert first["model.safetensors"] != last["model.safetensors"]
    loads = [{*re.findall(r'\("(me/\w+"[^)]*)\)', files["README.md"].decode())} for files in (first, last)]
    assert loads == [{'me/encoder", revision="step-1"'}, {'me/encoder"'}]
    names = {*first, *last}
    assert not any("optimizer" in name or "metrics" in name or "manifest" in name for name in names)
    assert not any(LOCAL_PATH.search(files["README.md"].decode()) for files in (first, last))


def test_export_goes_on_to_the_hub(hub: SimulatedHub, run: Run, tmp_path: Path) -> None:
    biphase.export(run.path, tmp_path / "encoder", to_hub="me/other", license="mit", language="en")
    assert "model.safetensors" in sent_to(hub, "me/other")
    hub.commit("me/public", {})
    with pytest.raises(InputError, match=r"is public; .*again is written: `biphase push .*again me/public …` sends it"):
        biphase.export(run.path, tmp_path / "again", to_hub="me/public", license="mit", language=iter(["en"]))
    push(tmp_path / "again", "me/private", license="mit", language="en")


def test_the_card_of_a_run_is_named_by_the_run(hub: SimulatedHub, run: Run) -> None:
    with pytest.raises(InputError, match=f"^the card of {run.path} has no license"):
        push(run.path, "me/encoder", language="en", dry_run=True)
    assert hub.asked == []


def test_the_card_of_a_folder_with_another_name_loads_the_repository(
    hub: SimulatedHub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.rename(tmp_path / "renamed"))
    push(".", "me/encoder", license="mit", language="en")
    card = sent_to(hub, "me/encoder")["README.md"].decode()
    assert card.count('from_pretrained("me/encoder")') == 2 and 'SentenceTransformer("me/encoder")' in card


def test_what_is_refused_before_anything_is_sent(hub: SimulatedHub, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"the card of .*encoder has no license and no language: give `license` and `language`, or"
    ):
        push(folder, "me/encoder")
    with pytest.raises(InputError, match="encoder has no language: give `language`, or"):
        push(folder, "me/encoder", license="mit")
    for repo in ("encoder", "a/b/c", "me/--x", "https://huggingface.co/me/x"):
        with pytest.raises(InputError, match="is not a repository name"):
            push(folder, repo, license="mit", language="en")
    with pytest.raises(InputError, match="is not a model folder"):
        push(tmp_path, "me/encoder", license="mit", language="en")
    card = (folder / "README.md").read_text()
    (folder / "README.md").write_text(card.replace("---\n", "---\nlicense: mit\nlanguage: en\n", 1))
    assert hub.asked == []
    push(folder, "me/encoder", license="mit", language="en", dry_run=True)
    hub.asked.clear()
    with pytest.raises(InputError, match=r"says license mit, not apache-2\.0: leave one out"):
        push(folder, "me/encoder", license="apache-2.0")
    for place in ("file:///data", r"\\server\share"):
        (folder / "README.md").write_text(f"trained on {place}")
        with pytest.raises(InputError, match=r"local paths are named in .*README\.md"):
            push(folder, "me/encoder", license="mit", language="en")
    (folder / "README.md").write_text(f"with hf_{'aB3' * 11}")
    with pytest.raises(InputError, match=r"README\.md has an access token of the Hub, hf_aB3…: remove it"):
        push(folder, "me/encoder", license="mit", language="en")
    (folder / "README.md").write_text("trained on /data/mine/corpus")
    with pytest.raises(InputError, match=r"local paths are named in .*README\.md \(/data/mine/corpus"):
        push(folder, "me/encoder", license="mit", language="en")
    assert hub.asked == []


def into_module(folder: Path) -> Path:
    """Move a network with its tokenizer into a folder of its own, as sentence-transformers may save it."""
    module = folder / "0_Transformer"
    module.mkdir()
    for path in [*folder.glob("*.safetensors"), *folder.glob("*config.json"), *folder.glob("tokenizer*")]:
        if path.name != "config_sentence_transformers.json" and path.exists():
            path.rename(module / path.name)
    modules = json.loads((folder / "modules.json").read_text())
    write_json(folder / "modules.json", [modules[0] | {"path": module.name}, *modules[1:]])
    for name in (MARK, "golden.json"):
        (folder / name).unlink()
    return module


def test_a_network_in_a_folder_of_its_own_goes_with_its_tokenizer(hub: SimulatedHub, folder: Path) -> None:
    module = into_module(folder)
    (folder / "2_CNN").mkdir()
    (folder / "2_CNN" / "cnn_config.json").write_text("{}")
    push(folder, "me/encoder", license="mit", language="en")
    sent = sent_to(hub, "me/encoder")
    assert {f"0_Transformer/{path.name}" for path in module.iterdir()} | {"2_CNN/cnn_config.json"} <= {*sent}
    assert {"0_Transformer/tokenizer.json", "0_Transformer/sentence_bert_config.json"} <= {*sent}


def link_elsewhere(path: Path) -> None:
    path.rename(path.parents[1] / f"{path.parent.name}-{path.name}")
    path.symlink_to(path.parents[1] / f"{path.parent.name}-{path.name}")


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "damaged weights": (lambda folder: flip_bit(folder / "model.safetensors"), r"model\.safetensors is damaged"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer files"),
    "no tokenizer beside its network": (
        lambda folder: (into_module(folder) / "tokenizer.json").unlink(),
        "has no tokenizer files",
    ),
    "a link": (
        lambda folder: link_elsewhere(folder / "model.safetensors"),
        r"links are not sent \(model\.safetensors\)",
    ),
    "a linked module": (lambda folder: link_elsewhere(folder / "1_Pooling"), r"links are not sent \(1_Pooling\)"),
    "a link to nothing": (
        lambda folder: (folder / "tokenizer.model").symlink_to("nowhere"),
        r"links are not sent \(tokenizer\.model\)",
    ),
    "a card in Latin-1": (lambda folder: (folder / "README.md").write_bytes(b"caf\xe9"), r"README\.md cannot be read"),
    "a lost part": (lambda folder: write_json(folder / INDEX, {"weight_map": {"a": "b"}}), "names 'b', which is no"),
}


def test_a_model_that_is_not_whole_is_not_sent(hub: SimulatedHub, folder: Path, tmp_path: Path) -> None:
    for name, (damage, words) in BROKEN.items():
        damage(broken := shutil.copytree(folder, tmp_path / name))
        with pytest.raises(InputError, match=words):
            push(broken, "me/encoder", license="mit", language="en")
    assert hub.asked == []


def test_no_push_leaves_model_files_of_another_one(
    hub: SimulatedHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is deleted either: what a user added besides stays. A dry run tells it, if the hub answers."""
    given: Any = {"license": "mit", "language": "en"}
    hub.commit("me/encoder", {"model.gguf": b"old", "2_Dense/config.json": b"{}", "LICENSE": b"", "notes.txt": b""})
    hub.repositories["models", "me/encoder"].private = True
    before, told = (
        sent_to(hub, "me/encoder"),
        r"revision main of me/encoder has .* \(2_Dense/config\.json, model\.gguf\)",
    )
    for dry_run in (True, False):
        with pytest.raises(InputError, match=rf"{told}: delete them on the Hub, or push to another repository"):
            push(folder, "me/encoder", dry_run=dry_run, **given)
        assert sent_to(hub, "me/encoder") == before
    hub.faults.append(Fault("GET", status=500))
    push(folder, "me/encoder", dry_run=True, **given)
    out, err = capsys.readouterr()
    assert "the files that me/encoder has now are not known" in err and "nothing sent" in out
    hub.commit("me/encoder", {"model.gguf": None, "2_Dense/config.json": None})
    push(folder, "me/encoder", **given)
    push(folder, "me/encoder", **given)
    assert sent_to(hub, "me/encoder").keys() > {"LICENSE", "notes.txt", "model.safetensors"}


def test_a_card_that_was_edited_on_the_hub_is_told(
    hub: SimulatedHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: Any = {"license": "mit", "language": "en"}
    for _ in range(2):
        push(folder, "me/encoder", **given)
    assert "on the Hub" not in capsys.readouterr().err
    hub.commit("me/encoder", {"README.md": "mine"}, title="Say more")
    for dry_run in (True, False):
        push(folder, "me/encoder", **given, dry_run=dry_run)
        told = " ".join(capsys.readouterr().err.split())
        assert "revision main of me/encoder: its card was last changed by the commit 'Say more' on the Hub" in told
    push(folder, "me/encoder", **given)
    assert "on the Hub" not in capsys.readouterr().err


def test_a_new_branch_has_no_model_files_of_main(hub: SimulatedHub, run: Run) -> None:
    """With which the hub begins it; on main they stay, and what is added to a branch later is refused as anywhere."""
    given: Any = {"license": "mit", "language": "en"}
    hub.commit("me/encoder", {"modules.json": b"[]", "1_Pooling/config.json": b"{}", "notes.txt": b"n"}, private=True)
    push(f"{run.path}@1", "me/encoder", **given)
    first = sent_to(hub, "me/encoder", "step-1")
    assert first.keys() > {"notes.txt", "model.safetensors"} and not first.keys() & {
        "modules.json",
        "1_Pooling/config.json",
    }
    assert "modules.json" in sent_to(hub, "me/encoder")
    push(f"{run.path}@1", "me/encoder", **given)
    hub.commit("me/encoder", {"model.gguf": b"old"}, "step-1")
    with pytest.raises(InputError, match="revision step-1 of me/encoder has model files that are not sent now"):
        push(f"{run.path}@1", "me/encoder", **given)
    assert "model.gguf" in sent_to(hub, "me/encoder", "step-1")


def test_a_run_that_has_lost_its_end_does_not_replace_main(hub: SimulatedHub, run: Run, tmp_path: Path) -> None:
    lost = shutil.copytree(run.path, tmp_path / run.path.name)
    shutil.rmtree(lost / "steps" / "2")
    with pytest.raises(InputError, match="is done at step 2, whose checkpoint is damaged or was removed"):
        push(lost, "me/encoder", license="mit", language="en")
    assert not hub.repositories
    push(f"{lost}@1", "me/encoder", license="mit", language="en")
    assert "model.safetensors" in sent_to(hub, "me/encoder", "step-1")
    assert "model.safetensors" not in sent_to(hub, "me/encoder")


def test_a_public_repository_is_asked_for(hub: SimulatedHub, folder: Path) -> None:
    hub.commit("me/encoder", {})
    with pytest.raises(InputError, match="already exists, and is public; send to it with"):
        push(folder, "me/encoder", license="mit", language="en")
    assert not sent_to(hub, "me/encoder")
    push(folder, "me/new", license="mit", language="en", public=True)
    assert hub.repositories["models", "me/new"].private is False


def test_the_hub_says_why_nothing_was_sent(hub: SimulatedHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    with pytest.raises(
        InputError, match=r"me/encoder cannot be sent to \(there is no token, or it is not valid: run `hf auth"
    ):
        push(folder, "me/encoder", license="mit", language="en")
    assert not hub.repositories


@pytest.mark.parametrize("text", ["https://huggingface.co/me/x", "80/10/10", "<br/>", "a and/or b", "runs/a@5", "1/2"])
def test_what_is_no_place_on_a_machine(text: str) -> None:
    assert not LOCAL_PATH.search(text)


@pytest.mark.parametrize("text", ["shards: /data/mine", "'~/models/x'", r"D:\data\mine", '"/data/a/b.json"'])
def test_what_is_one(text: str) -> None:
    assert LOCAL_PATH.search(text)
    assert not LOCAL_PATH.search(without_folders(text))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("'evaluation.data_dirs={a: ../shared/data/a, b: /data/b}'", "'evaluation.data_dirs={a: ./a, b: ./b}'"),
        ("--out ~/studies/mine --report ../../r", "--out ./mine --report ./r"),
        (r"checkpoint: /srv/runs/1m-12345678@5, D:\data\mine", "checkpoint: ./1m-12345678@5, ./mine"),
        ("https://a.org/b/c runs/x ./y a../b", "https://a.org/b/c runs/x ./y a../b"),
    ],
)
def test_of_a_place_on_a_machine_its_last_name_is_shown(text: str, shown: str) -> None:
    assert without_folders(text) == without_folders(shown) == shown
