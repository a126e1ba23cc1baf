"""Make tests/finetuning/metrics/fixtures/*.json: real gold, invented predictions, what official scripts say of them.

Usage: python scripts/make_metric_fixtures.py --official FOLDER [--data FOLDER]. The same input gives the same bytes.
The tests need neither folder. FOLDER holds these files, which are run as they are (so look at them first):

evaluate-v1.1.py      https://github.com/allenai/bi-att-flow, squad/ (as published by the authors of SQuAD)
evaluate-v2.0.py      https://github.com/rajpurkar/SQuAD-explorer
record_evaluation.py  https://github.com/huggingface/evaluate, metrics/super_glue/ (as published by those of ReCoRD)
conlleval             https://github.com/glample/tagger, evaluation/ (Perl, version 2004-01-26)
QA.py, TC.py, IR.py   https://github.com/hgissbkh/EncodEval, branch MLM_vs_CLM, encodeval/eval_tasks/ (also in
                      https://github.com/rimads/avey-b, EncodEval/encodeval/eval_tasks/); only the methods that score
trec_eval             the program, https://github.com/usnistgov/trec_eval
"""

import __future__

import argparse
import ast
import io
import json
import re
import runpy
import subprocess
import sys
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from sklearn.metrics import f1_score, ndcg_score

from biphase.files import file_hash, write_text

ROOT = Path(__file__).resolve().parent.parent
BUNDLED = ROOT / "src" / "biphase" / "bundled" / "tasks"
TARGET = ROOT / "tests" / "finetuning" / "metrics" / "fixtures"
PROGRAMS = (
    "evaluate-v1.1.py",
    "evaluate-v2.0.py",
    "record_evaluation.py",
    "conlleval",
    "QA.py",
    "TC.py",
    "IR.py",
    "trec_eval",
)
LIMIT_BYTES = 200_000
SEED = 42
SQUAD = {1: "squad_dev/dev-v1.1.json", 2: "squad_v2_dev/dev-v2.0.json"}
NOTHING_LEFT = {"5725bad5271a42140099d0c1", "57340d124776f419006617bf", "5730b7ce069b5314008322c4"}
"""Questions of both SQuAD sets with "." among their answers, where the two official scripts part."""
TREC_OPTIONS = ("-q", "-c", "-m", "map", "-m", "ndcg_cut.10", "-m", "recall.100", "-m", "recip_rank", "-m", "P.10")

