import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import biphase.corpus.prepare as prepare_module
from biphase.api.folders import inspect
from biphase.cli.show import print_facts
from biphase.corpus.prepare import prepare
from biphase.corpus.shards import ShardSet, check_tokenizer, read_shard_manifest
from biphase.corpus.tokenizer import load_tokenizer, save_tokenizer, token_byte_lengths, tokenizer_hash, train_tokenizer
from biphase.engine.units import Engine
from biphase.errors import InputError
from biphase.files import locked, write_hashed

WORDS = ["the", "quick", "brown", "fox", "jumps", "größer", "日本語", "12345", "<|mask|>", "<|end_of_text|>", "x[0]"]


def texts_of(file: int, number: int = 40) -> list[str]:
    rng = np.random.default_rng(file)
    return [f"{file}.{i} {' '.join(rng.choice(WORDS, size=rng.integers(1, 60)))}\n" for i in range(number)]


def write_jsonl(path: Path, texts: list[str], prefix: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"id": f"{prefix or path.stem}-{number}", "text": text} for number, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "t"
    save_tokenizer(train_tokenizer(texts_of(0, 200), 300), folder)
    return folder


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for file in range(3):
        write_jsonl(tmp_path / "corpus" / f"{file}.jsonl", texts_of(file))
    return tmp_path / "corpus"


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer_folder: Path) -> Path:
    """A finished set of three shards, not to be changed."""
    folder = tmp_path_factory.mktemp("made")
    for file in range(3):
        write_jsonl(folder / "corpus" / f"{file}.jsonl", texts_of(file))
    prepare([folder / "corpus"], tokenizer_folder, folder / "set", validation_fraction=0.2, workers=1)
    return folder / "set"


def decoded(folder: Path, split: str = "train") -> list[str]:
    shards = ShardSet(folder, split)
    tokenizer = shards.tokenizer
    documents = [shards.document(index) for index in range(shards.num_documents)]
    assert all(ids[-1] == tokenizer.eos_token_id and tokenizer.eos_token_id not in ids[:-1] for ids in documents)
    return [tokenizer.decode(ids[:-1]) for ids in documents]


def stamps(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted((folder / "shards").rglob("*")) if path.is_file()}


def test_shards_decode_to_the_texts_in_order(made: Path) -> None:
    everything = [text for file in range(3) for text in texts_of(file)]
    train, validation = decoded(made), decoded(made, "validation")
    assert len(train) + len(validation) == len(everything)
    assert 10 <= len(validation) <= 40
    assert train == [text for text in everything if text in set(train)]
    assert validation == [text for text in everything if text in set(validation)]
    assert not set(train) & set(validation)


def test_manifest_counts_what_is_there(made: Path) -> None:
    shards = ShardSet(made)
    texts = decoded(made)
    total = shards.manifest.splits["train"]
    assert total.documents == shards.num_documents == len(texts)
    assert total.tokens == shards.num_tokens == len(shards.read(0, shards.num_tokens))
    assert total.text_bytes == sum(len(text.encode()) for text in texts)
    assert shards.token_bytes()[shards.read(0, shards.num_tokens)].sum() == total.text_bytes
    assert shards.manifest.special_ids == (0, 1, 2)
    assert not np.isin(shards.read(0, shards.num_tokens), [1, 2]).any(), "spelled-out special tokens stay text"
    manifest = shards.manifest
    assert (manifest.eos_id, manifest.mask_id, manifest.pad_id, manifest.bos_id) == (0, 1, 2, None)
    assert shards.manifest.tokenizer_hash == tokenizer_hash(shards.tokenizer)
    assert shards.dtype == np.uint16 and shards.manifest.vocab_size == 300


def test_any_stretch_of_the_stream_can_be_read(made: Path) -> None:
    shards = ShardSet(made)
    stream = np.concatenate([shards.document(index) for index in range(shards.num_documents)])
    bounds = [0, *shards.starts, shards.num_tokens]
    for start in bounds:
        for stop in (start, start + 1, start + 700, shards.num_tokens):
            if start <= stop <= shards.num_tokens:
                np.testing.assert_array_equal(shards.read(start, stop), stream[start:stop])
    assert shards.document_ends.dtype == np.int64
    np.testing.assert_array_equal(np.flatnonzero(stream == 0) + 1, shards.document_ends)


