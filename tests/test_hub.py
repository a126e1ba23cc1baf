"""A Hub id is its commit: the one in the cache, without network."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import huggingface_hub.file_download
import pytest
from huggingface_hub.utils import filter_repo_objects

from biphase.corpus.shards import read_shard_manifest
from biphase.corpus.tokenizer import load_tokenizer
from biphase.encoder.models import find_folder
from biphase.errors import InputError, StoppedError, told_as
from biphase.hub import (
    FILES,
    INDEX,
    SKIPPED_FILES,
    count_positions,
    fetch_model,
    longest_text,
    read_languages,
    refuse_pickles,
    told_by_hub,
)

sys.path.append(str(Path(__file__).parent))  # pytest's importlib mode adds nothing itself
from forks import Forks
from simulated_hub import STRANGER, TOKEN, Fault, SimulatedHub

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with two commits of one model, the newer one as `main`, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--some--model"
    for commit in (OLD, NEW):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(NEW)
    (repository / "refs" / "v1").write_text(OLD)
    return repository


def test_a_name_is_the_commit_that_is_here(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch_model("some/model") == cache / "snapshots" / NEW
    assert capsys.readouterr().err == f"model some/model: commit {NEW}\n"
    assert fetch_model("some/model", "v1") == fetch_model("some/model@v1") == cache / "snapshots" / OLD
    capsys.readouterr()
    assert fetch_model("some/model", OLD) == cache / "snapshots" / OLD
    assert capsys.readouterr().err == "", "a commit needs no word"


def test_what_is_nowhere_is_one_line(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for id, revision, named in (
        ("some/other", None, "some/other"),
        ("some/model", "v2", "some/model at revision v2"),
        ("some/model@refs/pr/1", None, "some/model at revision refs/pr/1"),
        ("some/model", "c" * 40, "some/model at revision ccc"),
        ("a b", None, "a b"),
    ):
        with pytest.raises(
            InputError, match=rf"model {named}.* is not a folder here and cannot be fetched from the Hub \(.+\);"
        ):
            fetch_model(id, revision)
    for path in ("./model", "/some/model", "~/model", "runs/some/model", "model/", "./some/model"):
        with pytest.raises(InputError, match=f"{path}: there is no such folder"):
            fetch_model(path)
        with pytest.raises(InputError, match="neither a run, nor a folder, nor a Hub id"):
            find_folder(path)
        with pytest.raises(InputError, match="there is no such folder"):
            load_tokenizer(path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    Path("shards").mkdir()
    with pytest.raises(InputError, match=r"tokenizer shards/tokeniser is not a folder here.*\(shards is a folder here"):
        fetch_model("shards/tokeniser", kind="tokenizer")  # without a look into the Hub
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    shutil.rmtree(cache)
    with pytest.raises(InputError, match="cannot be fetched from the Hub"):
        fetch_model("some/model")


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({"weight_map": {"a": "part.safetensors", "b": "pytorch_model.bin"}}, "names 'pytorch_model.bin'"),
        ({"weight_map": {"a": "../part.safetensors"}}, r"names '\.\./part.safetensors'"),
        ({"weight_map": {"a": "/tmp/part.safetensors"}}, "names '/tmp/part.safetensors'"),
        ({"weight_map": {"a": "inner/part.safetensors"}}, "names 'inner/part.safetensors'"),
        ({"weight_map": {"a": "other.safetensors"}}, "'other.safetensors', which is no "),
        ({"weight_map": {}}, "is damaged"),
        ({"weight_map": ["part.safetensors"]}, "is damaged"),
        ([], "is damaged"),
    ],
)
def test_an_index_names_safetensors_of_its_own_folder_only(index: object, said: str, tmp_path: Path) -> None:
    (tmp_path / "part.safetensors").touch()
    (tmp_path / "pytorch_model.bin").touch()
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
    refuse_pickles(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(InputError, match=said):
        refuse_pickles(tmp_path)


def test_no_way_to_load_weights_opens_what_an_index_names_elsewhere(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    from biphase.encoder.network import load_backbone, load_model

    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaConfig(vocab_size=8, **shape).save_pretrained(tmp_path)
    (tmp_path / "part.safetensors").touch()
    (tmp_path / "pytorch_model.bin").touch()
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "pytorch_model.bin"}}))
    for load in (load_model, load_backbone):
        with pytest.raises(InputError, match=r"names 'pytorch_model\.bin'"):
            load(tmp_path)


def test_modules_of_an_embedding_model_come_with_it() -> None:
    files = ["config.json", "model.safetensors", "modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors"]
    others = [
        "onnx/model.json",
        "1_Pooling/a/config.json",
        "2_Dense/pytorch_model.bin",
        "model.py",
        "checkpoint-5/a.json",
        "consolidated-00001-of-00003.safetensors",
        "model.fp16.safetensors",
    ]

    def fetched(kind: str) -> list[str]:
        return list(
            filter_repo_objects(files + others, allow_patterns=FILES[kind], ignore_patterns=SKIPPED_FILES[kind])
        )

    assert fetched("model") == files
    assert fetched("tokenizer") == ["config.json", "modules.json"]


@pytest.mark.parametrize(
    ("card", "known"),
    [
        ("---\nlanguage: en\n---\n", ("en",)),
        ("---\nlanguage: [pt-BR, EU]\nlicense: mit\n---\nA model.\n", ("pt", "eu")),
        ("---\nlanguage: [en, multilingual]\n---\n", ()),
        ("---\nlicense: mit\n---\n", ()),
        ("---\nlanguage: [en\n---\n", ()),
        ("no facts at all", ()),
        (None, ()),
    ],
)
def test_the_languages_of_a_card_are_read_where_it_names_some(
    card: str | None, known: tuple[str, ...], tmp_path: Path
) -> None:
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    assert read_languages(tmp_path) == known


def test_long_rope_reads_texts_as_long_as_its_first_angles() -> None:
    """Phi-3 128k: beyond 4,096 tokens one text of a batch would change the angles of all."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    assert longest_text(SimpleNamespace(max_position_embeddings=131_072, rope_parameters=rope)) == 4096
    old = {"type": "su"}
    config = SimpleNamespace(max_position_embeddings=131_072, rope_scaling=old, original_max_position_embeddings=4096)
    assert longest_text(config) == 4096
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 128}  # the same angles for any length
    assert longest_text(SimpleNamespace(max_position_embeddings=512, rope_parameters=yarn)) == 512
    assert longest_text(SimpleNamespace(max_position_embeddings=-1)) is None


