"""Scores of embeddings are those of other people's code; an index answers, and only with its own model."""

import json
import re
import shutil
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("sentence_transformers")

from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import (
    EmbeddingSimilarityEvaluator,
    InformationRetrievalEvaluator,
)
from sentence_transformers.sentence_transformer.modules import Dense
from sklearn.preprocessing import minmax_scale

from biphase.api.networks import open_index, run_zero_shot, search
from biphase.cli.meant import find_meant
from biphase.cli.show import print_passages
from biphase.corpus.text import sample_language
from biphase.embedding import model as embedders
from biphase.embedding.evaluation import read_judged_set, score_arms, score_bm25, score_embedder
from biphase.embedding.index import Searcher, load_ranker
from biphase.embedding.model import embed_pieces, load_embedder
from biphase.embedding.passages import cutting_hash
from biphase.embedding.questions import By, Filter, parse_filter, read_questions
from biphase.errors import InputError
from biphase.files import MARK

from ..conftest import flip_bit, replace_before


@pytest.fixture
def beir(pairs: list[dict[str, str]], tmp_path: Path) -> Path:
    folder = tmp_path / "beir"
    (folder / "qrels").mkdir(parents=True)
    documents = [{"_id": f"d{n}", "title": "", "text": row["positive"]} for n, row in enumerate(pairs)]
    queries = [{"_id": f"q{n}", "text": row["positive"][:30]} for n, row in enumerate(pairs)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents))
    (folder / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in queries))
    rows = [f"q{n}\td{n}\t1\n" for n in range(len(pairs))]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(rows))
    return folder


