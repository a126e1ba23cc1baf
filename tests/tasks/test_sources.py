import gzip
import json
import os
from functools import partial
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import pytest
import zstandard

from biphase.corpus.rows import SHORT_ROW, rows_of_file
from biphase.errors import InputError
from biphase.files import content_hash, file_hash
from biphase.tasks import sources
from biphase.tasks.sources import HUB, definition, find_files, find_source, read_rows
from biphase.tasks.spec import FileLayout, Hub, HubRows, Splits, Task, task_table

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROWS = ["train.jsonl", "validation.jsonl", "test.jsonl"]
RECORD = {
    "source": "Daily mail",
    "idx": 7,
    "passage": {
        "text": "Ann met Bob.\n@highlight\nAnn won",
        "entities": [{"start": 0, "end": 2}, {"start": 8, "end": 10}],
    },
    "qas": [
        {"idx": 1, "query": "@placeholder won", "answers": [{"start": 0, "end": 2, "text": "Ann"}]},
        {"idx": 2, "query": "She met @placeholder", "answers": [{"start": 8, "end": 10, "text": "Bob"}]},
    ],
}


def folder_with(tmp_path: Path, names: list[str], content: str = "{}\n") -> Path:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(content)
    return tmp_path


def changed(name: str, /, **changes: object) -> Task:
    return task_table()[name].model_copy(update=changes)


@pytest.mark.parametrize("name", task_table())
def test_every_layout_is_found(tmp_path: Path, name: str) -> None:
    """Also compressed, and the missing of any one file is noticed."""
    task = task_table()[name]
    for number, layout in enumerate(task.files):
        names = list(sources.parts_of(task, layout).values())
        folder = folder_with(tmp_path / str(number), [file.replace("*", "00") for file in names])
        assert find_source(task, folder).form == layout
        for file in folder.rglob("*.*"):
            file.rename(f"{file}.gz")
        source = find_source(task, folder)
        assert source.form == layout and source.name == str(folder)
        last = source.files["test"][0]
        last.unlink()
        with pytest.raises(InputError, match=f"{folder}: task '{name}' needs ") as caught:
            find_source(task, folder)
        assert all(file in str(caught.value) for file in names)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none is not a folder"):
        find_source(task_table()["snli"], tmp_path / "none")
    with pytest.raises(InputError, match=r"needs train\.tsv \+ dev\.tsv there"):
        find_source(task_table()["sst2"], tmp_path)
    with pytest.raises(InputError, match="does not say what files"):
        find_source(changed("sst2", files=()), tmp_path)


def test_shards_are_read_once_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder_with(tmp_path, ["valid.json", "test.json"])
    for n in (1, 0, 2):
        (tmp_path / f"train0{n}.json").write_text(f'{{"n": {n}}}')
        (tmp_path / f"train0{n}.json.gz").write_bytes(gzip.compress(f'{{"n": {n}}}'.encode()))
    (tmp_path / "train02.json").unlink()
    (tmp_path / "train00.json.gz").unlink()
    absolute = task_table()["ontonotes5"].files[0].model_copy(update={"train": f"{tmp_path}/train*.json"})
    for changes in ({}, {"files": [absolute]}):
        source = find_source(changed("ontonotes5", **changes), tmp_path)
        assert [row["n"] for _, row in read_rows(source, "train")] == [0, 1, 2]


def test_a_pattern_that_matches_compressed_files_too_reads_each_file_once(tmp_path: Path) -> None:
    folder_with(tmp_path, ["a.jsonl", "a.jsonl.gz", "b.jsonl.gz", "b.jsonl.zst", "c.jsonl.GZ"])
    for pattern in ("*", "?.*", "*.jsonl*"):
        assert [path.name for path in find_files(tmp_path, pattern)] == ["a.jsonl", "b.jsonl.zst", "c.jsonl.GZ"]
    for name, found in {"*.jsonl": ["a.jsonl", "b.jsonl.zst"], "*.gz": ["a.jsonl.gz", "b.jsonl.gz"]}.items():
        assert [path.name for path in find_files(tmp_path, name)] == found
    assert find_files(tmp_path, "b.jsonl") == (tmp_path / "b.jsonl.zst",) and find_files(tmp_path, "d.jsonl") == ()