def test_positions_begin_behind_padding_where_the_type_says_so() -> None:
    """RoBERTa's 514 are 512; a network without a limit has more than any text."""
    roberta = SimpleNamespace(max_position_embeddings=514, model_type="roberta", pad_token_id=1)
    assert count_positions(roberta) == 512
    bert = SimpleNamespace(max_position_embeddings=512, model_type="bert", pad_token_id=0)
    assert count_positions(bert) == 512 and count_positions(SimpleNamespace(model_type="t5")) > 10**9


# The Hub's client waits up to 8 seconds between its attempts.
SHORT_WAITS = "import time; sleep = time.sleep; time.sleep = lambda seconds: sleep(min(seconds, 0.02)); "

IMPORTS = "import biphase.api.finetuning, biphase.cli.app, datasets; from transformers import PreTrainedTokenizerFast"


class Hub(SimulatedHub):
    """A hub, and fresh processes to which it is the Hub, that have loaded already what is slow to load."""

    def __init__(self, home: Path) -> None:
        super().__init__()
        self.home = home
        self.forks: dict[tuple[str, str], Forks] = {}

    def __exit__(self, *_: object) -> None:
        for forks in self.forks.values():
            forks.close()
        super().__exit__()

    def clear(self) -> None:
        """Forget every repository, and what is in the cache."""
        for held in (self.repositories, self.blobs, self.renamed, self.faults, self.asked, self.leaked):
            held.clear()
        shutil.rmtree(self.home, ignore_errors=True)

    def run_python(self, code: str, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        settings = self.environment(self.home) | environment
        loaded_with = settings["HF_ENDPOINT"], settings["HF_HUB_OFFLINE"]
        if loaded_with not in self.forks:
            self.forks[loaded_with] = Forks(IMPORTS, os.environ | settings)
        return self.forks[loaded_with].run(SHORT_WAITS + code, *words, **settings)

    def told(self, code: str, **environment: str) -> str:
        """What it prints, or the last line of its error."""
        done = self.run_python(code, **environment)
        return (done.stdout or done.stderr).strip().splitlines()[-1]


@pytest.fixture(scope="module")
def the_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with Hub(tmp_path_factory.mktemp("hub") / "home") as hub:
        yield hub


@pytest.fixture
def hub(the_hub: Hub) -> Hub:
    the_hub.clear()
    return the_hub


FETCH = "from biphase.hub import fetch_model; print(fetch_model(*{!r}).name)"
READ = "from biphase.hub import load_rows; print(load_rows({!r}, None, 'train', {!r})[0]['text'])"


def test_the_hub_says_why(hub: Hub) -> None:
    commit = hub.commit("some/gated", {"config.json": "{}"}, gated=True)
    hub.commit("some/model", {"config.json": "{}"})
    code = (
        "from biphase.hub import fetch_model\n"
        "for asked in ('some/gated', None), ('some/typo', None), ('some/model', 'v9'):\n"
        "    try: print(fetch_model(*asked).name)\n"
        "    except ValueError as error: print(str(error).partition(chr(40))[2][:28], end='|')\n"
        "print()"
    )
    assert hub.told(code) == "it is gated; run `hf auth lo|there is none of this name, |it has no such revision); gi|"
    assert "this account has no access" in hub.told(FETCH.format(("some/gated",)), HF_TOKEN=STRANGER)
    assert hub.told(FETCH.format(("some/gated", commit)), HF_TOKEN=TOKEN) == commit
    assert not hub.leaked


GONE = {"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}
"""What a process has where nobody answers, and where the Hub is not to be asked."""
PIN = "from biphase.hub import pin_commit; print(pin_commit({!r}, {!r}))"
CARD = "---\nconfigs:\n- config_name: {}\n  data_files: train.jsonl\n---\n"


def rows_file(*texts: str) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def test_what_has_got_another_name_is_found_by_the_old_one(hub: Hub) -> None:
    model = hub.commit("new/model", {"config.json": "{}", "model.safetensors": b"0" * 1000})
    data = hub.commit("new/data", {"train.jsonl": rows_file("a")}, kind="datasets")
    hub.renamed = {"old/model": "new/model", "old/data": "new/data"}
    for gone in ({}, *GONE):
        assert hub.told(FETCH.format(("old/model",)), **gone) == model
        assert hub.told(PIN.format("old/data", None), **gone) == data
        assert hub.told(READ.format("old/data", data), **gone) == "a"


def test_a_model_whose_download_broke_off_is_fetched_again(hub: Hub) -> None:
    parts = {f"model-{number}.safetensors": bytes([number]) * 50_000 for number in range(3)}
    commit = hub.commit("some/model", {"config.json": "{}", "tokenizer.json": "{}", **parts})
    hub.faults = [Fault("^GET /[0-9a-f]{64}", times=999, cut_after=100)]
    fetch = FETCH.format(("some/model",))
    assert "cannot be fetched from the Hub" in hub.told(fetch)
    assert all("cannot be fetched from the Hub" in hub.told(fetch, **gone) for gone in GONE)
    hub.faults = [Fault("^GET /[0-9a-f]{64}", times=999, seconds=60)]
    hub.asked.clear()
    command, environment = [sys.executable, "-c", fetch], os.environ | hub.environment(hub.home)
    with subprocess.Popen(command, env=environment, stdout=-1, stderr=-1) as killed:
        while not any(re.match("GET /[0-9a-f]{64}", asked) for asked in list(hub.asked)):
            assert killed.poll() is None
            time.sleep(0.05)
        killed.kill()
    hub.faults = []
    both = [subprocess.Popen(command, env=environment, stdout=-1, text=True) for _ in range(2)]  # at once
    assert [process.communicate()[0] for process in both] == [f"{commit}\n"] * 2
    assert all(hub.told(fetch, **gone) == commit for gone in GONE)
    [folder] = (hub.home / "hub").glob("models--*/snapshots/*")
    assert {path.name: path.read_bytes() for path in folder.glob("*.safetensors")} == parts


def test_without_the_hub_a_data_set_is_read_at_the_last_commit_or_not_at_all(hub: Hub) -> None:
    old, new, other = (hub.commit("some/myData", {"train.jsonl": rows_file(text)}, kind="datasets") for text in "abc")
    assert [hub.told(READ.format("some/myData", commit)) for commit in (old, new)] == ["a", "b"]
    for gone in GONE:
        assert hub.told(READ.format("some/myData", new), **gone) == "b"
    for commit in (old, other):
        told = hub.told(READ.format("some/myData", commit), HF_HUB_OFFLINE="1")
        assert f"the cache has configuration 'default' of commit {new}, not 'default' of {commit}" in told


def test_a_configuration_without_a_name_is_never_another_one(hub: Hub) -> None:
    read = READ.replace("None", "{!r}")
    card = CARD.format("one") + "text"
    named = hub.commit("some/named", {"README.md": card, "train.jsonl": rows_file("a")}, kind="datasets")
    assert hub.told(read.format("some/named", None, named)) == "a"
    two = card.replace("---\ntext", "- config_name: two\n  data_files: other.jsonl\n  default: true\n---\ntext")
    files = {"README.md": two, "train.jsonl": rows_file("a"), "other.jsonl": rows_file("b")}
    several = hub.commit("some/several", files, kind="datasets")
    assert hub.told(read.format("some/several", "one", several)) == "a"
    gone = {"HF_HUB_OFFLINE": "1"}
    assert hub.told(read.format("some/named", None, named), **gone) == "a"
    assert hub.told(read.format("some/several", "one", several), **gone) == "a"
    told = hub.told(read.format("some/several", None, several), **gone)
    assert f"the cache has configuration 'one' of commit {several}, not 'two' of {several}" in told
    assert hub.told(read.format("some/several", None, several)) == "b"
    assert hub.told(read.format("some/several", "two", several), **gone) == "b"


def test_without_the_hub_a_revision_is_the_commit_that_it_was(hub: Hub) -> None:
    def pins(*named: str | None, **environment: str) -> list[str]:
        """What each is in one process, or why it is not known."""
        code = (
            "from biphase.hub import pin_commit\n"
            f"for one in {named}:\n"
            "    try: print(pin_commit('some/data', one))\n"
            "    except ValueError as error: print(error)"
        )
        return hub.run_python(code, **environment).stdout.splitlines()

    old = hub.commit("some/data", {"train.jsonl": rows_file("old")}, kind="datasets")
    hub.commit("some/data", {}, revision="refs/convert/parquet", kind="datasets")
    branch = hub.commit("some/data", {"train.jsonl": rows_file("branch")}, revision="v1", kind="datasets")
    for gone in GONE:  # nothing is here
        assert all("revision cannot be fetched from the Hub" in told for told in pins(None, "v1", **gone))
    heads = hub.repositories["datasets", "some/data"].revisions
    assert pins(None, "v1", "refs/convert/parquet") == [old, branch, heads["refs/convert/parquet"]]
    hub.commit("some/data", {"train.jsonl": rows_file("new")}, kind="datasets")
    for gone in GONE:
        assert pins(None, "v1", "refs/convert/parquet", **gone)[:2] == [old, branch]
    hub.faults = [Fault("GET /api/datasets", times=99, status=503)]
    assert pins(None) == [old], "out of order is no answer"
    hub.faults = [Fault("GET /api/datasets", times=99, status=403)]
    assert "cannot be fetched" in pins(None)[0], "a refusal is one"
    hub.faults = []
    assert pins(None) == [heads["main"]] != [old]


@pytest.mark.minutes
def test_shards_of_a_data_set_are_of_the_commit_that_they_name(
    hub: Hub, corpus: Any, documents: list[str], tmp_path: Path
) -> None:
    def prepare(source: str, out: str, **environment: str) -> str:
        """The last line, of what went well with what the set is known by."""
        code = "from biphase.cli.app import main; main()"
        words = ["prepare", source, "--tokenizer", str(corpus.tokenizer), "--out", str(tmp_path / out)]
        words += ["--workers", "1", "--validation-fraction", "0.3"]
        done = hub.run_python(code, *words, **environment)
        if done.returncode == 0:
            return read_shard_manifest(tmp_path / out).fingerprint
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        return done.stderr.strip().splitlines()[-1]

    files = {f"train-{at}.jsonl": rows_file(*documents[at::3][:9]) for at in range(3)}
    commit = hub.commit("some/corpus", files, kind="datasets")
    hub.faults = [Fault("train-2.jsonl", times=999, status=404)]
    assert "cannot be" in prepare("some/corpus", "a")
    hub.faults = []
    hub.commit("some/corpus", {"train-0.jsonl": rows_file("other")}, kind="datasets")
    made = prepare("some/corpus", "a")
    assert made == prepare(f"some/corpus@{commit}", "b") != prepare("some/corpus", "c")
    manifest = read_shard_manifest(tmp_path / "a")
    names = {f"hub:some/corpus::train@{commit}#{at}/3" for at in (1, 2, 3)}
    assert {name for shard in manifest.shards for name in shard.sources} == names
    for gone in GONE:
        hub.asked.clear()
        assert prepare("some/corpus", "a", **gone) == prepare("hub:some/corpus", "a") == made and not hub.asked
        assert "its newest revision cannot be fetched" in prepare("some/other", "d", **gone)
    shutil.rmtree(tmp_path / "a" / "shards" / manifest.shards[0].name)
    assert "cannot be" in prepare("some/corpus", "a", HF_HUB_OFFLINE="1")
    assert prepare("some/corpus", "a") == made
    assert read_shard_manifest(tmp_path / "a") == manifest


@pytest.mark.slow
@pytest.mark.minutes
def test_an_index_of_a_data_set_is_searched_without_the_hub(hub: Hub, corpus: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, LlamaConfig, LlamaModel

    words = ["search", "some/texts", "who is Tip?", "--index", str(tmp_path / "index")]
    command = "from biphase.cli.app import main; main()"
    forks = Forks("import biphase.cli.app, sentence_transformers", os.environ | hub.environment(hub.home))
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaModel(LlamaConfig(vocab_size=384, **shape)).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(corpus.tokenizer).save_pretrained(tmp_path / "model")
    hub.commit("some/texts", {"train.jsonl": rows_file("Tip is a boy", "Jack is a man")}, kind="datasets")
    found = forks.run(command, *words, "--model", str(tmp_path / "model")).stdout
    assert "hub:some/texts::train#1/1: row 1#0" in found
    hub.commit("some/texts", {"train.jsonl": rows_file("other")}, kind="datasets")
    assert forks.run(command, *words).stdout == hub.run_python(command, *words, **GONE[0]).stdout == found
    assert "other" in forks.run(command, *words, "--model", str(tmp_path / "model"), "--rebuild").stdout
    forks.close()


def test_rows_of_several_files_are_different_documents(hub: Hub) -> None:
    hub.commit("some/corpus", {f"train-{at}.jsonl": rows_file("a", "b") for at in range(2)}, kind="datasets")
    code = (
        "from biphase.corpus.text import find_text_sources, read_documents\n"
        "print([d.id for one in find_text_sources(['some/corpus']) for d in read_documents(one)])"
    )
    assert hub.told(code) == str([f"hub:some/corpus::train#{file}/2: row {row}" for file in (1, 2) for row in (1, 2)])


def test_a_model_that_is_here_in_part_is_none(hub: Hub) -> None:
    hub.commit("some/model", {"config.json": "{}", "model.safetensors": b"0" * 1000})
    hub.faults = [Fault("HEAD .*safetensors", times=99, status=400)]
    assert "cannot be fetched from the Hub" in hub.told(FETCH.format(("some/model",)))
    assert "cannot be fetched from the Hub" in hub.told(FETCH.format(("some/model",)), HF_HUB_OFFLINE="1")


def test_a_stop_is_no_refusal_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is a copy in the cache taken for it."""

    def stop(*_: object, **__: object) -> None:
        raise StoppedError()

    monkeypatch.setattr("huggingface_hub.snapshot_download", stop)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: "/cache/0123abc/config.json")
    with pytest.raises(StoppedError):
        fetch_model("some/model")

    def prepare() -> None:  # as `datasets` does
        try:
            stop()
        except Exception as error:
            raise RuntimeError("an error occurred while generating the dataset") from error

    for wrap in (told_by_hub("some/data cannot be fetched", "try again"), told_as("some/data cannot be read")):
        with pytest.raises(StoppedError), wrap:
            prepare()
    from torch.distributed.elastic.multiprocessing import SignalException

    with pytest.raises(SignalException), told_by_hub("some/model cannot be fetched", "try again"):
        raise SignalException("asked to end", signal.SIGTERM)