@pytest.fixture
def scored(pairs: list[dict[str, str]], tmp_path: Path) -> Path:
    rows = [{"sentence1": row["anchor"], "sentence2": row["positive"], "score": n % 6} for n, row in enumerate(pairs)]
    (tmp_path / "sts").mkdir()
    (tmp_path / "sts" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "sts" / "test.jsonl"


def test_retrieval_is_as_sentence_transformers_scores_it(encoder_folder: Path, beir: Path) -> None:
    judged = read_judged_set(beir)
    ours, _ = score_embedder(load_embedder(str(encoder_folder)), judged)
    relevant = {query: set(grades) for query, grades in judged.relevance.items()}
    evaluator = InformationRetrievalEvaluator(judged.queries, judged.documents, relevant, write_csv=False)
    theirs = evaluator(SentenceTransformer(str(encoder_folder)))
    for name, metric in (("ndcg_at_10", "ndcg@10"), ("recall_at_10", "recall@10"), ("mrr_at_10", "mrr@10")):
        assert ours[name] == pytest.approx(theirs[f"cosine_{metric}"], abs=1e-6)


def test_judgements_without_a_relevant_document_are_no_zeros(beir: Path) -> None:
    path = beir / "qrels" / "test.tsv"
    path.write_text(path.read_text().replace("\t1\n", "\t0\n"))
    with pytest.raises(InputError, match="no document is relevant"):
        read_judged_set(beir)


def test_no_query_finds_itself(encoder_folder: Path, beir: Path) -> None:
    """Queries that are documents too, by id and text: scores are those without them, however many are kept."""
    pytest.importorskip("bm25s")
    read = read_judged_set(beir)
    relevance = {id: {other: 1 for other in read.documents if other != id} for id in list(read.documents)[:2]}
    queries = {id: read.documents[id] for id in relevance}
    judged = replace(read, queries=queries, relevance=relevance)
    model = load_embedder(str(encoder_folder))
    _, rows = score_embedder(model, judged)
    assert all(row["id"] not in row["predicted"] and len(row["predicted"]) == 10 for row in rows)
    renamed = replace(judged, queries={f"q{id}": text for id, text in queries.items()})
    renamed = replace(renamed, relevance={f"q{id}": grades for id, grades in relevance.items()})
    # Under other ids they find themselves first.
    assert (score_bm25(judged)["mrr_at_10"], score_bm25(renamed)["mrr_at_10"]) == (1.0, 0.5)


def test_similarity_is_as_sentence_transformers_scores_it(encoder_folder: Path, scored: Path) -> None:
    judged = read_judged_set(scored)
    ours, _ = score_embedder(load_embedder(str(encoder_folder)), judged)
    columns = [list(column) for column in zip(*judged.pairs, strict=True)]
    theirs = EmbeddingSimilarityEvaluator(*columns, main_similarity="cosine")(SentenceTransformer(str(encoder_folder)))
    assert ours["spearman"] == pytest.approx(theirs["spearman_cosine"], abs=1e-6)


@pytest.mark.parametrize(
    ("header", "question"),
    [
        ("id,a,b,c", "which columns are pairs?"),
        ("question,answer,label", "does 'label' say how well its pairs fit?"),
        ("a,b,label", "is 'label' a score or a class?"),
        ("anchor,positive", "no scored pairs:"),
    ],
)
def test_judged_pairs_are_made_clear_by_their_columns(header: str, question: str, tmp_path: Path) -> None:
    """No option names the columns, unlike in a recipe."""
    width, file = header.count(",") + 1, tmp_path / "pairs.csv"
    rows = [["a fox", "foxes", "1", "red"], ["the sea", "bread", "0", "blue"]]
    file.write_text("".join(f"{line}\n" for line in (header, *(",".join(row[:width]) for row in rows))))
    with pytest.raises(InputError) as told:
        read_judged_set(file)
    assert str(told.value) == f"{file}: {question} call its columns sentence1, sentence2 and score"


def test_bm25_finds_the_beginnings_of_documents(beir: Path) -> None:
    pytest.importorskip("bm25s")
    assert score_bm25(read_judged_set(beir))["recall_at_10"] > 0.9


def test_results_are_kept_in_the_form_of_mteb(encoder_folder: Path, beir: Path, tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    run_zero_shot([str(encoder_folder)], [f"zero-shot:{beir}"], tmp_path / "scores")
    found = json.loads((tmp_path / "scores" / "zero-shot" / "encoder" / "beir.json").read_text())
    assert found["task_name"] == "beir"
    assert found["scores"]["test"][0]["main_score"] == found["scores"]["test"][0]["ndcg_at_10"]
    # Another model and other data by the same names replace no result; the same ones do.
    file, arms = beir / "qrels" / "test.tsv", tmp_path / "scores" / "zero-shot"
    other = tmp_path / "other" / "encoder"
    model = SentenceTransformer(str(encoder_folder))
    model[0].model.get_input_embeddings().weight.data.add_(1.0)  # type: ignore[union-attr, operator]
    model.save_pretrained(str(other))
    for name, num_kept in ((encoder_folder, 1), (other, 2), (other, 2)):
        run_zero_shot([str(name)], [f"zero-shot:{beir}"], tmp_path / "scores")
        assert len([*(arms / "encoder").iterdir()]) == len([*(arms / "encoder + BM25").iterdir()]) == num_kept
    assert found in [json.loads(path.read_text()) for path in (arms / "encoder").iterdir()]
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    run_zero_shot([str(other)], [f"zero-shot:{beir}"], tmp_path / "scores")
    assert len([*(arms / "encoder").iterdir()]) == 3 and len([*(arms / "BM25").iterdir()]) == 2
    with pytest.raises(InputError, match="needs fine-tuning"):
        run_zero_shot([str(encoder_folder)], [f"zero-shot:{beir}", "snli"], tmp_path / "scores")
    with pytest.raises(InputError, match="judged texts: beir is named twice"):
        run_zero_shot([str(encoder_folder)], [f"zero-shot:{beir}", "zero-shot:other/beir"], tmp_path / "scores")
    with pytest.raises(InputError, match="name of the folder encoder is named twice"):
        run_zero_shot([str(encoder_folder), "x/encoder"], [f"zero-shot:{beir}"], tmp_path / "scores")


def test_an_index_is_scored_by_its_answers(
    encoder_folder: Path, beir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Documents of one passage are ranked as the model ranks them; a long one counts by its best passage."""
    pytest.importorskip("bm25s")
    rows = [json.loads(line) for line in (beir / "corpus.jsonl").read_text().splitlines()]
    long = "The rain in the mountains feeds the river. " * 40
    rows[0]["text"] = f"{rows[0]['text']} {long}"
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps({"id": row["_id"], "text": row["text"]}) + "\n" for row in rows))
    index = tmp_path / "documents.index"
    search(documents, "rain", model=str(encoder_folder), index=index, language="none")
    (beir / "corpus.jsonl").unlink()  # the documents are those of the index
    assert find_meant(["evaluate", str(index), "--tasks", f"zero-shot:{beir}"]) is None, "the command line takes it too"
    found = run_zero_shot([str(index)], [f"zero-shot:{beir}"], tmp_path / "scores")["beir"]
    assert [*found] == [f"documents.index, {by}" for by in ("both", "bm25", "embeddings")]
    kept = json.loads((tmp_path / "scores" / "zero-shot" / "documents.index, bm25" / "beir.json").read_text())
    assert kept["scores"]["test"][0]["ndcg_at_10"] == found["documents.index, bm25"]["ndcg_at_10"]
    # By what `search` answers to each question.
    lines = (beir / "queries.jsonl").read_text().splitlines()
    queries = [{"id": row["_id"], "text": row["text"].strip()} for row in map(json.loads, lines)]
    for by in get_args(By):
        answers = search(index, questions=queries, by=by, documents=True, top=10)
        right = answers[answers["id"].str[1:] == answers["question_id"].str[1:]]
        assert found[f"documents.index, {by}"]["mrr_at_10"] == pytest.approx(
            (1 / right["rank"]).sum() / len(queries)
        ), by
    # Judgements that name what the index lacks: two of the first query's, then all.
    judgements = beir / "qrels" / "test.tsv"
    judgements.write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\tmissing\t1\nq1\tlost\t1\n")
    found = run_zero_shot([str(index)], [f"zero-shot:{beir}"], tmp_path / "scores")["beir"]
    assert found["documents.index, bm25"]["recall_at_10"] == pytest.approx(1 / 3)
    assert "documents.index lacks 2 of 3 judged documents, such as 'lost'; they count" in " ".join(
        capsys.readouterr().err.split()
    )
    judgements.write_text("query-id\tcorpus-id\tscore\nq0\tmissing\t1\n")
    with pytest.raises(InputError, match=r"documents\.index lacks 1 of 1 judged .* judges other documents"):
        run_zero_shot([str(index)], [f"zero-shot:{beir}"], tmp_path / "scores")
    with pytest.raises(InputError, match="MTEB's tasks need a model"):
        run_zero_shot([str(index)], ["mteb:STSBenchmark"], tmp_path / "scores")


def test_documents_of_equal_scores_are_judged_in_the_order_that_is_shown(
    encoder_folder: Path, beir: Path, tmp_path: Path
) -> None:
    """Not in trec_eval's order, by the last id. Twins have equal scores, and the first row is shown first."""
    pytest.importorskip("bm25s")
    path, index = beir / "corpus.jsonl", tmp_path / "documents.index"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_rows(path, [twin for row in rows for twin in (row, row | {"_id": f"{row['_id']}-twin"})])
    language = sample_language([row["text"] for row in rows], len(rows))
    search(path, "rain", model=encoder_folder, index=index, language=language)
    judged = read_judged_set(beir)
    questions = [{"id": id, "question": text} for id, text in judged.queries.items()]
    found = run_zero_shot([str(index)], [f"zero-shot:{beir}"], tmp_path / "scores")["beir"]
    fused = score_arms({"a": load_embedder(str(encoder_folder))}, judged)["a + BM25"]
    for by, scores in (*((by, found[f"documents.index, {by}"]) for by in get_args(By)), ("both", fused)):
        answers = search(index, questions=questions, by=by, documents=True, top=10)
        ranks = answers["rank"][answers["id"].str[1:] == answers["question_id"].str[1:]].astype(float)
        assert scores["ndcg_at_10"] == pytest.approx((1 / np.log2(1 + ranks)).sum() / len(questions)), by


def test_a_result_of_mteb_names_its_data_by_their_contents(
    encoder_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data that changed under one name give a second result; the same data in another folder do not."""
    result = ({"task_name": "STS", "dataset_revision": "local"}, 0.5)
    monkeypatch.setattr("biphase.embedding.evaluation.run_mteb", lambda *_: result)
    for folder, text, num_results in (("a", "x", 1), ("b", "x", 1), ("a", "y", 2)):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "test.jsonl").write_text(text)
        run_zero_shot([str(encoder_folder)], [f"mteb:STS={tmp_path / folder}"], tmp_path / "scores")
        assert len([*(tmp_path / "scores").rglob("STS*.json")]) == num_results


@pytest.mark.slow
@pytest.mark.minutes
def test_a_task_of_mteb_runs_from_a_folder(encoder_folder: Path, scored: Path, tmp_path: Path) -> None:
    pytest.importorskip("mteb")
    from biphase.embedding.evaluation import run_mteb

    embedder = load_embedder(str(encoder_folder))
    result, main_score = run_mteb(embedder, f"STSBenchmark={scored.parent}")
    assert json.loads(json.dumps(result)) == result and result["date"] > 0
    ours, _ = score_embedder(embedder, read_judged_set(scored))
    assert main_score == result["scores"]["test"][0]["main_score"] == pytest.approx(ours["spearman"], abs=1e-5)
    with pytest.raises(InputError, match="no task"):
        run_mteb(embedder, "NoSuchTask")
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "test.jsonl").write_text('{"sentences": "a", "labels": 1}\n')  # the Hub's are lists
    with pytest.raises(InputError, match="clusters must have its data as the Hub has them"):
        run_mteb(embedder, f"TwentyNewsgroupsClustering.v2={tmp_path / 'clusters'}")


def test_search_answers_and_knows_its_model(
    encoder_folder: Path, documents: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    pytest.importorskip("bm25s")
    text = tmp_path / "text"
    text.mkdir()
    for number, document in enumerate(documents[:6]):
        (text / f"{number}.txt").write_text(document, encoding="utf-8")
    found = search(text, "what did Tip make?", model=encoder_folder, top=2, by="both")
    assert list(found["by"]) == [f"{encoder_folder} + BM25"] * 2 and found["id"].str.contains(".txt#").all()
    assert search(f"{text}.index", "what did Tip make?", top=2, by="both").equals(found)
    (text / "notes.pdf").write_text("no text that is read")
    assert search(text, "what did Tip make?", top=2, by="both").equals(found)
    with pytest.raises(InputError, match="the field 'text', not of 'body'"):
        search(text, "what did Tip make?", text_field="body")
    monkeypatch.chdir(encoder_folder.parent)
    index = tmp_path / "other.index"
    found = search(text, "what did Tip make?", model=encoder_folder.name, index=index, top=1)
    monkeypatch.chdir(tmp_path)  # where a model of this name would be another one
    assert search(index, "what did Tip make?", top=1).equals(found)
    other = tmp_path / "other"
    model = SentenceTransformer(str(encoder_folder))
    model[0].model.get_input_embeddings().weight.data.add_(1.0)  # type: ignore[union-attr, operator]
    model.save_pretrained(str(other))
    with pytest.raises(InputError, match="rebuild it"):
        search(f"{text}.index", "who?", model=other)
    for name in ("embeddings.npy", "passages.jsonl", "lines.npy"):
        flip_bit(index / name)
        with pytest.raises(InputError, match=rf"{name} is damaged .*delete the index and build it again"):
            search(index, "who?")
        flip_bit(index / name)
    (text / "0.txt").write_text("something else")
    search(f"{text}.index", "who?")
    assert f"{text} has changed since" in "".join(capsys.readouterr().err.split("\n"))


def test_passages_that_were_cut_in_another_way_are_refused(
    encoder_folder: Path, documents: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those of an index whose record says nothing of it; --rebuild cuts anew."""
    pytest.importorskip("bm25s")
    text, index = tmp_path / "text.txt", tmp_path / "text.txt.index"
    text.write_text(documents[1], encoding="utf-8")
    search(text, "Tip", model=encoder_folder)
    monkeypatch.setattr("biphase.embedding.passages.PASSAGE_WORDS", 60)
    with pytest.raises(
        InputError, match=r"passages that were cut in another way: rebuild it \(--rebuild --model "
    ) as told:
        search(text, "Tip")
    assert str(told.value).endswith(f"--model {encoder_folder})"), "without it, embeddings would be lost"
    with pytest.raises(InputError, match=rf"--rebuild --model {encoder_folder}\) from its text, {text}"):
        search(index, "Tip")
    found = search(text, "Tip", model=encoder_folder, rebuild=True)
    assert search(index, "Tip").equals(found)
    record = json.loads((index / "index.json").read_text())
    del record["cutting"], record["language"], record["columns"], record["found_share"]
    (index / "index.json").write_text(json.dumps(record))
    (index / MARK).unlink()
    with pytest.raises(InputError, match="cut in another way"):
        search(index, "Tip")
    assert cutting_hash("tr") != cutting_hash("de") == cutting_hash("none"), "Turkish has small letters of its own"


def test_texts_in_memory_are_searched(encoder_folder: Path, documents: list[str], tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    pandas = pytest.importorskip("pandas")
    index = tmp_path / "oz.index"
    found = search(documents[:4], "what did Tip make?", model=encoder_folder, index=index, top=1)
    assert search(documents[:4], "what did Tip make?", index=index, top=1).equals(found)
    frame = pandas.DataFrame({"id": list("abcd"), "body": documents[:4]})
    rows = search(
        frame, "what did Tip make?", model=encoder_folder, index=index, top=1, text_field="body", rebuild=True
    )
    assert list(rows["text"]) == list(found["text"]) and rows["id"].str.fullmatch("[abcd]#[0-9]+").all()
    found = search(["Something else.", "Altogether new."], "something", index=index, text_field="body", by="both")
    assert set(found["text"]) == {"Something else.", "Altogether new."}
    with pytest.raises(InputError, match=r"name a folder, such as index='my\.index'"):
        search(documents[:4], "who?", model=encoder_folder)
    with pytest.raises(InputError, match="search takes one source, and 2 are given"):
        search(["a.txt", "b.txt"], "who?", index=index)


def test_texts_in_memory_are_kept_once_and_keep_their_ids(tmp_path: Path) -> None:
    """A file of their folder that biphase did not write stays."""
    pytest.importorskip("bm25s")
    texts, index = ["A flow of water.", "A wing of wood."], tmp_path / "my.index"
    found = search(texts, "flow", index=index)
    assert list(found["id"]) == ["texts:1#0"]
    [first] = (tmp_path / "my.index.texts").iterdir()
    others = [first.with_name(f"texts-{12 * '0'}.jsonl"), first.with_name("texts-mine.jsonl")]
    for other in others:
        shutil.copy(first, other)
    assert search([*texts, "A third one."], "flow", index=index)[["id", "text"]].equals(found[["id", "text"]])
    assert not first.exists() and len([*first.parent.iterdir()]) == 3 and all(other.exists() for other in others)
    assert search(index, "flow")["id"].tolist() == ["texts:1#0"]


@pytest.mark.parametrize(
    ("question", "top", "told"),
    [
        (" ", 5, "the question is ' ': give a text"),
        (["who?"], 5, r"the question is \['who\?'\]: give a text"),
        ("caf\udce9", 5, r"the question is 'caf\\udce9': give a text"),
        ("who?", 0, "top is 0: give 1 or more"),
    ],
)
def test_a_question_that_is_none_is_told_at_once(question: Any, top: int, told: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=told):
        search(tmp_path, question, top=top)


def test_no_index_lies_in_its_own_text(encoder_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some words")
    with pytest.raises(InputError, match=r"inside .*, and would be searched too"):
        search(tmp_path, "who?", model=encoder_folder, index=tmp_path / "index")


def test_a_model_of_dot_products_is_asked_by_them(
    encoder_folder: Path, beir: Path, documents: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths of embeddings count, in an index and in scores."""
    monkeypatch.setattr("biphase.device.has_bf16_units", lambda device: False)  # sentence-transformers takes fp32
    pytest.importorskip("bm25s")
    plain = SentenceTransformer(str(encoder_folder))
    SentenceTransformer(modules=list(plain), similarity_fn_name="dot").save_pretrained(str(tmp_path / "dot"))
    theirs = SentenceTransformer(str(tmp_path / "dot"))
    texts = [row["text"] for row in map(json.loads, (beir / "corpus.jsonl").read_text().splitlines())]
    asked = {"model": tmp_path / "dot", "index": tmp_path / "i", "by": "embeddings", "top": 3}
    found = search(texts, "what did Tip make?", **asked)
    scores = theirs.similarity(theirs.encode_query("what did Tip make?"), theirs.encode_document(texts))[0]
    best, numbers = scores.topk(3)
    assert list(found["score"][:3]) == pytest.approx(best.tolist(), rel=1e-4)
    assert list(found["text"][:3]) == [texts[number] for number in numbers]
    judged = read_judged_set(beir)
    relevant = {query: set(grades) for query, grades in judged.relevance.items()}
    evaluator = InformationRetrievalEvaluator(judged.queries, judged.documents, relevant, write_csv=False)
    assert score_embedder(load_embedder(str(tmp_path / "dot")), judged)[0]["ndcg_at_10"] == pytest.approx(
        evaluator(theirs)["dot_ndcg@10"], abs=1e-6
    )


def test_a_text_without_words_is_found_by_the_model_alone(encoder_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    (tmp_path / "text.txt").write_text("!!! ???")
    for by, number in (("both", 1), ("embeddings", 1), ("bm25", 0)):
        assert len(search(tmp_path / "text.txt", "who?", model=encoder_folder, by=by)) == number  # type: ignore[arg-type]


PAPERS = [
    {"id": "a", "text": "The boundary layers of wings were studied in supersonic flows.", "year": 1958, "open": True},
    {"id": "b", "text": "A flow around a slender body, and its pressure.", "year": 1960, "authors": ["Lin"]},
    {"id": "c", "text": "Heat is conducted through slabs of two metals.", "year": "1962", "score": 7},
    {"id": "d", "text": "The wing flutters at high speeds, and panels buckle."},
]


@pytest.fixture
def papers(tmp_path: Path) -> Path:
    """Rows with columns, of which not all have each."""
    pytest.importorskip("bm25s")
    return write_rows(tmp_path / "papers.jsonl", PAPERS)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_words_are_searched_by_their_stems_and_without_stop_words(encoder_folder: Path, papers: Path) -> None:
    """The language is found, kept in the index, and another one may be given for a text, not for an index."""
    found = search(papers, "the studies of flow", model=encoder_folder, by="bm25")
    assert list(found["by"]) == ["BM25"] * 2 and set(found["id"]) == {"a#0", "b#0"}
    found = search(papers, "the studies of flow", language="none", by="bm25")
    assert set(found["id"]) == {"a#0", "b#0", "c#0", "d#0"}  # by "the" and "of"
    index = Path(f"{papers}.index")
    assert json.loads((index / "index.json").read_text())["language"] == "none"
    with pytest.raises(InputError, match=r"has the words of language 'none', not of 'fr': search its text"):
        search(index, "flow", language="fr")
    with pytest.raises(InputError, match="language 'elvish' has neither stems nor stop words"):
        search(papers, "flow", language="elvish")


def test_an_open_index_answers_as_search_does_and_opens_once(
    encoder_folder: Path, papers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several threads at a time, with filters, and from the state that it opened."""
    asked = [("flow", None), ("heat", ["year>=1960"]), ("wing", "open=true"), ("slender body", None)]
    expected = [search(papers, question, where=where, model=encoder_folder) for question, where in asked]
    loaded: list[str] = []
    load = embedders.load_for_inference
    monkeypatch.setattr(embedders, "load_for_inference", lambda name: loaded.append(name) or load(name))
    searcher = open_index(f"{papers}.index")
    searcher.search("flow")
    write_rows(papers, PAPERS[:1])
    search(papers, "flow")
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda pair: searcher.search(pair[0], where=pair[1]), 4 * asked))
    for ours, theirs in zip(found, 4 * expected, strict=True):
        pandas.testing.assert_frame_equal(ours, theirs)
    assert len(loaded) == 2, "once for the searcher, once for the search that updated the index"
    with pytest.raises(InputError, match="no question is given"):
        searcher.search()


def test_words_alone_rank_until_a_model_adds_embeddings(encoder_folder: Path, papers: Path) -> None:
    """An update without a model keeps it so; with one, the index is as if it had been built with it."""
    index = Path(f"{papers}.index")
    found = search(papers, "flow")
    assert list(found["by"]) == ["BM25"] * 2 and not (index / "embeddings.npy").exists()
    for by in ("both", "embeddings"):
        with pytest.raises(InputError, match=rf"no embeddings: search its text, {papers}, with an embedding model"):
            search(index, "flow", by=by)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=rf"no embeddings: search its text, {papers}, with {encoder_folder}"):
        search(index, "flow", model=encoder_folder)
    write_rows(papers, [*PAPERS, {"id": "e", "text": "The flow of heat in a slender rod."}])
    assert "e#0" in set(search(papers, "flow")["id"])
    found = search(papers, "flow", model=encoder_folder, by="both")
    assert set(found["by"]) == {f"{encoder_folder} + BM25"}
    pandas.testing.assert_frame_equal(found, search(index, "flow", by="both"))
    pandas.testing.assert_frame_equal(found, search(papers, "flow", model=encoder_folder, by="both", rebuild=True))


@pytest.mark.parametrize("by", ["bm25", "embeddings", "both"])
def test_each_document_is_answered_once_by_its_best_passage(
    by: By, encoder_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as are asked for, though the passages of one document are better than those of all others. Questions are
    embedded once, and only those that need more passages are asked again."""
    pytest.importorskip("bm25s")
    long = " ".join(f"flow flow flow number{number}" for number in range(1000))  # 34 passages
    rows = [{"id": "long", "text": long}, {"id": "#1", "text": "One flow here."}, {"id": "b", "text": "Flow it does."}]
    asked: Any = {"model": encoder_folder, "language": "none", "by": by}
    texts = write_rows(tmp_path / "texts.jsonl", rows)
    passages = search(texts, "flow", top=100, **asked)
    found = search(texts, "flow", top=3, documents=True, **asked)
    assert len(passages) == 36 or by == "bm25"
    best = passages.assign(id=passages["id"].str.rpartition("#")[0]).drop_duplicates("id")
    assert list(found["id"]) == list(best["id"]) and set(found["id"]) == {"long", "#1", "b"}
    assert list(found["text"]) == list(best["text"]) and list(found["rank"]) == [1, 2, 3]
    assert len(search(texts, "flow", top=5, documents=True, **asked)) == 3
    calls = Counter[str]()
    rank, embed = Searcher.rank, embedders.encode_batch

    def count_ranked(self: Searcher, request: Any, *given: Any) -> Any:
        calls.update(question.text for question in request.questions)
        return rank(self, request, *given)

    def count_embedded(encode: Any, texts: Any) -> Any:
        calls["embedded"] += len(texts)
        return embed(encode, texts)

    monkeypatch.setattr(Searcher, "rank", count_ranked)
    monkeypatch.setattr(embedders, "encode_batch", count_embedded)
    search(f"{texts}.index", questions=["flow", "does"], by=by, top=2, documents=True)
    assert calls["embedded"] == (0 if by == "bm25" else 2)
    assert calls["flow"] > 1 and (calls["does"] == 1 or by != "bm25")


def test_a_document_has_the_id_of_its_row_and_no_other_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """BEIR's files have `_id`. What a new file has in common with another changes no document's meaning."""
    pytest.importorskip("bm25s")
    texts = tmp_path / "texts"
    (texts / "more").mkdir(parents=True)
    rows = [{"id": 1, "text": "A flow."}, {"_id": "b", "text": "The flow."}, {"text": "No flow."}]
    write_rows(texts / "two.jsonl", rows)
    (texts / "more" / "note.txt").write_text("Flow in words.")
    found = search(texts, "flow", top=10, documents=True, language="none")
    assert {*found["id"]} == {"1", "b", "two.jsonl:3", "more/note.txt"}
    for file in (texts / "a", texts / "more"):
        file.mkdir(exist_ok=True)
        write_rows(file / "two.jsonl", [{"text": "Flow by flow."}])
    write_rows(texts / "a.jsonl", [{"id": 1, "text": "Other flow."}])
    (texts / "note.txt").write_text("Flow.")
    found = search(texts, "flow", top=20, documents=True).set_index("id")["text"]
    assert {*found.index} == {
        *("b", "two.jsonl:3", "more/note.txt", "note.txt", "a/two.jsonl:1", "more/two.jsonl:1"),
        *("a.jsonl/1", "two.jsonl/1"),
    }
    assert found["two.jsonl/1"] == "A flow." and found["a.jsonl/1"] == "Other flow."
    assert "1: several files have this id" in capsys.readouterr().err
    assert {*search(texts, "other", documents=True)["id"]} == {"a.jsonl/1"}, "where each line begins is known"


def test_rows_of_one_id_are_parts_of_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bm25s")
    rows = [{"id": 1, "text": "A flow."}, {"id": 2, "text": "The flow."}, {"id": 1, "text": "No flow."}]
    file = write_rows(tmp_path / "texts.jsonl", rows)
    assert {*search(file, "flow", language="none")["id"]} == {"1#0", "2#0", "1#1"}
    assert "1: several rows of one file have this id; they count as parts of one document" in capsys.readouterr().err
    assert {*search(file, "flow", documents=True)["id"]} == {"1", "2"}


def test_a_question_without_an_answer_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bm25s")
    file = write_rows(tmp_path / "texts.jsonl", [{"text": "A program in C"}])
    found = search(file, "C", language="en")
    assert len(found) == 0 and list(found.columns) == ["by", "rank", "score", "id", "text"]
    assert "'C': no passage has a word of this question; words of one" in " ".join(capsys.readouterr().err.split())
    assert list(search(file, questions=["to be or not"]).columns)[:2] == ["question_id", "question"]
    assert "'to be or not': has only stop words of 'en'" in " ".join(capsys.readouterr().err.split())


def test_filters_that_no_passage_meets_are_told_each_time(papers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search(papers, "flow")
    searcher = open_index(f"{papers}.index")
    for _ in range(2):
        found = searcher.search("flow", where="year<1900")
        assert list(found.columns) == ["by", "rank", "score", "id", "text", "year", "open"]
        assert "no passage meets the filters" in capsys.readouterr().err


def test_an_index_answers_without_its_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever has become of it; an update needs it."""
    pytest.importorskip("bm25s")
    texts = tmp_path / "texts"
    texts.mkdir()
    file = write_rows(texts / "a.jsonl", [{"text": "A flow."}])
    found = search(texts, "flow")
    for change in (lambda: file.write_text(""), file.unlink):
        change()
        assert search(f"{texts}.index", "flow").equals(found)
        assert f"{texts}.index answers as it was built" in " ".join(capsys.readouterr().err.split())
        with pytest.raises(InputError, match=r"is empty|holds no file"):
            search(texts, "flow")


def test_an_index_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither that of a file in the folder, nor one by the name of a glob."""
    pytest.importorskip("bm25s")
    (tmp_path / "texts").mkdir()
    file = write_rows(tmp_path / "texts" / "a.jsonl", [{"text": "A flow."}])
    assert len(search(file, "flow")) == len(search(tmp_path / "texts", "flow")) == 1
    assert f"{file}.index: written by biphase, and left out" in " ".join(capsys.readouterr().err.split())
    for name in ("*", "**/*.jsonl"):
        for _ in range(2):
            capsys.readouterr()
            found = search(str(tmp_path / "texts" / name), "flow", index=tmp_path / "texts" / "my.index")
            assert list(found["id"]) == ["a.jsonl:1#0"]
        told = " ".join(capsys.readouterr().err.split())
        assert f"{file}.index, {tmp_path}/texts/my.index: written by biphase, and left out" in told
        assert "passages" not in told, "the index is as it was"
    assert len(search(f"{file}.index/passages*", "flow", index=tmp_path / "copy.index")) == 1, "it is named"
    with pytest.raises(InputError, match=r"matches nothing but what biphase wrote in .*a\.jsonl\.index"):
        search(str(tmp_path / "texts" / "*.index"), "flow", index=tmp_path / "none.index")
    with pytest.raises(InputError, match=r"\*\.jsonl names several files: name the folder of their index"):
        search(str(tmp_path / "texts" / "*.jsonl"), "flow")


def test_documents_may_have_an_index_of_their_own(tmp_path: Path) -> None:
    """A file of this name in a folder of texts, as websites have one; a damaged index stays one."""
    pytest.importorskip("bm25s")
    texts = tmp_path / "texts"
    texts.mkdir()
    write_rows(texts / "a.jsonl", [{"text": "A flow."}])
    (texts / "index.json").write_text("[]")
    assert len(search(texts, "flow")) == 1
    with pytest.raises(InputError, match="search index"):
        search(texts / "a.jsonl", "flow", index=texts)
    (tmp_path / "texts.index" / "passages.jsonl").unlink()
    with pytest.raises(InputError, match=r"passages\.jsonl is .*delete the index and build it again"):
        search(f"{texts}.index", "flow")


def test_texts_behind_a_glob_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By their names too, and from an index that is named in another working directory, where the glob was relative."""
    pytest.importorskip("bm25s")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("A flow of words.")
    (tmp_path / "texts" / "b.txt").write_text("A wing.")
    monkeypatch.chdir(tmp_path)
    pattern, index = "texts/*.txt", tmp_path / "my.index"
    assert list(search(pattern, "flow", index=index)["id"]) == ["a.txt#0"]
    assert json.loads((index / "index.json").read_text())["text"] == f"{tmp_path}/{pattern}"
    monkeypatch.chdir("/")
    search(index, "flow")
    written = (index / "index.json").stat().st_mtime_ns
    for same in (pattern, "texts/*.t?t"):
        search(f"{tmp_path}/{same}", "flow", index=index)
    assert (index / "index.json").stat().st_mtime_ns == written
    assert "has changed" not in capsys.readouterr().err
    (tmp_path / "texts" / "a.txt").rename(tmp_path / "texts" / "c.txt")
    assert list(search(index, "flow")["id"]) == ["a.txt#0"]
    told = " ".join(capsys.readouterr().err.split())
    assert f"{tmp_path}/{pattern} has changed since {index} was built" in told
    assert list(search(f"{tmp_path}/{pattern}", "flow", index=index)["id"]) == ["c.txt#0"]
    # An earlier version wrote the name as it was given.
    record = json.loads((index / "index.json").read_text())
    (index / "index.json").write_text(json.dumps(record | {"text": pattern}))
    (index / MARK).unlink()
    assert list(search(index, "flow")["id"]) == ["c.txt#0"]


def test_an_update_in_another_language_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bm25s")
    rows = [{"text": "Der Hund läuft schnell durch den Garten. " * 10}]
    file = write_rows(tmp_path / "texts.jsonl", rows)
    search(file, "Hund")
    write_rows(file, [*rows, {"text": "Le chien court vite dans le jardin de la maison. " * 80}])
    search(file, "chien")
    told = " ".join(capsys.readouterr().err.split())
    assert "the text is in 'fr' now; BM25's language stays 'de' (--language fr)" in told


def test_a_last_linear_layer_is_searched_in_bf16(
    encoder_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a CPU with units for it: autocast gives its outputs in bf16, which no file of NumPy has."""
    pytest.importorskip("bm25s")
    model = SentenceTransformer(str(encoder_folder))
    width = model.get_sentence_embedding_dimension()
    assert width is not None
    model.append(Dense(width, 5, activation_function=torch.nn.Identity()))
    model.save(str(tmp_path / "dense"))
    monkeypatch.setattr("biphase.device.has_bf16_units", lambda device: True)
    texts = ["The rain in the mountains.", "A flow at high speed.", "Trees and leaves."]
    search(texts, "rain", model=tmp_path / "dense", index=tmp_path / "i")
    vectors_ND = np.load(tmp_path / "i" / "embeddings.npy")
    theirs_ND = SentenceTransformer(str(tmp_path / "dense")).encode(texts, normalize_embeddings=True)
    assert vectors_ND.dtype == np.float32
    np.testing.assert_allclose(vectors_ND, theirs_ND, atol=0.03)


def test_passages_that_the_model_cuts_are_told(
    encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bm25s")
    model = shutil.copytree(encoder_folder, tmp_path / "model", ignore=shutil.ignore_patterns(MARK))
    settings = json.loads((model / "sentence_bert_config.json").read_text()) | {"max_seq_length": 40}
    (model / "sentence_bert_config.json").write_text(json.dumps(settings))
    texts = ["one two three " * repeats for repeats in (2, 3, 30, 40)]
    lengths = [len(ids) for ids in SentenceTransformer(str(model)).tokenizer(texts, truncation=False)["input_ids"]]
    assert lengths[1] <= 40 < lengths[2]
    search(texts, "two", model=model, index=tmp_path / "i")
    told = "about 50% of the passages are longer than the model's 40 tokens: it reads their beginnings"
    assert told in " ".join(capsys.readouterr().err.split())
    search(texts[:2], "two", model=model, index=tmp_path / "j")
    assert "are longer than" not in capsys.readouterr().err


def test_both_rankings_are_fused_by_their_scores(encoder_folder: Path, papers: Path) -> None:
    """By the mean of two scores from 0 to 1: a share of BM25's best, and cosines between the worst and the best."""
    question = "flow at high speed"
    scores: dict[str, float] = defaultdict(float)
    for by in ("bm25", "embeddings"):
        found = search(papers, question, model=encoder_folder, by=by)  # type: ignore[arg-type]
        worst, best = (0 if by == "bm25" else found["score"].min()), found["score"].max()
        for id, score in zip(found["id"], found["score"], strict=True):
            scores[id] += (score - worst) / (best - worst) / 2
    assert len(scores) == 4 and len(set(scores.values())) > 2
    found = search(papers, question, by="both")
    assert dict(zip(found["id"], found["score"], strict=True)) == pytest.approx(scores)
    assert found["score"].is_monotonic_decreasing and list(found["rank"]) == [1, 2, 3, 4]


def test_passages_have_their_columns_and_are_filtered_by_them(encoder_folder: Path, papers: Path) -> None:
    found = search(papers, "flow", model=encoder_folder).set_index("id")
    assert found.loc["b#0", "year"] == 1960 and found.loc["a#0", "open"]
    assert "authors" not in found and found.loc["c#0", "score"] < 1  # a list stays out; the answer has its own score
    matching = {
        "year>=1960": "bc",
        "year=1962": "c",
        "year!=1960": "ac",
        "open=true": "a",
        "open>0": "",
        "score>6.5": "c",
        "year<1900": "",
    }
    for condition, ids in matching.items():
        for by in ("both", "bm25", "embeddings"):
            found = search(papers, "flow wing heat", where=condition, by=by)  # type: ignore[arg-type]
            assert set(found.get("id", [])) == {f"{id}#0" for id in ids}, (condition, by)
    assert list(search(papers, "flow", where=["year>=1958", "year<=1959"])["id"]) == ["a#0"]
    with pytest.raises(InputError, match="there is no column 'date'; the columns are: year, open, score"):
        search(papers, "flow", where="date=1960")
    with pytest.raises(InputError, match=r"where 'year>late': > compares numbers, and 'late' is not one"):
        search(papers, "flow", where="year>late")
    with pytest.raises(InputError, match="where 'year': give a column and a value"):
        search(papers, "flow", where="year")


def test_large_integers_keep_their_digits(tmp_path: Path) -> None:
    """In answers, though a document lacks the column, and in filters. 2 ** 53 + 1 is the first that no float has."""
    pytest.importorskip("bm25s")
    keys = [2**53, 2**53 + 1, 2**53 + 2]
    rows = [{"text": "A flow.", "key": key, "told": str(key), "size": 0.5, "n": 1} for key in keys]
    file = write_rows(tmp_path / "texts.jsonl", [*rows, {"text": "The flow.", "n": 2}])
    found = search(file, "flow")
    assert set(found["key"].dropna()) == {*keys} and found["size"].dtype == float and found["n"].dtype == int
    assert search(file, "flow", where="n=1")["key"].dtype == int
    for sign, expected in (("=", keys[1:2]), (">", keys[2:]), ("<", keys[:1]), ("!=", keys[::2])):
        for name in ("key", "told"):
            assert set(search(file, "flow", where=f"{name}{sign}{keys[1]}")["key"]) == {*expected}, (name, sign)
    assert len(search(file, "flow", where=f"key>={2**53}.0")) == 3 and len(search(file, "flow", where="n=1e0")) == 3


def test_values_that_are_no_numbers_are_told_where_sizes_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bm25s")
    table = tmp_path / "prices.csv"
    table.write_text("text;price\n" + "".join(f"A flow.;{price}\n" for price in ("1.234,5", "3,5", "2", "")))
    for where, told in (
        ("price>3", "where: in 1 of 4 passages, 'price' is not a number, first '1.234,5'"),
        ("price=2", ""),
    ):
        capsys.readouterr()
        assert len(search(table, "flow", where=where)) == 1
        printed = " ".join(capsys.readouterr().err.split())
        assert told in printed and ("where:" in printed) == bool(told)


def test_a_text_equals_no_other_text_of_the_same_number(tmp_path: Path) -> None:
    """Versions and codes are texts; a plain number in a cell of a table is a number. An empty cell is no value."""
    pytest.importorskip("bm25s")
    cells = ["7", "7.0", "007", "1.10", "1e3", "1_0", "nan", ""]
    rows = [{"text": "A flow.", "n": cell, "id": index} for index, cell in enumerate(cells)]
    written = write_rows(tmp_path / "texts.jsonl", [*rows, {"text": "A flow.", "n": 7, "id": 8}])
    table = tmp_path / "texts.csv"
    table.write_text("text,n,id\n" + "".join(f"A flow.,{cell},{index}\n" for index, cell in enumerate(cells)))
    for source, where, expected in (
        (written, "n=7", {0, 8}),
        (table, "n=7", {0, 1}),
        (table, "n!=7", {2, 3, 4, 5, 6}),
        (written, "n=1.1", set()),
        (table, "n=1.1", {3}),
        (table, "n=007", {2}),
        (written, "n=1000", set()),
        (table, "n=1000", set()),
        (table, "n=10", set()),
        (table, "n=nan", {6}),
        (written, "n!=nan", {0, 1, 2, 3, 4, 5, 7, 8}),
        (table, "n>=7", {0, 1, 2, 4, 5}),
    ):
        found = search(source, "flow", where=where, top=9)
        assert {int(id[:-2]) for id in found["id"]} == expected, (source.name, where)


def test_a_column_of_questions_is_no_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a document, as in tables of frequent questions; not every document has one."""
    pytest.importorskip("bm25s")
    rows = [{"text": "A flow.", "question": "Why?", "question_id": 7, "by": "Lin"}, {"text": "The flow."}]
    file = write_rows(tmp_path / "texts.jsonl", rows)
    found = search(file, "flow")
    assert list(found.columns) == ["by", "rank", "score", "id", "text"]
    print_passages(found.to_dict("records"))  # type: ignore[arg-type]
    told = capsys.readouterr().out
    assert "BM25" in told and "Why?" not in told
    assert list(search(file, "flow", where=["question=Why?", "by=Lin"])["text"]) == ["A flow."]
    assert list(search(file, "flow", where="question=How?").columns) == list(found.columns)
    assert set(search(file, questions=["flow"])["question"]) == {"flow"}


def test_only_passages_that_are_new_are_embedded(
    encoder_folder: Path, papers: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """What comes out is the index that would be built anew; an update that is stopped leaves the old one."""
    search(papers, "flow", model=encoder_folder)
    changed = [PAPERS[3], {"id": "e", "text": "A new jet."}, {**PAPERS[1], "year": 1999}]
    write_rows(papers, changed)
    embedded: list[str] = []

    def embed(encode: Any, texts: Any, *given: Any, **settings: Any) -> Any:
        new = list(texts)
        embedded.extend(new)
        return embed_pieces(encode, new, *given, **settings)

    def stop(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("biphase.embedding.model.embed_pieces", stop)
    with pytest.raises(KeyboardInterrupt):
        search(papers, "flow")
    assert set(search(f"{papers}.index", "flow")["id"]) == {"a#0", "b#0", "c#0", "d#0"}
    monkeypatch.setattr("biphase.embedding.model.embed_pieces", embed)
    found = search(papers, "jet flow")
    assert (
        embedded == ["A new jet."] and "3 passages, 1 of them new; 2 earlier ones are gone" in capsys.readouterr().err
    )
    assert found.set_index("id")["year"].dropna().to_dict() == {"b#0": 1999}
    write_rows(papers, [*changed[1:], changed[1]])
    assert set(search(papers, "jet flow")["id"]) == {"b#0", "e#0", "e#1"} and embedded == ["A new jet."]
    assert "3 passages, 0 of them new; 1 earlier ones are gone" in capsys.readouterr().err
    write_rows(papers, changed)
    found = search(papers, "jet flow")
    monkeypatch.undo()
    anew = search(papers, "jet flow", model=encoder_folder, index=f"{papers}.other")
    assert list(anew["id"]) == list(found["id"])
    vectors = [np.load(f"{papers}.{name}/embeddings.npy") for name in ("index", "other")]
    np.testing.assert_allclose(*vectors, atol=1e-5)


def test_an_index_follows_its_own_text_alone(tmp_path: Path) -> None:
    """Though all passages change, because a word comes before them. To another place it follows most of them; other
    documents are refused, though they share a passage."""
    pytest.importorskip("bm25s")
    words = " ".join(f"word{number}" for number in range(300))
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text(words)
    search(texts, "word7")
    (texts / "a.txt").write_text(f"First {words}")
    assert search(texts, "first")["text"][0].startswith("First word0 ")
    write_rows(tmp_path / "other.jsonl", [{"text": f"First {words}"}, *({"text": f"Other {n}."} for n in range(4))])
    has = rf"was made from {texts}, and has 43% of the passages of {tmp_path}/other\.jsonl"
    with pytest.raises(InputError, match=rf"{has}: give this text an index of its own \(--index\), or rebuild it"):
        search(tmp_path / "other.jsonl", "other", index=f"{texts}.index")
    (tmp_path / "moved").mkdir()
    for name in ("texts", "texts.index"):
        shutil.move(tmp_path / name, tmp_path / "moved")
    (tmp_path / "moved" / "texts" / "b.txt").write_text("A flow.")
    assert list(search(tmp_path / "moved" / "texts", "flow")["text"]) == ["A flow."]


def test_an_index_follows_a_text_that_only_moved(
    encoder_folder: Path, papers: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its documents are called by the new file, and what comes to the old place is another text. Nothing is embedded
    again."""
    rows = [{"text": row["text"]} for row in PAPERS]
    search(write_rows(papers, rows), "flow", model=encoder_folder)
    moved, index = papers.with_name("moved.jsonl"), papers.with_name("moved.jsonl.index")
    papers.rename(moved)
    Path(f"{papers}.index").rename(index)
    with monkeypatch.context() as patch:
        patch.setattr("biphase.embedding.index.own_folder", lambda *_: Path("/proc/none").mkdir())
        with pytest.raises(OSError, match="/proc/none"):
            search(moved, "flow", language="fr")
        assert len(search(moved, "flow", by="bm25")) == 2, "a folder that cannot be written"
    assert f"{index} answers as it was built, from {papers}" in " ".join(capsys.readouterr().err.split())
    with monkeypatch.context() as patch:
        patch.setattr(embedders, "embed_into", lambda rows_ND, chosen, *_: chosen.size and pytest.fail("embedded"))
        assert set(search(moved, "flow", by="bm25")["id"]) == {"moved.jsonl:1#0", "moved.jsonl:2#0"}
    before = (index / "index.json").stat().st_mtime_ns
    search(moved, "flow")
    assert (index / "index.json").stat().st_mtime_ns == before
    write_rows(papers, [{"text": "A flow of another text."}])
    capsys.readouterr()
    assert len(search(index, "flow", by="bm25")) == 2
    assert "has changed" not in capsys.readouterr().err
    with pytest.raises(InputError, match=rf"was made from {moved}, and has 0% of the passages of {papers}"):
        search(papers, "flow", index=index)


def test_an_index_keeps_its_text_field(papers: Path, tmp_path: Path) -> None:
    """When it is opened, updated or rebuilt without one; texts in memory take it too."""
    rows = [{"title": "Jets", "text": "A flow."}, {"title": "Wings", "text": "A slender body."}]
    field = "{title}\\n{text}"
    search(write_rows(papers, rows), "jets", text_field=field)
    for change in ({}, {"rebuild": True}, {"text_field": field}):
        assert [text.split()[0] for text in search(papers, "jets", **change)["text"]] == ["Jets"]
    write_rows(papers, [*rows, {"title": "More jets", "text": "Another flow."}])
    assert len(search(papers, "jets")) == 2
    with pytest.raises(InputError, match=r"not of 'text': leave --text-field out, or rebuild it \(--rebuild\)$"):
        search(papers, "jets", text_field="text")
    assert len(search(papers, "jets", text_field="text", rebuild=True)) == 0
    frame = pandas.DataFrame({"body": ["A flow.", "A wing."]})
    for given in ({"text_field": "body"}, {}):
        assert list(search(frame, "flow", index=tmp_path / "memory.index", **given)["text"]) == ["A flow."]  # type: ignore[arg-type]


def test_a_remedy_names_an_index_that_lies_elsewhere(
    encoder_folder: Path, papers: Path, tmp_path: Path, capsys: Any
) -> None:
    """Without it, the text would get a second index."""
    index = tmp_path / "my.index"
    search(papers, "flow", index=index)
    named = f"{papers} --index {index}"
    for given in ({"language": "fr"}, {"model": encoder_folder}, {"by": "both"}):
        with pytest.raises(InputError, match=f"search its text, {named}, with "):
            search(index, "flow", **given)
    write_rows(papers, PAPERS[:1])
    search(index, "flow")
    assert f"search {named}, and the index follows" in " ".join(capsys.readouterr().err.split())


def test_an_update_of_an_index_that_was_replaced_is_refused(
    papers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its embeddings may be those of another model by then."""
    search(papers, "flow")
    index = papers.with_name("papers.jsonl.index")
    other = shutil.copytree(index, tmp_path / "other")
    write_rows(papers, PAPERS[:1])
    with monkeypatch.context() as patch:
        replace_before("biphase.embedding.index.find_text_sources", index, other, patch)
        with pytest.raises(InputError, match=f"^{index} was replaced while it was opened: run the command again$"):
            search(papers, "flow")
    assert list(search(papers, "flow")["id"]) == ["a#0"]


def test_an_index_is_rebuilt_with_its_own_model_and_language(encoder_folder: Path, papers: Path) -> None:
    search(papers, "flow", model=encoder_folder, language="none")
    file = Path(f"{papers}.index", "index.json")
    record = json.loads(file.read_text())
    before = file.stat().st_mtime_ns
    search(papers, "flow", rebuild=True)
    assert json.loads(file.read_text()) == record and record["model"] == str(encoder_folder)
    assert file.stat().st_mtime_ns > before
    search(papers, "flow", rebuild=True, language="en")
    assert json.loads(file.read_text()) == record | {"language": "en"}


def test_a_data_set_of_the_hub_has_its_index_in_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder by the name of its owner would hide the data set from the next search."""
    pytest.importorskip("bm25s")

    class Rows(list[Any]):
        num_shards = 1

    monkeypatch.setattr("biphase.corpus.text.pin_commit", lambda *_: "c0ffee")
    monkeypatch.setattr("biphase.corpus.text.stream_rows", lambda _: Rows([{"text": "A flow."}]))
    monkeypatch.chdir(tmp_path)
    for name in ("some/texts", "some/texts", "hub:some/texts"):
        assert list(search(name, "flow")["text"]) == ["A flow."]
    assert (tmp_path / "some--texts.index").is_dir() and not (tmp_path / "some").exists()


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a text, of an index, and of an index of texts in memory."""
    pytest.importorskip("bm25s")
    write_rows(tmp_path / "texts.jsonl", [{"text": "A flow."}])
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "here")
    for source, index in (
        ("~/texts.jsonl", None),
        ("~/texts.jsonl.index", None),
        ("~/texts.jsonl", "~/my.index"),
        (["A flow.", "A wing of wood."], "~/memory.index"),
    ):
        assert list(search(source, "flow", index=index)["text"]) == ["A flow."]
    assert not [*Path().iterdir()]
    assert {path.name for path in tmp_path.glob("[!.]*.index*")} == {
        *("texts.jsonl.index", "my.index", "memory.index", "memory.index.texts")
    }


def test_a_file_of_questions_is_answered_at_once(encoder_folder: Path, papers: Path, tmp_path: Path) -> None:
    (tmp_path / "asked.txt").write_text("flow of heat\n\nwings\n")
    found = search(papers, questions=tmp_path / "asked.txt", model=encoder_folder, top=2)
    assert list(found.columns[:6]) == ["question_id", "question", "by", "rank", "score", "id"]
    assert list(found["question_id"]) == ["1", "1", "2", "2"] and list(found["rank"]) == [1, 2, 1, 2]
    alone = search(papers, "wings", top=2)
    assert list(found["id"][2:]) == list(alone["id"])
    rows = write_rows(tmp_path / "asked.jsonl", [{"_id": "q7", "text": "wings"}])
    assert set(search(papers, questions=rows)["question_id"]) == {"q7"}
    null = [{"id": None, "text": "wings"}, {"id": 0, "text": "wings"}, {"id": "", "_id": "q9", "text": "wings"}]
    assert [question.id for question in read_questions(null)] == ["1", "0", "q9"]
    assert set(search(papers, questions=["flow of heat", "wings"])["question"]) == {"flow of heat", "wings"}
    with pytest.raises(InputError, match="no column 'question'; the columns are: ask"):
        search(papers, questions=write_rows(tmp_path / "other.jsonl", [{"ask": "wings"}]))
    with pytest.raises(InputError, match=r"the question q1 is 3: give a text"):
        search(papers, questions=write_rows(tmp_path / "other.jsonl", [{"id": "q1", "text": 3}]))
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(InputError, match=r"empty\.txt has no question"):
        search(papers, questions=tmp_path / "empty.txt")
    with pytest.raises(InputError, match="give one of them"):
        search(papers, "wings", questions=rows)


@pytest.fixture
def ranker(encoder_folder: Path, tmp_path: Path) -> Path:
    """A cross-encoder with random weights."""
    torch.manual_seed(0)
    model = CrossEncoder(str(encoder_folder), num_labels=1, device="cpu", model_kwargs={"dtype": torch.float32})
    model.save_pretrained(str(tmp_path / "ranker"))
    return tmp_path / "ranker"


def test_a_cross_encoder_orders_passages_anew(encoder_folder: Path, papers: Path, ranker: Path) -> None:
    """By the mean of the scores that they came with and those that sentence-transformers gives, both from 0 to 1; a
    model that lacks a head, or its weights, is refused."""
    given = search(papers, "flow", model=encoder_folder, top=50)
    assert len(given) == len(PAPERS) > 3
    theirs = CrossEncoder(str(ranker), device="cpu").predict([("flow", text) for text in given["text"]])
    mean = (minmax_scale(given["score"]) + minmax_scale(theirs)) / 2
    best = np.argsort(-mean)[:3]
    assert list(best) != [0, 1, 2]  # the ranker changes the order
    found = search(papers, "flow", model=encoder_folder, rerank=ranker, top=3)
    assert list(found["id"]) == list(given["id"][best])
    assert list(found["score"]) == pytest.approx(mean[best].tolist(), abs=1e-3)
    assert set(found["by"]) == {f"{given['by'][0]} + {ranker}"}
    with pytest.raises(InputError, match="which has no head with one score for a pair of texts; train one: biphase"):
        search(papers, "flow", rerank=encoder_folder)
    weights = {name: tensor for name, tensor in load_file(ranker / "model.safetensors").items() if "score" not in name}
    save_file({name: weights[name] for name in weights if "classifier" not in name}, ranker / "model.safetensors")
    with pytest.raises(InputError, match="classifier"):
        search(papers, "flow", rerank=ranker)


def test_a_question_beside_an_update_is_answered_by_one_index(
    encoder_folder: Path, papers: Path, ranker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the index that was opened, while its model loads. An index that is replaced while it is opened is refused, and
    so is a model that is replaced while it is loaded."""
    index, model = papers.with_name("papers.jsonl.index"), shutil.copytree(encoder_folder, tmp_path / "model")

    def ask() -> Any:
        return search(index, "flow of heat", by="both", rerank=ranker)

    search(papers, "flow of heat", model=model)
    old = ask()
    shutil.copytree(index, tmp_path / "old")
    write_rows(papers, [{"id": "new", "text": "Something else."}, *PAPERS[::-1]])
    search(papers, "flow of heat")
    new = ask()
    shutil.copytree(index, tmp_path / "new")
    assert not new.equals(old) and set(new["id"]) > set(old["id"])
    for target, replaced, said in (
        ("model.load_embedder", index, ""),
        ("index.open_bm25", index, f"{index} was replaced while it was opened: run the command again"),
        ("model.load_embedder", model, f"files of {model} were replaced while it was read: run the command again"),
        ("index.load_weights", ranker, f"files of {ranker} were replaced while it was read: run the command again"),
    ):
        shutil.rmtree(index)
        shutil.copytree(tmp_path / "old", index)
        other = shutil.copytree(tmp_path / "new" if replaced == index else replaced, tmp_path / "other")
        with monkeypatch.context() as patch:
            replace_before(f"biphase.embedding.{target}", replaced, other, patch)
            if said:
                with pytest.raises(InputError, match=f"^{said}$"):
                    ask()
            else:
                assert ask().equals(old)
        assert not other.exists()
        shutil.rmtree(f"{replaced}.old")


def test_threads_that_ask_first_load_a_model_once(
    encoder_folder: Path, papers: Path, ranker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search(papers, "flow", model=encoder_folder)
    loaded: list[str] = []

    def slowly(load: Any) -> Any:
        def load_slowly(name: str) -> Any:
            loaded.append(name)
            time.sleep(0.5)  # so that all threads have asked
            return load(name)

        return load_slowly

    monkeypatch.setattr(embedders, "load_for_inference", slowly(embedders.load_for_inference))
    monkeypatch.setattr("biphase.embedding.index.load_ranker", slowly(load_ranker))
    searcher = open_index(f"{papers}.index")
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda question: searcher.search(question, by="both", rerank=ranker), 4 * ["flow"]))
    assert sorted(loaded) == sorted([str(encoder_folder), str(ranker)])


RUN = "torch.distributed.run.main"
NAMED_BY_RANKERS: list[tuple[str, Any, str]] = [
    ("config.json", {"sentence_transformers": {"activation_fn": RUN}}, "activation_fn"),
    ("config.json", {"sbert_ce_default_activation_function": RUN}, "sbert_ce_default_activation_function"),
    ("config.json", {"attn_implementation": "someone/kernel"}, "names a kernel of the Hub"),
    ("config.json", {"experts_implementation": {"": "someone/kernel"}}, "names a kernel of the Hub"),
    ("config.json", {"transformers_weights": "other.bin"}, "names another file"),
    ("config.json", {"architectures": 1.5}, "architectures"),
    ("config.json", {"id2label": 1e308}, "id2label"),
    ("config.json", {"dtype": 0}, "dtype"),
    ("config.json", {"tokenizer_class": "Trainer"}, "tokenizer_class"),
    ("tokenizer_config.json", {"processor_class": "AutoModel"}, "processor_class"),
    ("config_sentence_transformers.json", {"activation_fn": RUN}, "activation_fn"),
    ("sentence_bert_config.json", {"model_args": {"use_safetensors": False}}, "use_safetensors"),
    ("sentence_bert_config.json", {"config_kwargs": {"sentence_transformers": {}}}, "config_kwargs"),
    ("sentence_bert_config.json", {"model_kwargs": {"attn_implementation": "a/b"}}, "names a kernel of the Hub"),
    ("sentence_bert_config.json", {"tokenizer_name_or_path": "other"}, "tokenizer_name_or_path"),
    ("sentence_bert_config.json", {"modality_config": {"text": {"method": "push_to_hub"}}}, "modality_config"),
    ("modules.json", [{"idx": 0, "name": "0", "path": "", "type": "os.System"}], "has the module 'os.System'"),
]


@pytest.mark.parametrize(("file", "content", "words"), NAMED_BY_RANKERS)
def test_what_a_ranker_names_is_neither_run_nor_opened(
    file: str, content: Any, words: str, papers: Path, ranker: Path
) -> None:
    search(papers, "flow")
    path = ranker / file
    if isinstance(content, dict):
        content = (json.loads(path.read_text()) if path.exists() else {}) | content
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=words) as told:
        search(papers, "flow", rerank=ranker)
    assert "\n" not in str(told.value)


def old_filter(text: str) -> tuple[str, ...] | None:
    found = re.fullmatch(r"\s*(.+?)\s*(>=|<=|!=|=|>|<)\s*(.*?)\s*", text)
    return found and found.groups()


def test_filters_are_parsed_in_linear_time_by_the_old_grammar() -> None:
    random = np.random.default_rng(0)
    for _ in range(3_000):
        text = "".join(random.choice(list(" ab=<>!12"), size=random.integers(1, 9)))
        expected = old_filter(text)
        if expected is None or not expected[0].strip():
            with pytest.raises(InputError, match="give a column and a value"):
                parse_filter(text)
        elif expected[2][:1] in ("=", "<", ">"):
            with pytest.raises(InputError, match="a value cannot begin with one"):
                parse_filter(text)
        elif expected[1] in ("=", "!=") or expected[2].strip().isdigit():
            assert parse_filter(text) == Filter(*expected)
    started = time.process_time()
    with pytest.raises(InputError, match="give a column and a value"):
        parse_filter(" " * 1_000_000 + "x")
    assert time.process_time() - started < 1


def test_embeddings_that_find_no_passage_by_its_own_words_do_not_rank(
    encoder_folder: Path, documents: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Unless one asks for them; how many they find is counted as sentence-transformers embeds and compares."""
    monkeypatch.setattr("biphase.device.has_bf16_units", lambda device: False)  # sentence-transformers takes fp32
    pytest.importorskip("bm25s")
    texts = [" ".join(document.split()[:100]) for document in documents[:30]]
    asked: dict[str, Any] = {"model": encoder_folder, "index": tmp_path / "i"}
    found = search(texts, "what did Tip make?", **asked)
    told = " ".join(capsys.readouterr().err.split())
    assert set(found["by"]) == {"BM25"} and "so words alone rank (--by both: both); train it for search" in told
    theirs, middles = SentenceTransformer(str(encoder_folder)), []
    for text in texts:
        words = text.split()
        half = len(words) // 2
        middles.append(" ".join(words[half : half + max(1, min(12, half))]))
    nearest = theirs.similarity(theirs.encode_query(middles), theirs.encode_document(texts)).argmax(1)
    share = json.loads((tmp_path / "i" / "index.json").read_text())["found_share"]
    assert share == pytest.approx((nearest.numpy() == np.arange(len(texts))).mean()) and share < 0.5
    assert f"finds {share:.0%} of passages by words of their own, fewer than 70%, so words alone rank" in told
    for by, name in (("both", f"{encoder_folder} + BM25"), ("embeddings", str(encoder_folder))):
        assert set(search(texts, "what did Tip make?", by=by, **asked)["by"]) == {name}  # type: ignore[arg-type]
        assert "words alone may rank better (--by bm25)" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr("biphase.embedding.index.LEAST_FOUND", share)
    assert set(search(texts, "what did Tip make?", **asked)["by"]) == {f"{encoder_folder} + BM25"}
    assert "words of their own" not in capsys.readouterr().err


def test_models_fused_with_bm25_are_scored_beside_it(encoder_folder: Path, beir: Path) -> None:
    pytest.importorskip("bm25s")
    scores = score_arms({"a": load_embedder(str(encoder_folder))}, read_judged_set(beir))
    assert list(scores) == ["a", "a + BM25", "BM25"]
    assert scores["a"]["ndcg_at_10"] < scores["a + BM25"]["ndcg_at_10"]