def test_a_pattern_reaches_into_folders_but_not_to_the_notes_of_macos(tmp_path: Path) -> None:
    folder_with(tmp_path, ["a.csv", "b/c.csv", "b/d/e.csv.gz", "b/._c.csv", "._a.csv"])
    for pattern, names in {
        "**/*.csv": ["a.csv", "b/c.csv", "b/d/e.csv.gz"],
        "b/**/*.csv": ["b/c.csv", "b/d/e.csv.gz"],
        "*.csv": ["a.csv"],
        "*/*.csv": ["b/c.csv"],
    }.items():
        assert [str(path.relative_to(tmp_path)) for path in find_files(tmp_path, pattern)] == names


def test_what_map_leaves_in_a_saved_data_set_is_not_hashed(tmp_path: Path) -> None:
    for split in ("train", "test"):
        datasets.Dataset.from_list([{"text": split, "label": 1}]).save_to_disk(str(tmp_path / split))
    task = changed("genre", files=(FileLayout(train="train", test="test"),))
    before = find_source(task, tmp_path)
    [file] = (tmp_path / "train").glob("*.arrow")
    assert before.hashes["train"] == [content_hash([file_hash(file)])]
    (tmp_path / "train" / "cache-1a2b.arrow").write_bytes(file.read_bytes())
    assert find_source(task, tmp_path).hash == before.hash
    file.unlink()
    with pytest.raises(InputError, match=r"data-00000-of-00001\.arrow does not exist"):
        find_source(task, tmp_path)


def test_a_template_that_goes_on_after_its_only_column_has_names_of_its_own() -> None:
    """Earlier versions cut its end off; all other templates keep their names."""
    for template in ("{a} so", "so {a}\n", "{a}}}"):
        assert "cut" in definition(changed("sst2", template=template)), template
    for template in ("{a}", "so {a}", "{{b}}{a}", "{a}{b} so", "{a} {b}", ""):
        assert "cut" not in definition(changed("sst2", template=template)), template


def test_bundled() -> None:
    source = find_source(task_table()["snli"], None)
    assert source.name == "biphase" and source.splits == ("train", "validation", "test")
    folder = Path(str(resources.files("biphase"))) / "bundled" / "tasks"
    files = list(folder.glob("*.zst"))
    assert len(files) == 3 * sum(task.bundled for task in task_table().values())
    assert sum(file.stat().st_size for file in files) < 1_500_000
    notice = (folder / "LICENSES.md").read_text(encoding="utf-8")
    assert all(f"## {name}-" in notice for name, task in task_table().items() if task.bundled)
    with pytest.raises(InputError, match=r"'snli' comes neither .* give the folder with its data"):
        find_source(changed("snli", bundled=False, hub=None), None)
    with pytest.raises(InputError, match="'genre' is not on the Hub"):
        find_source(task_table()["genre"], HUB)


def test_hash_follows_what_decides_the_examples(tmp_path: Path) -> None:
    task, folder = task_table()["snli"], folder_with(tmp_path, ROWS)
    first = find_source(task, folder)
    other = folder_with(tmp_path / "copy", ROWS)
    assert find_source(task, other).hash == first.hash
    beside = {"name": "other", "note": "n", "licence": "l", "citation": "c", "bundled": False, "hub": None}
    assert find_source(changed("snli", **beside), folder).hash == first.hash
    hashes = {first.hash, find_source(task, None).hash}
    for change in (
        {"template": "{premise}"},
        {"unlabelled": ()},
        {"classes": task.classes[::-1]},
        {"metric": "macro_f1"},
    ):
        hashes.add(find_source(changed("snli", **change), folder).hash)
    renamed = task.files[0].model_copy(update={"rename": {"a": "premise"}})
    hashes.add(find_source(changed("snli", files=(renamed,)), folder).hash)
    (folder / "test.jsonl").write_text('{"changed": 1}\n')
    hashes.add(find_source(task, folder).hash)
    assert len(hashes) == 8