BROKEN_TAGS = [  # gold, predicted
    ("O O", "O O"),
    ("O O", "B-PER O"),
    ("B-PER O", "O O"),
    ("B-PER I-PER", "I-PER I-PER"),
    ("B-PER I-PER", "B-PER I-LOC"),
    ("B-PER B-PER", "B-PER I-PER"),
    ("B-PER I-PER", "B-PER B-PER"),
    ("B-PER O B-LOC", "B-PER I-LOC B-LOC"),
    ("I-PER I-PER O", "B-PER I-PER O"),
    ("O I-LOC I-PER", "O I-LOC I-PER"),
    ("I-LOC B-LOC I-LOC", "I-LOC I-LOC I-LOC"),
    ("B-PER I-PER I-PER O", "B-PER I-PER O O"),
    ("B-PER I-PER O", "B-PER I-PER I-PER"),
    ("O B-PER", "O B-PER"),
    ("I-PER O", "I-PER I-PER"),
    ("B-LOC I-PER I-LOC I-LOC", "B-LOC I-PER B-LOC I-LOC"),
]
BROKEN_ANSWERS = [  # gold, predicted
    (["The"], "a"),
    (["The", "the cat"], "cat"),
    (["..."], ""),
    (["A.", "B."], "b"),
    (["naïve café"], "naive café"),
    (["U.S."], "US"),
    (["the-end"], "theend"),
    (["an a the answer"], "answer"),
    (["“quoted”"], "quoted"),
    (["to be or not to be"], "to be be be"),
    (["1,000 %"], "1000"),
    (["ΣΊΣΥΦΟΣ"], "σίσυφος"),
    (["İstanbul"], "i̇stanbul"),
    (["tab\tand\u00a0space"], "tab and space"),
]
TOKEN_SETS = [  # gold, predicted
    ([], []),
    ([], [0]),
    ([], [0, 1]),
    ([], [7]),
    ([5], []),
    ([5, 6], [5, 6]),
    ([5, 6], [6, 7, 8]),
    ([5, 6], [0, 5, 6]),
    ([5], [9]),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--official", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="with SQuAD's files")
    options = parser.parse_args()
    paths = [options.official / name for name in PROGRAMS] + [options.data / name for name in SQUAD.values()]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        sys.exit(f"missing: {', '.join(missing)}; the fixtures stay as they are")
    TARGET.mkdir(parents=True, exist_ok=True)
    write("answers", answers(options.official, options.data), options.official, (*PROGRAMS[:3], "QA.py"))
    write("tagging", tagging(options.official), options.official, ("conlleval", "TC.py"))
    write("ranking", ranking(options.official), options.official, ("IR.py",))
    total = sum(path.stat().st_size for path in TARGET.glob("*.json"))
    assert total <= LIMIT_BYTES, f"{total:,} bytes of fixtures are more than {LIMIT_BYTES:,}"


def write(name: str, fixture: dict[str, Any], official: Path, programs: tuple[str, ...]) -> None:
    fixture = {"sha256": {program: file_hash(official / program) for program in programs}, **fixture}
    write_text(TARGET / f"{name}.json", json.dumps(fixture, ensure_ascii=False, indent=0) + "\n")
    print(f"{name}: {(TARGET / f'{name}.json').stat().st_size:,} bytes")


def take_methods(path: Path, *names: str) -> dict[str, Any]:
    """Methods of a class in a file whose imports are not there, as functions (`self` comes first)."""
    tree = ast.walk(ast.parse(path.read_text()))
    found = [node for node in tree if isinstance(node, ast.stmt) and getattr(node, "name", None) in names]
    assert len(found) == len(names), f"{path} has not exactly one each of {names}"
    functions: dict[str, Any] = {"np": np, "f1_score": f1_score, "ndcg_score": ndcg_score, "tqdm": lambda x, **_: x}
    code = compile(
        ast.Module(found, []), str(path), "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True
    )
    exec(code, functions)
    return functions


def answers(official: Path, data: Path) -> dict[str, Any]:
    rng = np.random.default_rng(SEED)
    squad_1 = draw_questions(data / SQUAD[1], rng, 100, 0)
    squad_2 = draw_questions(data / SQUAD[2], rng, 60, 60)
    broken = {f"broken-{number}": (gold, text) for number, (gold, text) in enumerate(BROKEN_ANSWERS)}
    fixture: dict[str, Any] = {
        "squad_1": with_predictions(squad_1, broken, rng),
        "squad_2": with_predictions(squad_2, broken, rng),
        "record": with_predictions(draw_mentions(rng, 60), broken, rng),
        "paper": draw_token_sets(rng),
    }
    for name, script in (("squad_1", "evaluate-v1.1.py"), ("record", "record_evaluation.py")):
        part, functions = fixture[name], runpy.run_path(str(official / script))
        for id in part["gold"]:
            (row,) = dataset({id: part["gold"][id]}, name)["data"]
            result = functions["evaluate"]([row], part["predictions"])
            result = result if name == "squad_1" else result[0]
            part["per_question"][id] = [result["exact_match"], result["f1"]]
        part["official"] = run_script(official / script, dataset(part["gold"], name), part["predictions"])
    part, functions = fixture["squad_2"], runpy.run_path(str(official / "evaluate-v2.0.py"))
    exact, f1 = functions["get_raw_scores"](dataset(part["gold"], "squad_2")["data"], part["predictions"])
    part["per_question"] = {id: [exact[id], f1[id]] for id in part["gold"]}
    # Two decimals make ties, which a threshold may part.
    part["no_answer_scores"] = {
        id: round(float(np.clip(rng.normal(0.35 if gold else 0.65, 0.3), 0, 1)), 2) for id, gold in part["gold"].items()
    }
    part["official"] = run_script(
        official / "evaluate-v2.0.py",
        dataset(part["gold"], "squad_2"),
        part["predictions"],
        part["no_answer_scores"],
    )
    score = take_methods(official / "QA.py", "compute_f1s")["compute_f1s"]
    result = score(None, fixture["paper"]["predicted"], fixture["paper"]["gold"])
    fixture["paper"]["official"] = float(result["score"])
    fixture["paper"]["per_question"] = [float(value) for value in result["scores_i"]]
    return fixture


def draw_questions(path: Path, rng: np.random.Generator, num_answerable: int, num_unanswerable: int) -> dict[str, list]:
    rows = json.loads(path.read_text(encoding="utf-8"))["data"]
    questions = [qa for article in rows for paragraph in article["paragraphs"] for qa in paragraph["qas"]]
    gold = {qa["id"]: [answer["text"] for answer in qa["answers"]] for qa in questions}
    drawn = set(NOTHING_LEFT)
    for kind, num in ((True, num_answerable), (False, num_unanswerable)):
        ids = [id for id, texts in gold.items() if bool(texts) == kind]
        drawn |= {ids[place] for place in rng.permutation(len(ids))[:num]}
    return {id: texts for id, texts in gold.items() if id in drawn}


def draw_mentions(rng: np.random.Generator, num: int) -> dict[str, list]:
    """Names out of the bundled entities: one to three for each query, as ReCoRD's gold has them."""
    names = []
    for row in read_bundled("uner_en_ewt-test"):
        for word, tag in zip(row["tokens"], row["ner_tags"], strict=True):
            if tag.startswith("B-"):
                names.append(word)
            elif tag.startswith("I-"):
                names[-1] += f" {word}"
    drawn = iter(rng.permutation(len(names)).tolist())
    return {f"query-{number}": [names[next(drawn)] for _ in range(rng.integers(1, 4))] for number in range(num)}


def with_predictions(
    gold: dict[str, list], broken: dict[str, tuple[list, str]], rng: np.random.Generator
) -> dict[str, Any]:
    every_answer = [text for texts in gold.values() for text in texts]
    predictions = {id: invent(texts, every_answer[rng.integers(len(every_answer))], rng) for id, texts in gold.items()}
    gold = {**gold, **{id: texts for id, (texts, _) in broken.items()}}
    predictions |= {id: text for id, (_, text) in broken.items()} | dict.fromkeys(NOTHING_LEFT & gold.keys(), "")
    return {"gold": gold, "predictions": predictions, "per_question": {}}


def invent(answers: list[str], other: str, rng: np.random.Generator) -> str:
    if not answers:
        return ["", "", "", other, other, other, other, "the"][rng.integers(8)]
    answer = answers[rng.integers(len(answers))]
    words = answer.split()
    return [
        answer,
        answer,
        answer.upper(),
        f"The {answer}.",
        f"“{answer}”",
        " ".join(words[: (len(words) + 1) // 2]),
        f"{words[-1]} {other}",
        f"{answer} {answer}",
        "\u00a0".join(words),
        unicodedata.normalize("NFD", answer),
        other,
        "",
    ][rng.integers(12)]


def draw_token_sets(rng: np.random.Generator) -> dict[str, Any]:
    gold, predicted = ([list(pair[side]) for pair in TOKEN_SETS] for side in (0, 1))
    for _ in range(60):
        begin, length = int(rng.integers(8, 40)), int(rng.integers(0, 6))
        gold.append(list(range(begin, begin + length)))
        flipped = rng.random(50) < 0.04
        predicted.append([i for i in range(50) if (begin <= i < begin + length) != flipped[i]])
    return {"gold": gold, "predicted": predicted}


def dataset(gold: dict[str, list], name: str) -> dict[str, Any]:
    """In the form of the official files."""
    qas = [{"id": id, "answers": [{"text": text} for text in texts]} for id, texts in gold.items()]
    if name == "record":
        return {"version": "1.0", "data": [{"qas": qas}]}
    return {"version": {"squad_1": "1.1", "squad_2": "2.0"}[name], "data": [{"paragraphs": [{"qas": qas}]}]}


def run_script(
    script: Path, gold: dict[str, Any], predictions: dict[str, str], no_answer_scores: dict[str, float] | None = None
) -> dict[str, float]:
    """What SQuAD's scripts print; ReCoRD's prints no scores, so its function is asked."""
    if script.name == "record_evaluation.py":
        return runpy.run_path(str(script))["evaluate"](gold["data"], predictions)[0]
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for name, value in (("gold", gold), ("predictions", predictions), ("no_answer", no_answer_scores)):
            if value is not None:
                paths.append(Path(folder) / f"{name}.json")
                paths[-1].write_text(json.dumps(value))
        extra: list[str | Path] = [] if no_answer_scores is None else ["--na-prob-file", paths[2]]
        command: list[str | Path] = [sys.executable, script, *paths[:2], *extra]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def tagging(official: Path) -> dict[str, Any]:
    rng = np.random.default_rng(SEED)
    score = take_methods(official / "TC.py", "compute_f1s")["compute_f1s"]
    sets: dict[str, Any] = {"broken": [(gold.split(), predicted.split()) for gold, predicted in BROKEN_TAGS]}
    for name in ("uner_en_ewt", "wnut17"):
        rows = read_bundled(f"{name}-test")
        gold = [row["ner_tags"] for row in (rows[place] for place in rng.permutation(len(rows))[:250].tolist())]
        labels = sorted({tag for tags in gold for tag in tags})
        sets[name] = [(tags, corrupt(tags, labels, rng)) for tags in gold]
    fixture = {}
    for name, pairs in sets.items():
        lines = [
            "\n".join(f"w {right} {found}" for right, found in zip(gold, predicted, strict=True))
            for gold, predicted in pairs
        ]
        printed = subprocess.run(
            ["perl", official / "conlleval"],
            input="\n\n".join(lines) + "\n",
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        numbers = re.search(r"with (\d+) phrases; found: (\d+) phrases; correct: (\d+)\.", printed)
        assert numbers is not None, printed
        result = score(None, [predicted for _, predicted in pairs], [gold for gold, _ in pairs])
        fixture[name] = {
            "gold": [" ".join(gold) for gold, _ in pairs],
            "predicted": [" ".join(predicted) for _, predicted in pairs],
            "conlleval": dict(zip(("num_gold", "num_predicted", "num_right"), map(int, numbers.groups()), strict=True)),
            "paper": float(result["score"]),
        }
    return fixture


def corrupt(tags: list[str], labels: list[str], rng: np.random.Generator) -> list[str]:
    """Some tags replaced by any other, so that entities lose their beginning, change type, grow and fall apart."""
    return [labels[rng.integers(len(labels))] if rng.random() < 0.08 else tag for tag in tags]


def read_bundled(name: str) -> list[dict[str, Any]]:
    with open(BUNDLED / f"{name}.jsonl.zst", "rb") as file:
        return [
            json.loads(line)
            for line in io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), encoding="utf-8")
        ]


def ranking(official: Path) -> dict[str, Any]:
    """Invented ids, grades from -1 to 3 and scores in steps of 1/64, so that ties abound."""
    rng = np.random.default_rng(SEED)
    relevance: dict[str, dict[str, int]] = {}
    ranked: dict[str, dict[str, float]] = {}
    for number in range(40):
        num_documents = (150, 12, 25, 4)[number % 4]
        documents = [f"d{place}" for place in rng.permutation(200)[:num_documents].tolist()]
        judged = rng.permutation(documents)[: rng.integers(1, num_documents)].tolist()
        lost = [f"lost-{place}" for place in range(rng.integers(0, 4))]
        relevance[f"q{number}"] = {document: int(rng.integers(-1, 4)) for document in judged + lost}
        steps = 2048 if number % 2 else 64
        grades = relevance[f"q{number}"]
        ranked[f"q{number}"] = {
            document: int(rng.integers(steps) + steps * 0.2 * grades.get(document, 0)) / 64 for document in documents
        }
    for number, grade in ((37, 0), (38, 1), (39, 1)):
        relevance[f"q{number}"] = dict.fromkeys(relevance[f"q{number}"], grade)
    del ranked["q38"]
    ranked["not-judged"] = {"d1": 1.0}
    with tempfile.TemporaryDirectory() as folder:
        qrels, run = Path(folder) / "qrels", Path(folder) / "run"
        qrels.write_text(
            "".join(f"{q} 0 {d} {grade}\n" for q, grades in relevance.items() for d, grade in grades.items())
        )
        run.write_text(
            "".join(f"{q} Q0 {d} 0 {score!r} x\n" for q, scores in ranked.items() for d, score in scores.items())
        )
        command: list[str | Path] = [official / "trec_eval", *TREC_OPTIONS, qrels, run]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    measured: dict[str, dict[str, float]] = {}
    for line in printed.splitlines():
        name, query, value = line.split()
        measured.setdefault(query, {})[name] = float(value)
    paper = {query: paper_ndcg(official / "IR.py", relevance[query], ranked.get(query, {})) for query in relevance}
    return {"relevance": relevance, "ranked": ranked, "trec_eval": measured, "paper": paper}


def paper_ndcg(path: Path, grades: dict[str, int], scores: dict[str, float]) -> float | None:
    """None where the original leaves a query out, fails (under two documents) or sorts equal scores in or out."""
    values = sorted(scores.values(), reverse=True)
    if max(grades.values()) < 1 or len(values) < 2 or (len(values) > 10 and values[9] == values[10]):
        return None
    functions = take_methods(path, "get_predictions_labels_at_k", "compute_ndcgs")
    relevant = {"q": [document for document, grade in grades.items() if grade >= 1]}
    similarities = {"q": {document: np.float64(score) for document, score in scores.items()}}
    return float(
        functions["compute_ndcgs"](None, **functions["get_predictions_labels_at_k"](None, relevant, similarities))[
            "score"
        ]
    )


if __name__ == "__main__":
    main()
