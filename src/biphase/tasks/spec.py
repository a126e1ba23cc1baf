"""The table of tasks: what each one is, where its splits are published, and what its columns are called there.

What differs between tasks is data, not code: a task of the user's own is the same fields in a YAML file. `sources.py`
finds the files or the hub data behind a task, `examples.py` reads them.
"""

from functools import lru_cache
from pathlib import Path
from string import Formatter
from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from biphase.config import Strict, load_config
from biphase.errors import InputError, nearest

Family = Literal["sequence_classification", "token_classification", "question_answering", "retrieval"]
SplitName = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
Format = Literal["jsonl", "tsv", "columns", "squad", "record"]
Scheme = Literal["IOB1", "IOB2", "BIOES"]

PAPER_TASKS = (
    *("sst2", "mnli", "qqp"),
    *("conll2003", "ontonotes5", "uner_en_ewt"),
    *("squad", "squad_v2", "record"),
    *("msmarco", "nq", "mldr_en"),
)
"""The paper's twelve."""

METRICS: dict[Family, tuple[str, ...]] = {
    "sequence_classification": ("accuracy", "macro_f1", "f1"),
    "token_classification": ("f1", "strict_f1"),
    "question_answering": ("f1", "exact"),
    "retrieval": ("ndcg_at_10", "map_at_100", "mrr_at_10", "recall_at_100"),
}
"""The ones that may choose a learning rate."""


class Splits(Strict):
    """Where each split is: file names in a folder, or split names on the hub; for retrieval, those of the judgements.

    What has no place is drawn with seed 42: validation is 5 % of train. In retrieval whole queries are drawn: 5 % of
    train's and at least 100 (but no more than half); without train, validation is half of test's queries for a task
    that is trained on another one, else train is half of them, and validation and test are a quarter each.
    """

    train: str | None = None
    validation: str | None = None
    test: str


class FileLayout(Splits):
    """Files that a folder may hold. `.zst` and `.gz` are opened; `*` in a name stands for several files in order."""

    format: Format | None = None
    """Of the splits. None: by the ending, .jsonl, .tsv (with a header), .json (SQuAD's), else columns."""
    corpus: str = "corpus.jsonl"
    queries: str = "queries.jsonl"
    rename: dict[str, str] = Field(default_factory=dict)
    """The file's names of columns → the task's."""
    columns: tuple[int, int] = (0, 1)
    """Of a file of columns: where the word and the tag stand."""
    scheme: Scheme = "IOB2"
    """Of the tags. Examples always have IOB2."""
    has_short_rows: bool = False
    """Some rows of the published .tsv have too few fields: they are left out and counted, not errors."""


class HubRows(Strict):
    """Rows of a hub repository, of one or more splits."""

    config: str | None = None
    splits: Annotated[tuple[str, ...], Field(min_length=1)]


class Hub(Strict):
    id: str
    config: str | None = None
    revision: str | None = None
    """A commit. None, a tag or a branch is resolved to the commit that it names when the task is read."""
    splits: Splits
    corpus: HubRows | None = None
    queries: HubRows | None = None
    rename: dict[str, str] = Field(default_factory=dict)
    scheme: Scheme = "IOB2"