def test_files_are_hashed_once_until_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path, ROWS)
    find_source(task_table()["snli"], folder)
    monkeypatch.setattr("biphase.files.file_hash", lambda path: pytest.fail("hashed again"))
    find_source(task_table()["snli"], folder)
    monkeypatch.undo()
    before = find_source(task_table()["snli"], folder).hash
    stat = (folder / "train.jsonl").stat()
    (folder / "train.jsonl").write_text("[]\n")  # of the same size
    os.utime(folder / "train.jsonl", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert find_source(task_table()["snli"], folder).hash != before


def test_tables(tmp_path: Path) -> None:
    path = tmp_path / "t.tsv"
    path.write_text('\ufeffa\tb\r\n"x\ty"\r\nshort\n\u2028\t\n', encoding="utf-8")
    short = FileLayout(test="", has_short_rows=True, quotes=False)
    rows = list(rows_of_file(path, short))
    assert rows == [
        (f"{path}:2", {"a": '"x', "b": 'y"'}),
        (f"{path}:3", SHORT_ROW),
        (f"{path}:4", {"a": "\u2028", "b": ""}),
    ]
    with pytest.raises(InputError, match=r"t\.tsv:3: 1 fields where the header names 2"):
        list(rows_of_file(path, FileLayout(test="", quotes=False)))
    path.write_text("a\tb\n1\t2\t3\n")
    with pytest.raises(InputError, match=r"t\.tsv:2: 3 fields"):
        list(rows_of_file(path, short))


def test_columns(tmp_path: Path) -> None:
    path = tmp_path / "eng.train"
    read = partial(rows_of_file, path, words="tokens", label="ner_tags")
    path.write_text("-DOCSTART- -X- O O\n\nEU NNP I-NP I-ORG\nrejects VBZ I-VP O\n\n# NNP O O\n")
    four = FileLayout(test="", columns=(0, 3))
    assert list(read(four)) == [
        (f"{path}:3", {"tokens": ["EU", "rejects"], "ner_tags": ["I-ORG", "O"]}),
        (f"{path}:6", {"tokens": ["#"], "ner_tags": ["O"]}),
    ]
    path.write_text("# sent_id = s1\n# text = hi there\n1\thi there\tO\t-\n\n")
    numbered = FileLayout(test="", columns=(1, 2))
    assert [row for _, row in read(numbered)] == [{"id": "s1", "tokens": ["hi there"], "ner_tags": ["O"]}]
    path.write_text("in O\nYork\n")
    with pytest.raises(InputError, match=r"eng\.train:2: a line without a tag: 'York'"):
        list(read(FileLayout(test="")))


def test_squad(tmp_path: Path) -> None:
    path = tmp_path / "dev.json"
    asked = {"id": "a", "question": "Q?", "answers": []}
    paragraphs = [{"context": "c", "qas": [asked, asked | {"is_impossible": True}]}]
    path.write_text(json.dumps({"version": "v2.0", "data": [{"title": "t", "paragraphs": paragraphs}]}))
    read = partial(rows_of_file, path, FileLayout(test=""))
    rows = [row for _, row in read()]
    told = asked | {"title": "t", "context": "c"}
    assert rows == [told, told | {"is_impossible": True}]
    for broken, message in (
        ("{", r"dev\.json:1: broken JSON"),
        ("[1]", "row 0 is not an object"),
        ('{"data": [1]}', "not SQuAD's form"),
        ('{"data": [{"paragraphs": [{"qas": []}]}]}', None),
        ('{"data": [{"paragraphs": [{"qas": [{}]}]}]}', "not SQuAD's form"),
    ):
        path.write_text(broken)
        if message is None:
            assert list(read()) == []
            continue
        with pytest.raises(InputError, match=message):
            list(read())


def test_record(tmp_path: Path) -> None:
    path = tmp_path / "val.jsonl"
    path.write_text(json.dumps(RECORD))
    layout = FileLayout(format="record")
    rows = [row for _, row in rows_of_file(path, layout)]
    assert [row["id"] for row in rows] == ["7-1", "7-2"]
    assert rows[0]["candidates"] == {"text": ["Ann", "Bob"], "start": [0, 8]}
    assert rows[1]["answers"] == [{"text": "Bob", "start": 8}]
    path.write_text(json.dumps(RECORD | {"passage": "flat"}))
    with pytest.raises(InputError, match=r"val\.jsonl:1: not SuperGLUE's form"):
        list(rows_of_file(path, layout))


def test_bad_lines(tmp_path: Path) -> None:
    source = find_source(task_table()["snli"], folder_with(tmp_path, ROWS))
    for content, message in (
        (b'{"a": 1}\n\n{"a"', r"train\.jsonl:3: broken JSON"),
        (b"[1]", r"train\.jsonl:1: one JSON object per line"),
        (b'{"a": 1}\n{"a": "caf\xe9"}\n', r"train\.jsonl:2: not UTF-8"),
    ):
        (tmp_path / "train.jsonl").write_bytes(content)
        with pytest.raises(InputError, match=message):
            list(read_rows(source, "train"))
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(InputError, match=r"train\.jsonl does not exist"):
        list(read_rows(source, "train"))


@pytest.mark.parametrize(("ending", "compress"), [(".gz", gzip.compress), (".zst", zstandard.compress)])
def test_compressed_files(tmp_path: Path, ending: str, compress) -> None:
    folder_with(tmp_path, ROWS)
    (tmp_path / "test.jsonl").unlink()
    lines = "".join(f'{{"n": {n}}}\n' for n in range(5000)).encode()
    path = tmp_path / f"test.jsonl{ending}"
    path.write_bytes(compress(lines))
    source = find_source(task_table()["snli"], tmp_path)
    assert [row["n"] for _, row in read_rows(source, "test")] == list(range(5000))
    path.write_bytes(compress(lines)[: len(compress(lines)) // 2])
    with pytest.raises(InputError, match=r"test\.jsonl.*(cut short|broken JSON)"):
        list(read_rows(find_source(task_table()["snli"], tmp_path), "test"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict:
    """Hub data as `{(id, config, split): rows or an error}`; what was asked for is noted under `asked`."""
    there: dict = {"asked": []}

    def load_rows(id: str, config: str | None, split: str, commit: str) -> datasets.Dataset:
        there["asked"].append((id, config, split, commit))
        found = there[id, config, split]
        if isinstance(found, Exception):
            raise found
        return found if isinstance(found, datasets.Dataset) else datasets.Dataset.from_list(found)

    def load_dataset_builder(id: str, config: str | None, revision: str) -> SimpleNamespace:
        return SimpleNamespace(
            hash=revision,
            download_and_prepare=lambda: None,
            as_dataset=lambda split: load_rows(id, config, split, revision),
        )

    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    return there


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> dict:
    """The commits of revisions, and a count of how often the Hub is asked."""
    known: dict = {"asked": 0}

    def resolve_revision(self: object, id: str, *, repo_type: str, revision: str | None) -> SimpleNamespace:
        if len(revision or "") == 40:
            return SimpleNamespace(resolved=revision)
        known["asked"] += 1
        if (id, revision) not in known:
            raise huggingface_hub.errors.OfflineModeIsEnabled("no network\nat all")
        return SimpleNamespace(resolved=known[id, revision])

    monkeypatch.setattr(huggingface_hub.HfApi, "resolve_revision", resolve_revision)
    sources.pin_commit.cache_clear()
    return known


def test_hub_rows(hub: dict, commits: dict) -> None:
    names = datasets.ClassLabel(names=["entailment", "neutral", "contradiction"])
    features = datasets.Features({"premise": datasets.Value("string"), "label": names})
    rows = [{"premise": str(n), "label": n % 4 - 1} for n in range(2500)]
    hub["nyu-mll/glue", "mnli", "train"] = datasets.Dataset.from_list(rows, features=features)
    task = task_table()["mnli"]
    source = find_source(task, None)
    assert source.name == f"nyu-mll/glue@{task.hub.revision}" and source.splits == ("train", "test")
    assert commits["asked"] == 0 and not hub["asked"]
    read = list(read_rows(source, "train"))
    assert len(read) == 2500 and read[2400] == ("nyu-mll/glue train: row 2400", {"premise": "2400", "label": -1})
    assert [row["label"] for _, row in read[1:4]] == ["entailment", "neutral", "contradiction"]
    assert hub["asked"] == [("nyu-mll/glue", "mnli", "train", task.hub.revision)]


def test_hub_tags_come_as_names(hub: dict) -> None:
    tags = datasets.List(datasets.ClassLabel(names=["B-x", "O"]))
    features = datasets.Features({"theirs": tags, "tokens": datasets.List(datasets.Value("string"))})
    hub["a/b", None, "test"] = datasets.Dataset.from_list(
        [{"theirs": [1, 0], "tokens": ["in", "x"]}], features=features
    )
    there = Hub(id="a/b", revision=COMMIT, splits=Splits(train="train", test="test"), rename={"theirs": "ner_tags"})
    source = find_source(changed("conll2003", hub=there), None)
    tagged = ["O", "B-x"]
    assert [row for _, row in read_rows(source, "test")] == [
        {"theirs": tagged, "tokens": ["in", "x"], "ner_tags": tagged}
    ]


def test_hub_collection(hub: dict) -> None:
    there = Hub(
        id="a/b",
        config="qrels",
        revision=COMMIT,
        splits=Splits(validation="dev", test="test"),
        corpus=HubRows(config="docs", splits=("dev", "test")),
        queries=HubRows(config="asked", splits=("all",)),
    )
    hub["a/b", "docs", "dev"] = [{"_id": "1"}]
    hub["a/b", "docs", "test"] = [{"_id": "2"}]
    hub["a/b", "asked", "all"] = [{"_id": "q"}]
    hub["a/b", "qrels", "dev"] = [{"score": 1}]
    source = find_source(changed("mldr_en", hub=there), None)
    assert [row["_id"] for _, row in read_rows(source, "corpus")] == ["1", "2"]
    assert [row["_id"] for _, row in read_rows(source, "queries")] == ["q"]
    assert [place for place, _ in read_rows(source, "validation")] == ["a/b dev: row 0"]


def test_hub_revisions_are_resolved(commits: dict) -> None:
    task, other = task_table()["ontonotes5"], "f" * 40
    commits["tner/ontonotes5", "refs/convert/parquet"] = COMMIT
    source = find_source(task, None)
    assert source.name == f"tner/ontonotes5@{COMMIT}" and source.form.revision == COMMIT
    assert find_source(task, None) == source and commits["asked"] == 1
    pinned = changed("ontonotes5", hub=task.hub.model_copy(update={"revision": COMMIT}))
    assert find_source(pinned, None) == source
    moved = changed("ontonotes5", hub=task.hub.model_copy(update={"revision": other}))
    assert find_source(moved, None).hash != source.hash
    with pytest.raises(InputError, match=r"hgissbkh/uner_en: its newest revision .*no network\); give a folder"):
        find_source(task_table()["uner_en_ewt"], HUB)


def test_hub_is_read_instead_of_the_package(hub: dict) -> None:
    hub["stanfordnlp/snli", None, "test"] = [{"label": 1}]
    source = find_source(task_table()["snli"], HUB)
    assert source.hash != find_source(task_table()["snli"], None).hash
    assert [row for _, row in read_rows(source, "test")] == [{"label": 1}]


def test_hub_errors(hub: dict) -> None:
    source = find_source(task_table()["sst2"], None)
    key = ("nyu-mll/glue", "sst2", "train")
    for error, message in (
        (RuntimeError("Dataset scripts are no longer supported, but found x.py"), "remote code, which is never run"),
        (
            ValueError("Unknown split\nmore"),
            r"split 'train' cannot be read from the Hub \(Unknown split\); give a folder",
        ),
        (FileNotFoundError(), r"\(FileNotFoundError\)"),
    ):
        hub[key] = error
        with pytest.raises(InputError, match=message) as caught:
            list(read_rows(source, "train"))
        assert "\n" not in str(caught.value)


def test_hub_library_reads_a_folder_the_same_way(commits: dict, tmp_path: Path) -> None:
    """A data set in a folder stands for one on the Hub: the real `datasets` reads both the same way."""
    folder_with(tmp_path, ROWS, '{"premise": "a", "hypothesis": "b", "label": 2}\n')
    there = Hub(id=str(tmp_path), revision=COMMIT, splits=Splits(train="train", test="test"))
    source = find_source(changed("snli", bundled=False, hub=there), None)
    assert [row["label"] for _, row in read_rows(source, "test")] == [2]
    lacking = there.model_copy(update={"splits": Splits(train="train", test="best")})
    with pytest.raises(InputError, match="split 'best' cannot be read"):
        list(read_rows(find_source(changed("snli", bundled=False, hub=lacking), None), "test"))


def test_the_column_of_splits_is_found_as_all_columns_are(tmp_path: Path) -> None:
    """With blanks around its name, and inside another."""
    for name, column in {"split": "\\tsplit ", "meta.part": "meta"}.items():
        values = [value if column != "meta" else {"part": value} for value in ("train", "test", "dev")]
        rows = [f'{{"{column}": {json.dumps(value)}, "label": "{n}"}}\n' for n, value in enumerate(values)]
        (tmp_path / "all.jsonl").write_text("".join(rows))
        layout = FileLayout(train="all.jsonl", validation="all.jsonl", test="all.jsonl", split_column=name)
        source = find_source(changed("genre", name="mine", bundled=False, files=(layout,)), tmp_path)
        found = {split: [row["label"] for _, row in read_rows(source, split)] for split in source.splits}
        assert found == {"train": ["0"], "validation": ["2"], "test": ["1"]}
    layout = layout.model_copy(update={"split_column": "part"})
    source = find_source(changed("genre", name="mine", bundled=False, files=(layout,)), tmp_path)
    with pytest.raises(InputError, match="there is no column 'part', the `split_column` of the task"):
        list(read_rows(source, "train"))