def test_content_does_not_depend_on_workers_or_place(made: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(made.parent / "corpus", tmp_path / "elsewhere")
    manifest = read_shard_manifest(
        prepare([tmp_path / "elsewhere"], tokenizer_folder, tmp_path / "out", validation_fraction=0.2, workers=2)
    )
    assert manifest.fingerprint == ShardSet(made).fingerprint
    seeded = tmp_path / "seed1"
    prepare([tmp_path / "elsewhere"], tokenizer_folder, seeded, validation_fraction=0.2, seed=1, workers=1)
    assert read_shard_manifest(seeded).fingerprint != manifest.fingerprint


@pytest.mark.slow
@pytest.mark.minutes
def test_a_ray_cluster_makes_the_same_set(made: Path, tokenizer_folder: Path, tmp_path: Path, monkeypatch) -> None:
    """From paths that are relative here: its workers stand elsewhere."""
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.chdir(made.parent)
    out = Path(os.path.relpath(tmp_path)) / "out"
    manifest = read_shard_manifest(prepare(["corpus"], tokenizer_folder, out, validation_fraction=0.2, engine="ray"))
    assert manifest.fingerprint == ShardSet(made).fingerprint
    (Path("corpus") / "bad.jsonl").write_text("{")
    with pytest.raises(InputError, match=r"bad.jsonl:1: broken JSON"):
        prepare(["corpus"], tokenizer_folder, tmp_path / "other", engine="ray")
    (Path("corpus") / "bad.jsonl").unlink()


@pytest.mark.parametrize("name", ["tokenizer", "token_bytes.npy", "shards"])
def test_nothing_is_written_through_a_link(name: str, made: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    if name == "token_bytes.npy":
        theirs.write_text("theirs")
    else:
        save_tokenizer(load_tokenizer(tokenizer_folder), theirs)
    before = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(theirs)
    with pytest.raises(InputError, match=f"{name} is a link"):
        prepare([made.parent / "corpus"], tokenizer_folder, tmp_path / "out", workers=1)
    after = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {key: after[key] for key in before} == before


def test_a_set_is_not_made_in_the_folder_of_its_tokenizer(corpus: Path, tokenizer_folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in tokenizer_folder.rglob("*")}
    for given in (tokenizer_folder, tokenizer_folder / "tokenizer.json"):
        with pytest.raises(InputError, match="is the folder of a tokenizer: give the shards another one"):
            prepare([corpus], given, tokenizer_folder, workers=1)
    assert {path: path.stat().st_mtime_ns for path in tokenizer_folder.rglob("*")} == before


def test_workers_are_few_and_large(monkeypatch) -> None:
    def num_workers(num_files: int, cores: int) -> int:
        monkeypatch.setattr(prepare_module, "num_cores", lambda: cores)
        return prepare_module.choose_engine(Engine(), num_files).workers or 1

    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    assert [num_workers(100, cores) for cores in (1, 2, 7, 8, 64)] == [1, 1, 1, 2, 16]
    assert num_workers(3, 64) == 3
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "False")
    assert [num_workers(100, cores) for cores in (1, 2, 64)] == [1, 2, 64]


def test_in_one_process_the_tokenizer_is_loaded_once(
    made: Path, tokenizer_folder: Path, tmp_path: Path, monkeypatch
) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    monkeypatch.setattr(prepare_module, "load_tokenizer", lambda _: tokenizer)
    monkeypatch.setattr(tokenizers, "Tokenizer", lambda model: Tokenizer(model))  # one without `from_file`
    manifest = read_shard_manifest(
        prepare([made.parent / "corpus"], "t", tmp_path / "out", validation_fraction=0.2, workers=1)
    )
    assert manifest.fingerprint == ShardSet(made).fingerprint


def test_torch_is_not_imported(made: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    """Importing it takes as long as a few MB of text."""
    tokenizers_alone = "import sys; from transformers import PreTrainedTokenizerFast; sys.exit('torch' in sys.modules)"
    if subprocess.run([sys.executable, "-c", tokenizers_alone], check=False).returncode:
        pytest.skip("the tokenizers of this version of transformers import torch")
    code = (
        "import sys; from pathlib import Path; from biphase.corpus.prepare import prepare; "
        "prepare([sys.argv[1]], sys.argv[2], Path(sys.argv[3])); sys.exit('torch' in sys.modules)"
    )
    arguments = [str(made.parent / "corpus"), str(tokenizer_folder), str(tmp_path / "out")]
    assert subprocess.run([sys.executable, "-c", code, *arguments], check=False).returncode == 0


def test_a_finished_set_is_left_alone(made: Path, tokenizer_folder: Path, capsys) -> None:
    before = stamps(made)
    prepare([made.parent / "corpus"], tokenizer_folder, made, validation_fraction=0.2)
    assert stamps(made) == before
    assert "nothing to do" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"finished shard set with other options.*manifest.json"):
        prepare([made.parent / "corpus"], tokenizer_folder, made, validation_fraction=0.2, seed=3)
    with pytest.raises(InputError, match="set with other sources:"):
        prepare([made.parent / "corpus" / "0.jsonl"], tokenizer_folder, made, validation_fraction=0.2)


def test_a_set_grows_without_tokenizing_again(corpus: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare([corpus], tokenizer_folder, out)
    before = stamps(out)
    write_jsonl(corpus / "3.jsonl", texts_of(3))
    (out / "manifest.json").unlink()
    manifest = read_shard_manifest(prepare([corpus], tokenizer_folder, out))
    assert len(manifest.shards) == 4
    assert before.items() <= stamps(out).items()


KILLED = """
import os, signal, sys
from pathlib import Path
from biphase import files
from biphase.corpus.prepare import prepare

write_json, written = files.write_json, []
def kill_at_the_second(path, value):
    written.extend([path] if path.name == "shard.json" else [])
    if len(written) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    write_json(path, value)
files.write_json = kill_at_the_second
prepare([sys.argv[1]], sys.argv[2], Path(sys.argv[3]), workers=1, validation_fraction=0)
"""


def test_kill_between_data_and_record_is_ignored_and_resumed(
    corpus: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(corpus), str(tokenizer_folder), str(out)], check=False)
    assert killed.returncode == -signal.SIGKILL
    left = {path.name.split("-")[0] for path in (out / "shards").iterdir()}
    assert left == {".1.jsonl", "0.jsonl"}, "one whole shard, one that never got its name"
    with pytest.raises(InputError, match="or unfinished"):
        ShardSet(out)
    before = stamps(out)
    prepare([corpus], tokenizer_folder, out, workers=1, validation_fraction=0)
    after = stamps(out)
    assert {path: stamp for path, stamp in before.items() if "/0.jsonl" in path}.items() <= after.items()
    assert not [path for path in after if "/." in path]
    assert decoded(out) == [text for file in range(3) for text in texts_of(file)]


def children() -> list[int]:
    """Process ids of the workers of this process."""
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=False
    )
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if "biphase.engine.local" in line]