class Task(Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    family: Family
    metric: str
    """The one that chooses a learning rate (on validation): one of `METRICS`."""
    template: str = ""
    """The input, columns in braces: of a sequence classification, or of a question and, at the end, its context."""
    label: str = "label"
    """Classification: the column with the label, or with the list of tags."""
    classes: tuple[str, ...] = ()
    """Classification: the labels in the order of their numbers (a column may hold names or numbers); tags in IOB2."""
    unlabelled: tuple[str, ...] = ()
    """Values of `label` that say nobody knows: such rows are left out and counted."""
    words: str = "tokens"
    """Token classification: the column with the list of words."""
    query_template: str = "Query: {text}"
    document_template: str = "Document: {text}"
    trained_on: str | None = None
    """Retrieval: the task of the table whose training is evaluated here too; then there is no train split."""
    bundled: bool = False
    """Comes with the package, in `bundled/tasks`."""
    files: tuple[FileLayout, ...] = ()
    """What a `data_dir` may hold, by preference."""
    hub: Hub | None = None
    licence: str = ""
    citation: str = ""
    note: str = ""

    def __hash__(self) -> int:
        return hash(self.name)

    @model_validator(mode="after")
    def metric_fits(self) -> "Task":
        known = METRICS[self.family]
        if self.metric not in known:
            raise ValueError(f"metric '{self.metric}' is none of {self.family}{nearest(self.metric, known)}")
        if self.family == "sequence_classification" and self.metric == "f1" and len(self.classes) != 2:
            raise ValueError("metric 'f1' needs two classes; use accuracy or macro_f1")
        return self

    @model_validator(mode="after")
    def classes_fit(self) -> "Task":
        if not self.family.endswith("classification"):
            if self.classes:
                raise ValueError(f"{self.family} has no classes")
            return self
        if len(self.classes) < 2 or len(set(self.classes)) < len(self.classes):
            raise ValueError("classes must be two or more, none of them twice")
        if self.family == "token_classification":
            odd = [name for name in self.classes[1:] if name[:2] not in ("B-", "I-") or len(name) == 2]
            if self.classes[0] != "O":
                raise ValueError("classes must begin with O")
            if odd:
                raise ValueError(f"classes after O must be B-… and I-… (IOB2), not '{odd[0]}'")
        return self

    @model_validator(mode="after")
    def templates_fit(self) -> "Task":
        if self.family == "sequence_classification" and not template_columns(self.template):
            raise ValueError("template must name a column in braces, such as {text}")
        if self.family == "question_answering" and not (
            template_columns(self.template) == ("question", "context") and self.template.endswith("{context}")
        ):
            raise ValueError("template must have {question} and, at its end, {context}")
        for key in ("query_template", "document_template"):
            if template_columns(getattr(self, key)) != ("text",):
                raise ValueError(f"{key} must have {{text}} once")
        return self

    @model_validator(mode="after")
    def splits_fit(self) -> "Task":
        is_retrieval = self.family == "retrieval"
        if self.trained_on is not None and not is_retrieval:
            raise ValueError("trained_on is for retrieval")
        if is_retrieval and self.hub is not None and (self.hub.corpus is None or self.hub.queries is None):
            raise ValueError("hub: retrieval needs corpus and queries")
        for splits in (*self.files, *([] if self.hub is None else [self.hub.splits])):
            if splits.train is not None and self.trained_on is not None:
                raise ValueError("a task that is trained_on another one has no train")
            may_lack_train = is_retrieval and (self.trained_on is not None or splits.validation is None)
            if splits.train is None and not may_lack_train:
                raise ValueError(f"train is missing beside test: {splits.test}")
        return self


@lru_cache
def template_columns(template: str) -> tuple[str, ...]:
    """The columns that a template names; raises `ValueError` for anything else in braces."""
    try:
        fields = [field for field in Formatter().parse(template) if field[1] is not None]
    except ValueError as error:
        raise ValueError(f"template {template!r}: {error}; a brace that is text is doubled") from None
    for _, name, spec, conversion in fields:
        if not name or not name.isidentifier() or spec or conversion:
            raise ValueError(f"template {template!r}: only names of columns may stand in braces")
    return tuple(str(name) for _, name, _, _ in fields)


def named_splits(splits: Splits) -> dict[SplitName, str]:
    """The places of the splits that have one."""
    return {name: place for name in SPLITS if (place := getattr(splits, name)) is not None}


def find_task(name: str) -> Task:
    """A task by its name in the table, or from a YAML file (a path that ends in .yaml or .yml).

    Raises:
        InputError: unknown name, or whatever is wrong with the file.
    """
    if not name.endswith((".yaml", ".yml")):
        if name not in TASKS:
            raise InputError(f"unknown task '{name}'{nearest(name, TASKS)}")
        return TASKS[name]
    task = load_config(Task, Path(name))
    if task.name in TASKS:
        raise InputError(f"{name}: '{task.name}' is the name of a task of biphase's own; choose another")
    if task.bundled:
        raise InputError(f"{name}: 'bundled' is for tasks that come with biphase; give files or hub")
    if task.trained_on is not None and (task.trained_on not in TASKS or TASKS[task.trained_on].family != task.family):
        known = [other.name for other in TASKS.values() if other.family == task.family]
        raise InputError(f"{name}: trained_on: no retrieval task '{task.trained_on}'{nearest(task.trained_on, known)}")
    return task


NLI, QUESTION = "Premise: {premise}\nHypothesis: {hypothesis}", "Question: {question}\nContext: {context}"
NLI_CLASSES = ("entailment", "neutral", "contradiction")
NLI_COLUMNS = {"sentence1": "premise", "sentence2": "hypothesis", "gold_label": "label"}
RECORD_COLUMNS = {"passage": "context", "query": "question", "entity_spans": "candidates"}
JSONL = FileLayout(train="train.jsonl", validation="validation.jsonl", test="test.jsonl")
GLUE, GLUE_REVISION = "nyu-mll/glue", "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c"
GLUE_NOTE = "GLUE's test labels are not public: as in the paper, its validation split is the test split here."


def development_part(sizes: str) -> str:
    return (
        "As in the paper, 5 % of train is the validation split and the official development set is the test split. "
        f"split_train.jsonl and split_validation.jsonl ({sizes} questions of the development set, split by article) "
        "are for trying things out: scores on them are not the official benchmark's."
    )


def beir(train: str | None = None, validation: str | None = None, test: str = "test") -> tuple[FileLayout, ...]:
    """BEIR's folder: corpus.jsonl, queries.jsonl and qrels/NAME.tsv, or .jsonl as in MTEB's repositories."""
    return tuple(
        FileLayout(
            train=train and f"qrels/{train}{ending}",
            validation=validation and f"qrels/{validation}{ending}",
            test=f"qrels/{test}{ending}",
        )
        for ending in (".tsv", ".jsonl")
    )


def bio(*types: str) -> tuple[str, ...]:
    return ("O", *(f"{prefix}-{kind}" for kind in types for prefix in "BI"))


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="genre",
            family="sequence_classification",
            template="{text}",
            classes=("encyclopedia", "novel", "government", "abstract", "article"),
            metric="accuracy",
            bundled=True,
            files=(JSONL,),
            licence="CC BY-SA 4.0",
            citation="biphase, from the sources that bundled/tasks/LICENSES.md names",
            note="Which kind of text a sentence is from. Made for the demo; no published benchmark.",
        ),
        Task(
            name="sst2",
            family="sequence_classification",
            template="{sentence}",
            classes=("negative", "positive"),
            metric="accuracy",
            files=(FileLayout(train="train.tsv", test="dev.tsv"),),
            hub=Hub(id=GLUE, config="sst2", revision=GLUE_REVISION, splits=Splits(train="train", test="validation")),
            licence="not stated (research use)",
            citation="Socher et al. 2013, aclanthology.org/D13-1170; Wang et al. 2019 (GLUE), arXiv:1804.07461",
            note=GLUE_NOTE,
        ),
        Task(
            name="mnli",
            family="sequence_classification",
            template=NLI,
            classes=NLI_CLASSES,
            unlabelled=("-1", "-"),
            metric="accuracy",
            files=(
                FileLayout(train="train.tsv", test="dev_matched.tsv", rename=NLI_COLUMNS),
                FileLayout(train="multinli_1.0_train.jsonl", test="multinli_1.0_dev_matched.jsonl", rename=NLI_COLUMNS),
                FileLayout(train="train.jsonl", test="validation_matched.jsonl"),
            ),
            hub=Hub(
                id=GLUE,
                config="mnli",
                revision=GLUE_REVISION,
                splits=Splits(train="train", test="validation_matched"),
            ),
            licence="mixed (Open American National Corpus, CC BY 3.0, CC BY-SA 3.0 and others)",
            citation="Williams, Nangia and Bowman 2018, aclanthology.org/N18-1101; Wang et al. 2019, arXiv:1804.07461",
            note="Matched: the test split is of the genres that train is of. " + GLUE_NOTE,
        ),
        Task(
            name="qqp",
            family="sequence_classification",
            template="Question 1: {question1}\nQuestion 2: {question2}",
            classes=("not_duplicate", "duplicate"),
            metric="accuracy",
            files=(
                FileLayout(train="train.tsv", test="dev.tsv", rename={"is_duplicate": "label"}, has_short_rows=True),
                FileLayout(train="train.jsonl", test="validation.jsonl"),
            ),
            hub=Hub(id=GLUE, config="qqp", revision=GLUE_REVISION, splits=Splits(train="train", test="validation")),
            licence="Quora's terms of service (non-commercial use)",
            citation="Iyer, Dandekar and Csernai 2017 (Quora question pairs); Wang et al. 2019, arXiv:1804.07461",
            note=GLUE_NOTE + " The few broken rows of GLUE's train.tsv are left out, as on the hub.",
        ),
        Task(
            name="snli",
            family="sequence_classification",
            template=NLI,
            classes=NLI_CLASSES,
            unlabelled=("-1", "-"),
            metric="accuracy",
            bundled=True,
            files=(
                JSONL,
                FileLayout(
                    train="snli_1.0_train.jsonl",
                    validation="snli_1.0_dev.jsonl",
                    test="snli_1.0_test.jsonl",
                    rename=NLI_COLUMNS,
                ),
            ),
            hub=Hub(
                id="stanfordnlp/snli",
                revision="cdb5c3d5eed6ead6e5a341c8e56e669bb666725b",
                splits=Splits(train="train", validation="validation", test="test"),
            ),
            licence="CC BY-SA 4.0",
            citation="Bowman, Angeli, Potts and Manning 2015, arXiv:1508.05326",
            note="What is bundled is a small part: train and validation are the official dev part, split by premise; "
            "test is 1,000 premises of the official test part. Scores on it are not the official benchmark's.",
        ),
        Task(
            name="conll2003",
            family="token_classification",
            label="ner_tags",
            classes=bio("PER", "ORG", "LOC", "MISC"),
            metric="f1",
            files=(
                FileLayout(train="eng.train", validation="eng.testa", test="eng.testb", columns=(0, 3), scheme="IOB1"),
                FileLayout(train="train.txt", validation="valid.txt", test="test.txt", columns=(0, 3), scheme="IOB1"),
                JSONL,
            ),
            hub=Hub(
                id="lhoestq/conll2003",
                revision="19edcb426bfd625c275c17b9a99b2239243f4377",
                splits=Splits(train="train", validation="validation", test="test"),
            ),
            licence="Reuters corpus (research use, by agreement with NIST)",
            citation="Tjong Kim Sang and De Meulder 2003, aclanthology.org/W03-0419",
            note="The hub's copy is a mirror of the published one, without a loading script.",
        ),
        Task(
            name="ontonotes5",
            family="token_classification",
            label="tags",
            # The order in which tner/ontonotes5 numbers them.
            classes=(
                *("O", "B-CARDINAL", "B-DATE", "I-DATE", "B-PERSON", "I-PERSON", "B-NORP", "B-GPE", "I-GPE", "B-LAW"),
                *("I-LAW", "B-ORG", "I-ORG", "B-PERCENT", "I-PERCENT", "B-ORDINAL", "B-MONEY", "I-MONEY"),
                *("B-WORK_OF_ART", "I-WORK_OF_ART", "B-FAC", "B-TIME", "I-CARDINAL", "B-LOC", "B-QUANTITY"),
                *("I-QUANTITY", "I-NORP", "I-LOC", "B-PRODUCT", "I-TIME", "B-EVENT", "I-EVENT", "I-FAC"),
                *("B-LANGUAGE", "I-PRODUCT", "I-ORDINAL", "I-LANGUAGE"),
            ),
            metric="f1",
            files=(
                FileLayout(train="train*.json", validation="valid.json", test="test.json", format="jsonl"),
                JSONL,
            ),
            hub=Hub(
                id="tner/ontonotes5",
                revision="refs/convert/parquet",
                splits=Splits(train="train", validation="validation", test="test"),
            ),
            licence="LDC user agreement (LDC2013T19)",
            citation="Hovy et al. 2006, aclanthology.org/N06-2015; splits of tner (Ushio and Camacho-Collados 2021)",
            note="The hub's commit is not pinned: it is the one of the automatic parquet conversion when it is read.",
        ),
        Task(
            name="uner_en_ewt",
            family="token_classification",
            label="ner_tags",
            classes=bio("PER", "ORG", "LOC"),
            metric="f1",
            bundled=True,
            files=(
                JSONL,
                FileLayout(
                    train="en_ewt-ud-train.iob2",
                    validation="en_ewt-ud-dev.iob2",
                    test="en_ewt-ud-test.iob2",
                    columns=(1, 2),
                ),
            ),
            hub=Hub(id="hgissbkh/uner_en", splits=Splits(train="train", validation="validation", test="test")),
            licence="CC BY-SA 4.0",
            citation="Mayhew et al. 2024, aclanthology.org/2024.naacl-long.243",
            note="The bundled train split is an early revision in which a few entities differ from the release. "
            "The hub's copy is the paper's authors' and its commit is not pinned.",
        ),
        Task(
            name="wnut17",
            family="token_classification",
            label="ner_tags",
            classes=bio("corporation", "creative-work", "group", "location", "person", "product"),
            metric="f1",
            bundled=True,
            files=(
                JSONL,
                FileLayout(train="wnut17train.conll", validation="emerging.dev.conll", test="emerging.test.annotated"),
            ),
            hub=Hub(
                id="leondz/wnut_17",
                revision="1ac0b6d18c8a1a1d1606b24bef78b8af2f92d2d9",
                splits=Splits(train="train", validation="validation", test="test"),
            ),
            licence="CC BY 4.0",
            citation="Derczynski, Nichols, van Erp and Limsopatham 2017, aclanthology.org/W17-4418",
        ),
        Task(
            name="squad",
            family="question_answering",
            template=QUESTION,
            metric="f1",
            files=(
                FileLayout(train="train-v1.1.json", test="dev-v1.1.json"),
                FileLayout(train="train.jsonl", test="validation.jsonl"),
                FileLayout(train="split_train.jsonl", test="split_validation.jsonl"),
            ),
            hub=Hub(
                id="rajpurkar/squad",
                revision="7b6d24c440a36b6815f21b70d25016731768db1f",
                splits=Splits(train="train", test="validation"),
            ),
            licence="CC BY-SA 4.0",
            citation="Rajpurkar, Zhang, Lopyrev and Liang 2016, aclanthology.org/D16-1264",
            note=development_part("8,244 and 2,326"),
        ),
        Task(
            name="squad_v2",
            family="question_answering",
            template=QUESTION,
            metric="f1",
            files=(
                FileLayout(train="train-v2.0.json", test="dev-v2.0.json"),
                FileLayout(train="train.jsonl", test="validation.jsonl"),
                FileLayout(train="split_train.jsonl", test="split_validation.jsonl"),
            ),
            hub=Hub(
                id="rajpurkar/squad_v2",
                revision="3ffb306f725f7d2ce8394bc1873b24868140c412",
                splits=Splits(train="train", test="validation"),
            ),
            licence="CC BY-SA 4.0",
            citation="Rajpurkar, Jia and Liang 2018, aclanthology.org/P18-2124",
            note=development_part("9,071 and 2,802"),
        ),
        Task(
            name="record",
            family="question_answering",
            template=QUESTION,
            metric="f1",
            files=(
                FileLayout(train="train.jsonl", test="val.jsonl", format="record"),
                FileLayout(train="train.jsonl", test="validation.jsonl", rename=RECORD_COLUMNS),
            ),
            hub=Hub(
                id="aps/super_glue",
                config="record",
                revision="3de24cf8022e94f4ee4b9d55a6f539891524d646",
                splits=Splits(train="train", test="validation"),
                rename=RECORD_COLUMNS,
            ),
            licence="not stated (news passages, research use)",
            citation="Zhang et al. 2018, arXiv:1810.12885; Wang et al. 2019 (SuperGLUE), arXiv:1905.00537",
            note="The answer is one of the passage's entities, listed as candidates; it stands for @placeholder in the "
            "question. SuperGLUE's test labels are not public: its validation split is the test split here.",
        ),
        Task(
            name="msmarco",
            family="retrieval",
            metric="ndcg_at_10",
            files=beir("train", "dev", "test"),
            hub=Hub(
                id="mteb/msmarco",
                config="default",
                revision="c5a29a104738b98a9e76336939199e264163d4a0",
                splits=Splits(train="train", validation="dev", test="test"),
                corpus=HubRows(config="corpus", splits=("corpus",)),
                queries=HubRows(config="queries", splits=("queries",)),
            ),
            licence="Microsoft's terms (non-commercial research)",
            citation="Bajaj et al. 2016, arXiv:1611.09268; Craswell et al. 2020 (TREC DL 2019), arXiv:2003.07820; "
            "Thakur et al. 2021 (BEIR), arXiv:2104.08663",
            note="Test is TREC Deep Learning 2019: 43 queries with graded judgements; validation is MS MARCO's dev.",
        ),
        Task(
            name="nq",
            family="retrieval",
            metric="ndcg_at_10",
            trained_on="msmarco",
            files=beir(),
            hub=Hub(
                id="mteb/nq",
                config="default",
                revision="b774495ed302d8c44a3a7ea25c90dbce03968f31",
                splits=Splits(test="test"),
                corpus=HubRows(config="corpus", splits=("corpus",)),
                queries=HubRows(config="queries", splits=("queries",)),
            ),
            licence="CC BY-SA 3.0",
            citation="Kwiatkowski et al. 2019, aclanthology.org/Q19-1026; Thakur et al. 2021, arXiv:2104.08663",
            note="BEIR's 3,452 test queries are drawn half and half into validation and test with seed 42 (the paper "
            "drew them anew, unseeded, in every run): scores are not those of BEIR's whole test set.",
        ),
        Task(
            name="mldr_en",
            family="retrieval",
            metric="ndcg_at_10",
            trained_on="msmarco",
            files=beir(None, "dev", "test"),
            hub=Hub(
                id="mteb/MultiLongDocRetrieval",
                config="en-qrels",
                revision="837028901907a7d419b4ab906f28e011ce1cc824",
                splits=Splits(validation="dev", test="test"),
                corpus=HubRows(config="en-corpus", splits=("dev", "test")),
                queries=HubRows(config="en-queries", splits=("dev", "test")),
                rename={"id": "_id"},
            ),
            licence="MIT",
            citation="Chen et al. 2024, arXiv:2402.03216",
            note="Long documents; the hub's copy is MTEB's of Shitao/MLDR, without its loading script.",
        ),
        Task(
            name="cranfield",
            family="retrieval",
            metric="ndcg_at_10",
            files=beir(),
            licence="not stated (old public test collection)",
            citation="Cleverdon 1967, The Cranfield tests on index language devices",
            note="The 225 queries are drawn with seed 42: half train, a quarter validation, a quarter test. Scores are "
            "not those of the whole collection.",
        ),
        Task(
            name="squad_retrieval",
            family="retrieval",
            metric="ndcg_at_10",
            files=beir("train"),
            licence="CC BY-SA 4.0",
            citation="biphase, from SQuAD (Rajpurkar et al. 2016, aclanthology.org/D16-1264)",
            note="SQuAD's questions → its paragraphs, in BEIR's layout. No published benchmark.",
        ),
        Task(
            name="wiki_longdoc",
            family="retrieval",
            metric="ndcg_at_10",
            files=beir("train"),
            licence="CC BY-SA",
            citation="biphase, from English Wikipedia",
            note="A sentence → the long article that it was taken out of, in BEIR's layout: a small stand-in for "
            "mldr_en. Queries are synthetic; no published benchmark.",
        ),
    )
}
