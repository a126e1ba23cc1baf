"""Scores of embeddings are those of other people's code; an index answers, and only with its own model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sentence_transformers")

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import (
    EmbeddingSimilarityEvaluator,
    InformationRetrievalEvaluator,
)

from biphase.api.networks import run_zero_shot, search
from biphase.embedding.evaluation import read_judged_set, score_bm25, score_embedder
from biphase.embedding.model import load_embedder
from biphase.errors import InputError
from biphase.files import MARK

from ..conftest import flip_bit


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


def test_bm25_finds_the_beginnings_of_documents(beir: Path) -> None:
    pytest.importorskip("bm25s")
    assert score_bm25(read_judged_set(beir))["recall_at_10"] > 0.9


def test_results_are_kept_in_the_form_of_mteb(encoder_folder: Path, beir: Path, tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    run_zero_shot([str(encoder_folder)], [f"zero-shot:{beir}"], tmp_path / "scores")
    found = json.loads((tmp_path / "scores" / "zero-shot" / "encoder" / "beir.json").read_text())
    assert found["task_name"] == "beir"
    assert found["scores"]["test"][0]["main_score"] == found["scores"]["test"][0]["ndcg_at_10"]
    with pytest.raises(InputError, match="fine-tuned"):
        run_zero_shot([str(encoder_folder)], [f"zero-shot:{beir}", "snli"], tmp_path / "scores")
    with pytest.raises(InputError, match="judged texts: beir is named twice"):
        run_zero_shot([str(encoder_folder)], [f"zero-shot:{beir}", "zero-shot:other/beir"], tmp_path / "scores")
    with pytest.raises(InputError, match="name of the folder encoder is named twice"):
        run_zero_shot([str(encoder_folder), "x/encoder"], [f"zero-shot:{beir}"], tmp_path / "scores")


@pytest.mark.slow
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
    (tmp_path / "clusters" / "test.jsonl").write_text('{"sentences": "a", "labels": 1}\n')  # the hub's are lists
    with pytest.raises(InputError, match="clusters must have its data as the hub has them"):
        run_mteb(embedder, f"TwentyNewsgroupsClustering.v2={tmp_path / 'clusters'}")


def test_search_answers_and_knows_its_model(
    encoder_folder: Path, documents: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    pytest.importorskip("bm25s")
    text = tmp_path / "text"
    text.mkdir()
    for number, document in enumerate(documents[:6]):
        (text / f"{number}.txt").write_text(document, encoding="utf-8")
    with pytest.raises(InputError, match="name an embedding model"):
        search(text, "what did Tip make?", top=2)
    found = search(text, "what did Tip make?", model=encoder_folder, top=2)
    assert list(found["by"]) == [str(encoder_folder)] * 2 + ["BM25"] * 2 and found["id"].str.contains(".txt#").all()
    assert search(f"{text}.index", "what did Tip make?", top=2).equals(found)
    (text / "notes.pdf").write_text("no text that is read")
    assert search(text, "what did Tip make?", top=2).equals(found)
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
    with pytest.raises(InputError, match="another text"):
        search(text, "who?")


def test_passages_that_were_cut_in_another_way_are_refused(
    encoder_folder: Path, documents: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those of an index whose record says nothing of it; --rebuild cuts anew."""
    pytest.importorskip("bm25s")
    text, index = tmp_path / "text.txt", tmp_path / "text.txt.index"
    text.write_text(documents[1], encoding="utf-8")
    search(text, "Tip", model=encoder_folder)
    monkeypatch.setattr("biphase.embedding.index.PASSAGE_WORDS", 60)
    with pytest.raises(InputError, match=r"passages that were cut in another way: rebuild it \(--rebuild\)$"):
        search(text, "Tip")
    with pytest.raises(InputError, match=rf"--rebuild\) from its text, {text}"):
        search(index, "Tip")
    found = search(text, "Tip", model=encoder_folder, rebuild=True)
    assert search(index, "Tip").equals(found)
    record = json.loads((index / "index.json").read_text())
    del record["cutting"]
    (index / "index.json").write_text(json.dumps(record))
    (index / MARK).unlink()
    with pytest.raises(InputError, match="cut in another way"):
        search(index, "Tip")


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
    with pytest.raises(InputError, match="made of another text"):
        search(documents[:5], "who?", index=index)
    with pytest.raises(InputError, match=r"say where, index='my\.index'"):
        search(documents[:4], "who?", model=encoder_folder)
    with pytest.raises(InputError, match="one name is searched, and 2 are given"):
        search(["a.txt", "b.txt"], "who?", index=index)


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
    with pytest.raises(InputError, match=r"inside of .*, and would be searched too"):
        search(tmp_path, "who?", model=encoder_folder, index=tmp_path / "index")


def test_a_model_of_dot_products_is_asked_by_them(
    encoder_folder: Path, beir: Path, documents: list[str], tmp_path: Path
) -> None:
    """Lengths of embeddings count, in an index and in scores."""
    pytest.importorskip("bm25s")
    plain = SentenceTransformer(str(encoder_folder))
    SentenceTransformer(modules=list(plain), similarity_fn_name="dot").save_pretrained(str(tmp_path / "dot"))
    theirs = SentenceTransformer(str(tmp_path / "dot"))
    texts = [row["text"] for row in map(json.loads, (beir / "corpus.jsonl").read_text().splitlines())]
    found = search(texts, "what did Tip make?", model=tmp_path / "dot", index=tmp_path / "i", top=3)
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
    assert list(search(tmp_path / "text.txt", "who?", model=encoder_folder)["by"]) == [str(encoder_folder)]