@pytest.mark.slow
@pytest.mark.minutes
def test_a_killed_worker_names_its_file_and_the_rest_is_kept(
    corpus: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for name in ("big0", "big1"):
        write_jsonl(corpus / f"{name}.jsonl", texts_of(9, 2000) * 5)
    failures: list[Exception] = []

    def run() -> None:
        try:
            prepare([corpus], tokenizer_folder, out, workers=2, validation_fraction=0)
        except InputError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:  # held while they are looked at, however slow this process is
        workers = children()
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)
        is_at_work = bool(list(out.glob("shards/.big*.part/*")))
        for worker in workers:
            os.kill(worker, signal.SIGKILL if is_at_work else signal.SIGCONT)
        if is_at_work:
            break
        time.sleep(0.005)
    thread.join(60)
    assert len(failures) == 1
    assert ".jsonl: worker was killed (signal 9, SIGKILL; out of memory?): finished files are kept" in str(failures[0])
    assert "\n" not in str(failures[0])
    assert not children()
    manifest = read_shard_manifest(prepare([corpus], tokenizer_folder, out, workers=2, validation_fraction=0))
    assert manifest.splits["train"].documents == 3 * 40 + 2 * 10_000


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_stops_with_its_place_and_keeps_what_is_finished(
    corpus: Path, tokenizer_folder: Path, tmp_path: Path, workers: int
) -> None:
    (corpus / "1.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(InputError, match=r"1.jsonl:2: broken JSON"):
        prepare([corpus], tokenizer_folder, tmp_path / "out", workers=workers)
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert not list((tmp_path / "out" / "shards").glob("*1.jsonl*"))
    write_jsonl(corpus / "1.jsonl", texts_of(1))
    (tmp_path / "out" / "shards" / ".2.jsonl-0.lock.part").write_text("")  # as left by a worker that was stopped
    (tmp_path / "out" / "shards" / ".2.jsonl-0.part").mkdir()
    prepare([corpus], tokenizer_folder, tmp_path / "out", workers=1, validation_fraction=0)
    assert decoded(tmp_path / "out") == [text for file in range(3) for text in texts_of(file)]
    assert not list((tmp_path / "out" / "shards").glob(".*"))


def test_no_space_left(corpus: Path, tokenizer_folder: Path, tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "out"
    write = prepare_module.SplitWriter.write
    calls = []

    def fail_at_the_second(self, *arguments) -> int:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *arguments)

    monkeypatch.setattr(prepare_module.SplitWriter, "write", fail_at_the_second)
    with pytest.raises(InputError, match=r"cannot be made \(No space left on device\); finished files are kept"):
        prepare([corpus], tokenizer_folder, out, workers=1, validation_fraction=0)
    before = stamps(out)
    assert len(list((out / "shards").iterdir())) == 1
    prepare([corpus], tokenizer_folder, out, workers=1, validation_fraction=0)
    assert before.items() <= stamps(out).items()
    assert decoded(out) == [text for file in range(3) for text in texts_of(file)]


def test_two_at_once_on_one_set(corpus: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    with locked(tmp_path / "out" / ".claim"), pytest.raises(InputError, match="another process is preparing"):
        prepare([corpus], tokenizer_folder, tmp_path / "out")


def test_damage_is_found(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "set")
    ShardSet(tmp_path / "set").verify()
    for kind in ("tokens", "ends"):
        path = sorted((tmp_path / "set" / "shards").glob(f"1*/train.{kind}"))[0]
        whole = path.read_bytes()
        path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
        with pytest.raises(InputError, match=f"train.{kind} is damaged") as caught:
            ShardSet(tmp_path / "set").verify()
        assert str(path) in str(caught.value)
        ShardSet(tmp_path / "set", "validation").verify()
        path.write_bytes(whole[:-2])
        with pytest.raises(InputError, match=rf"train.{kind} has .* bytes, not .*: delete .* biphase prepare again"):
            ShardSet(tmp_path / "set")
        path.unlink()
        with pytest.raises(InputError, match=f"train.{kind} is missing"):
            ShardSet(tmp_path / "set")
        path.write_bytes(whole)
    np.save(tmp_path / "set" / "token_bytes.npy", np.zeros(300, np.uint16))
    with pytest.raises(InputError, match=r"token_bytes.npy is damaged"):
        ShardSet(tmp_path / "set").verify()


def test_bad_manifests_and_names(made: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a shard set"):
        ShardSet(tmp_path)
    stored = json.loads((made / "manifest.json").read_text())
    del stored["record_hash"]
    for change, message in [
        ({"format_version": 9}, r"damaged.*format_version: Input should be 2"),
        ({"vocab_size": "many"}, r"damaged.*vocab_size"),
        ({"extra": 1}, r"damaged.*extra"),
    ]:
        write_hashed(tmp_path / "manifest.json", stored | change)
        with pytest.raises(InputError, match=message):
            ShardSet(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        ShardSet(tmp_path)


def test_wrong_tokenizer(made: Path) -> None:
    shards = ShardSet(made)
    check_tokenizer(shards, tokenizer_hash(shards.tokenizer))
    with pytest.raises(InputError, match=rf"{shards.manifest.tokenizer_hash[:16]}, not with ffffffffffffffff: prepare"):
        check_tokenizer(shards, "f" * 64)


def test_vocabulary_above_16_bits_takes_32(corpus: Path, tmp_path: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    for num_ids, dtype in ((65_536, "uint16"), (65_537, "uint32")):
        fillers = {f"filler{number}": number for number in range(num_ids - 256)}
        letter_ids = {letter: num_ids - 256 + number for number, letter in enumerate(letters)}
        backend = Tokenizer(models.BPE(fillers | letter_ids, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        state = json.loads(backend.to_str())
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for number, name in enumerate(("<|mask|>", "<|end_of_text|>", "<|pad|>")):
            state["model"]["vocab"][name] = state["model"]["vocab"].pop(f"filler{number}")
            state["added_tokens"].append({"id": number, "content": name} | plain)
        (tmp_path / "tokenizer.json").write_text(json.dumps(state))
        out = tmp_path / dtype
        manifest = read_shard_manifest(
            prepare([corpus], tmp_path / "tokenizer.json", out, workers=1, validation_fraction=0)
        )
        assert (manifest.vocab_size, manifest.dtype) == (num_ids, dtype)
        assert ShardSet(out).dtype == np.dtype(dtype)
        assert decoded(out) == [text for file in range(3) for text in texts_of(file)]


def test_validation_by_sources(corpus: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    train, held_out = [corpus / "0.jsonl", corpus / "1.jsonl"], [corpus / "2.jsonl"]
    prepare(train, tokenizer_folder, tmp_path / "out", validation=held_out, workers=1)
    assert decoded(tmp_path / "out") == texts_of(0) + texts_of(1)
    assert decoded(tmp_path / "out", "validation") == texts_of(2)
    with pytest.raises(InputError, match=r"for training and for validation, the source \S*2.jsonl is named twice"):
        prepare([corpus], tokenizer_folder, tmp_path / "other", validation=held_out)
    with pytest.raises(InputError, match="'txt_documents' is 'page': input should be 'file', 'paragraphs' or 'lines'"):
        prepare(train, tokenizer_folder, tmp_path / "o", txt_documents="page")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="choose one"):
        prepare(train, tokenizer_folder, tmp_path / "o", validation=held_out, validation_fraction=0.1)
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(InputError, match="the validation sources hold no text: name others, or leave them out"):
        prepare(train, tokenizer_folder, tmp_path / "o", validation=[tmp_path / "blank.txt"], workers=1)


def test_a_file_without_documents_is_one_empty_text(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.jsonl").write_text("\n")
    manifest = read_shard_manifest(
        prepare([tmp_path], tokenizer_folder, tmp_path / "out", workers=1, validation_fraction=0)
    )
    assert (manifest.splits["train"].documents, manifest.splits["train"].empty_texts) == (1, 1)
    assert decoded(tmp_path / "out") == ["some text"]
    with pytest.raises(InputError, match="every text is empty"):
        prepare([tmp_path / "b.jsonl"], tokenizer_folder, tmp_path / "o", workers=1, validation_fraction=0)


def test_validation_is_drawn_by_document_id(tokenizer_folder: Path, tmp_path: Path) -> None:
    """The draw stays when documents move between files, and its share is the fraction within four deviations."""
    texts = [f"document {number}" for number in range(3000)]
    one = write_jsonl(tmp_path / "one.jsonl", texts, prefix="d")
    rows = one.read_text().splitlines(keepends=True)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "a.jsonl").write_text("".join(rows[2000:]))
    (tmp_path / "two" / "b.jsonl").write_text("".join(rows[:2000]))
    prepare([one], tokenizer_folder, tmp_path / "o1", validation_fraction=0.1, workers=1)
    prepare([tmp_path / "two"], tokenizer_folder, tmp_path / "o2", validation_fraction=0.1, workers=1)
    held_out = decoded(tmp_path / "o1", "validation")
    assert sorted(held_out) == sorted(decoded(tmp_path / "o2", "validation"))
    assert abs(len(held_out) - 300) < 4 * (3000 * 0.1 * 0.9) ** 0.5


def test_empty_texts_are_counted(tokenizer_folder: Path, tmp_path: Path, capsys) -> None:
    write_jsonl(tmp_path / "d.jsonl", ["a", "", " \n", "b"])
    manifest = read_shard_manifest(
        prepare([tmp_path / "d.jsonl"], tokenizer_folder, tmp_path / "out", validation_fraction=0, workers=1)
    )
    assert (manifest.splits["train"].documents, manifest.splits["train"].empty_texts) == (2, 2)
    write_jsonl(tmp_path / "e.jsonl", ["", " "])
    with pytest.raises(InputError, match="no document is left for training"):
        prepare([tmp_path / "e.jsonl"], tokenizer_folder, tmp_path / "none", workers=1)
    (tmp_path / "f.txt").write_text("one document only")
    prepare([tmp_path / "f.txt"], tokenizer_folder, tmp_path / "txt", workers=1)
    assert "no document fell into validation" in capsys.readouterr().err


def test_files_of_one_name_are_drawn_together(tokenizer_folder: Path, tmp_path: Path, capsys) -> None:
    for number in range(40):
        (tmp_path / "texts" / str(number)).mkdir(parents=True)
        (tmp_path / "texts" / str(number) / "body.txt").write_text(f"text {number}")
    manifest = read_shard_manifest(
        prepare([tmp_path / "texts"], tokenizer_folder, tmp_path / "set", validation_fraction=0.3, workers=1)
    )
    assert manifest.splits["validation"].documents == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "rename files that share a name" in told


def test_long_documents_are_encoded_in_pieces_with_the_same_ids(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(prepare_module, "PIECE_CHARS", 50)
    monkeypatch.setattr(prepare_module, "BATCH_CHARACTERS", 300)
    rng = np.random.default_rng(0)
    joints = ["\n", "\n\n", " \n", "\n ", " ", ".\n", "\r\n", "\n\t", "\n\n\n"]
    texts = ["".join(rng.choice(WORDS) + rng.choice(joints) for _ in range(400)) for _ in range(5)]
    write_jsonl(tmp_path / "d.jsonl", texts)
    prepare([tmp_path / "d.jsonl"], tokenizer_folder, tmp_path / "out", validation_fraction=0, workers=1)
    shards = ShardSet(tmp_path / "out")
    backend = load_tokenizer(tokenizer_folder).backend_tokenizer
    backend.encode_special_tokens = True
    for index, text in enumerate(texts):
        assert shards.document(index)[:-1].tolist() == backend.encode(text, add_special_tokens=False).ids
    assert len(list(prepare_module.cut_text(texts[0], True))) > 20
    assert "".join(piece for piece, _ in prepare_module.cut_text(texts[0], True)) == texts[0]


def test_no_piece_of_a_document_is_too_long_to_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without lines that can be cut apart it ends at a blank, or where there is none, at the limit."""
    monkeypatch.setattr(prepare_module, "PIECE_CHARS", 10)
    monkeypatch.setattr(prepare_module, "LONGEST_TEXT", 30)

    def cut(text: str) -> list[str]:
        pieces = [*prepare_module.cut_text(text, True)]
        assert "".join(piece for piece, _ in pieces) == text and [is_last for _, is_last in pieces].index(
            True
        ) + 1 == len(pieces)
        return [piece for piece, _ in pieces]

    assert cut("a short text without lines.   ") == ["a short text without lines.   "]
    assert cut("one of more characters than can be encoded") == ["one of more characters than", " can be encoded"]
    assert cut("x" * 70) == ["x" * 30, "x" * 30, "x" * 10]
    assert cut("two lines of text\nthat are cut apart, as ever") == [
        "two lines of text\n",
        "that are cut apart, as ever",
    ]


def test_many_small_files_share_shards(tokenizer_folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(prepare_module, "MAX_SHARDS", 4)
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    manifest = read_shard_manifest(
        prepare([f"{tmp_path}/*.txt"], tokenizer_folder, tmp_path / "out", validation_fraction=0, workers=1)
    )
    assert [len(shard.sources) for shard in manifest.shards] == [3, 3, 3, 1]
    assert decoded(tmp_path / "out") == [f"text {number}" for number in range(10)]


def test_describe(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = inspect(made)
    shards, train = ShardSet(made), facts["train"]
    lengths = np.diff(shards.document_ends, prepend=0)
    assert (train["documents"], train["tokens"]) == (shards.num_documents, shards.num_tokens)
    assert (train["mean_document_tokens"], train["median_document_tokens"]) == (lengths.mean(), np.median(lengths))
    assert (facts["content"], facts["dtype"], len(facts["train_begins"])) == (shards.fingerprint, "uint16", 2)
    print_facts(facts)
    told = f"train: documents {shards.num_documents:,} · tokens {shards.num_tokens:,} · "
    assert told in capsys.readouterr().out
    assert len(token_byte_lengths(shards.tokenizer)) == shards.manifest.vocab_size
