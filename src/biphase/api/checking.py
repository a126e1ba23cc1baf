"""What transformers, an ONNX file or a server answers for the golden texts of a model folder, beside what stands there.

A server is asked as its kind is: by OpenAI's `/v1/embeddings` (vLLM, Text Embeddings Inference, Infinity, llama.cpp) or
TEI's `/embed`; for classes by `/predict`, TEI's and that of our how-to, or vLLM's `/classify`.
"""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from biphase import console
from biphase.api.networks import needs_extra
from biphase.encoder.models import find_folder
from biphase.errors import InputError, clipped, first_line, first_of, told_as
from biphase.files import read_json_as

if TYPE_CHECKING:
    from biphase.export.golden import Golden

ROUNDING, IN_16_BITS = 1e-3, 2e-2
"""Answers differ by less, in units of their length, in fp32, and where a server computes in 16 bits."""
CLOSER = 3
"""A mistake is named where its answer lies so many times nearer to the server's than the right one."""
DECIMALS = 4
"""Answers that are equally near by so many decimals have the words of the simplest mistake."""
MOST_BYTES = 1 << 26
OK, REFUSED = 200, (400, 404, 405, 415, 422)
"""What a server says to a request of another kind than it takes."""
SHOWN_CHARACTERS = 60

Row = dict[str, Any]
Parts = Sequence[np.ndarray]


@dataclass(frozen=True)
class AnswerCheck:
    """How near an answer to a folder's golden texts is to its golden vectors."""

    by: str
    is_equal: bool
    verdict: str
    texts: list[Row]
    """`text tokens cosine difference`: the last is the largest one of a number."""


def check(folder: str | Path, server: str | None = None, *, timeout: float = 60.0) -> list[AnswerCheck]:
    """Compare what computes with a model folder with the golden vectors in it: transformers and its ONNX file, or a
    server.

    Args:
        folder: a folder that `export`, `--keep` or `embed` wrote. With a server any model folder or hub id: what it has
            no golden vectors of, transformers computes.
        server: the address of a server of this model, such as http://localhost:8000, or of one of its routes.
        timeout: seconds that an answer may take.

    Returns: for each that answered `by is_equal verdict texts`.

    Raises:
        InputError: no such folder, nothing to compare with, or a server that does not answer, or with nonsense.
    """
    if server is not None and not server.startswith(("http://", "https://")):
        raise InputError(f"server {server} is no address: give one such as http://localhost:8000")
    path = find_folder(str(folder))
    with told_as(f"cannot compute what {folder} gives"), needs_extra("embeddings", f"to compute what {folder} gives"):
        from biphase.export.golden import GOLDEN, Golden, make_golden, takes_mean

        if not takes_mean(path):
            from biphase.embedding.model import list_module_files

            list_module_files(path)
        onnx, is_written = path / "onnx" / "model.onnx", (path / GOLDEN).exists()
        if is_written:
            golden = read_json_as(path / GOLDEN, Golden)
        elif server is None and not onnx.exists():
            raise InputError(f"{folder} has no {GOLDEN} and no ONNX file: name a server of it, or export it anew")
        else:
            console.err.print(f"{folder} has no {GOLDEN}: transformers computes what it gives", markup=False)
            golden = make_golden(path)
        expected = read_values(path / GOLDEN, golden)
        if server is not None:
            return [check_server(path, golden, expected, server, timeout)]
        checks = [judge_answers("transformers", golden, expected, answer_plainly(path, golden))] if is_written else []
    if onnx.exists():
        with told_as(f"cannot run {onnx}"), needs_extra("onnx", "to run its ONNX file"):
            checks.append(judge_answers("onnx/model.onnx", golden, expected, answer_by_onnx(path, golden)))
    return checks


def tell_unequal(checks: Sequence[AnswerCheck]) -> str:
    """Name those whose answers are not the golden vectors, or ""."""
    return "; ".join(f"{check.by} is not equal: {check.verdict}" for check in checks if not check.is_equal)


def read_values(path: Path, golden: "Golden") -> list[np.ndarray]:
    try:
        values = [np.asarray(part, dtype=np.float64) for part in golden.values]
    except (TypeError, ValueError):
        values = []
    if not values or not len(values) == len(golden.texts) == len(golden.ids) or not all(map(np.size, values)):
        raise InputError(f"{path} is damaged (its texts, ids and values do not belong together); export the model anew")
    return values


def answer_plainly(folder: Path, golden: "Golden") -> Parts:
    """Answer by transformers, or sentence-transformers, and the tokenizer that transformers chooses."""
    from transformers import AutoTokenizer

    from biphase.export.golden import PlainModel

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    longest = max(map(len, golden.ids))
    return PlainModel(folder).answer(tokenizer(golden.texts, truncation=True, max_length=longest)["input_ids"])


def answer_by_onnx(folder: Path, golden: "Golden") -> Parts:
    """Answer by the ONNX file alone."""
    import torch

    from biphase.encoder.network import pad_batch
    from biphase.export.onnx import ONNX_FILE, OnnxNetwork

    pad_id = read_json_as(folder / "config.json", Row).get("pad_token_id") or 0
    output = OnnxNetwork(folder / ONNX_FILE)(**pad_batch([torch.tensor(row) for row in golden.ids], pad_id))
    name = "sentence_embedding" if "sentence_embedding" in output else next(iter(output))
    states = torch.stack([output.start_logits, output.end_logits], -1) if name == "start_logits" else output[name]
    parts = [part[: len(row)] if states.ndim > 2 else part for part, row in zip(states, golden.ids, strict=True)]
    return [(part.mean(0) if name == "last_hidden_state" else part).numpy() for part in parts]


def judge_answers(by: str, golden: "Golden", expected: Parts, answered: Parts) -> AnswerCheck:
    """Compare answers in fp32."""
    is_equal = find_gap(answered, expected) <= ROUNDING
    verdict = "equal" if is_equal else f"{by} gives something else than the golden vectors say"
    return AnswerCheck(by, is_equal, verdict, tell_nearness(golden, expected, answered))


def find_gap(answered: Parts, expected: Parts) -> float:
    """Return the largest difference of an answer, in units of the length of the expected one."""
    if [part.shape for part in answered] != [part.shape for part in expected]:
        return np.inf
    pairs = zip(answered, expected, strict=True)
    return max(float(np.linalg.norm(one - other)) / max(float(np.linalg.norm(other)), 1e-30) for one, other in pairs)


def tell_nearness(golden: "Golden", expected: Parts, answered: Parts) -> list[Row]:
    """Say for each text how near an answer is."""
    rows: list[Row] = []
    for text, ids, one, other in zip(golden.texts, golden.ids, answered, expected, strict=True):
        row: Row = {"text": clipped(text, SHOWN_CHARACTERS), "tokens": len(ids), "cosine": None, "difference": None}
        if one.shape == other.shape:
            lengths = max(float(np.linalg.norm(one) * np.linalg.norm(other)), 1e-30)
            row["cosine"], row["difference"] = float((one * other).sum() / lengths), float(np.abs(one - other).max())
        rows.append(row)
    return rows


# Servers


def check_server(folder: Path, golden: "Golden", values: Parts, server: str, timeout: float) -> AnswerCheck:
    """Compare what a server answers, and name the mistake that explains another answer."""
    from biphase.export.golden import other_answers

    config, is_embedding = read_json_as(folder / "config.json", Row), golden.output == "embedding"
    if values[0].ndim != 1:
        raise InputError(f"{folder} says something of each token, which is compared without a server only")
    labels = [] if is_embedding else [str(name) for name in (config.get("id2label") or {}).values()]
    by, text = ask(server, golden, folder.name, timeout)
    answered, num_tokens = read_answer(by, text, labels)
    if len(answered) != len(values):
        raise InputError(f"{by} gives {len(answered)} answers to {len(values)} texts")

    def view(parts: Parts, kind: str | None = None) -> Parts:
        """Embeddings are compared by their directions, logits as the shares of classes that servers answer."""
        if not is_embedding:
            return to_shares(parts, config, kind)
        return [part / max(float(np.linalg.norm(part)), 1e-30) for part in parts]

    if isinstance(answered[0], str):
        is_equal = answered == [labels[int(part.argmax())] for part in values]
        verdict = "gives the same classes, and no scores to compare" if is_equal else "gives other classes"
        return AnswerCheck(by, is_equal, verdict, [])
    if {part.shape for part in answered} != {values[0].shape} or not all(np.isfinite(part).all() for part in answered):
        numbers = f"{answered[0].size} numbers for the first text, and {folder} {values[0].size} finite ones"
        raise InputError(f"{by} gives {numbers}: does it serve this model?")
    expected, seen = view(values), view(answered) if is_embedding else answered
    gap, said = find_gap(seen, expected), ""
    if gap > ROUNDING:
        mistakes = ((words, view(parts)) for words, parts in other_answers(folder, golden))
        forms = ((f"this network would, with {kind}", view(values, kind)) for kind in SHARES if not is_embedding)
        others = [
            (round(find_gap(seen, parts), DECIMALS), len(words), words) for words, parts in chain(mistakes, forms)
        ]
        nearest, _, words = min(others)
        if nearest < min(IN_16_BITS, gap / CLOSER):
            said = f"the server answers what {words}"
        elif gap > IN_16_BITS:
            total = sum(map(len, golden.ids))
            counted = f"; it counts {num_tokens} tokens where the folder's tokenizer makes {total}: is it another one?"
            said = "the server computes something else" + (counted if num_tokens not in (None, total) else "")
    is_equal, verdict = (False, said) if said else tell_lengths(answered, values) if is_embedding else (True, "equal")
    return AnswerCheck(by, is_equal, verdict, tell_nearness(golden, values if is_embedding else expected, answered))


def tell_lengths(answered: Parts, expected: Parts) -> tuple[bool, str]:
    """Judge the lengths of vectors that have equal directions."""
    theirs, ours = (np.linalg.norm(parts, axis=1) for parts in (answered, expected))
    if np.abs(theirs / ours - 1).max() <= IN_16_BITS:
        return True, "equal"
    if np.abs(theirs - 1).max() <= ROUNDING:
        return True, "equal, but for their length, which the server makes 1"
    is_unit = np.abs(ours - 1).max() <= ROUNDING
    missing = "the server does not normalize its vectors to length 1" if is_unit else "the server's have other lengths"
    return False, f"{missing}; their directions are equal"


SHARES = ("softmax", "a sigmoid", "logits as they are")


def to_shares(logits: Parts, config: Row, kind: str | None = None) -> list[np.ndarray]:
    """Turn the logits of each text into what servers and pipelines answer."""
    problem = config.get("problem_type")
    if kind is None:
        is_apart = problem == "multi_label_classification" or len(logits[0]) == 1
        kind = "logits as they are" if problem == "regression" else "a sigmoid" if is_apart else "softmax"
    if kind == "softmax":
        powers = [np.exp(part - part.max()) for part in logits]
        return [part / part.sum() for part in powers]
    return [1 / (1 + np.exp(-part.clip(-80, 80))) if kind == "a sigmoid" else part for part in logits]


def read_answer(by: str, text: bytes, labels: Sequence[str]) -> tuple[list[Any], int | None]:
    """Read a server's answer: vectors, scores in the order of `labels`, or bare classes; and the tokens that it
    counted. Raises `InputError` for anything else."""
    try:
        answer = json.loads(text)
        if isinstance(answer, list):
            return [read_row(row, labels) for row in answer], None
        rows = sorted(answer["data"], key=lambda row: row.get("index", 0))
        return [read_row(row, labels) for row in rows], (answer.get("usage") or {}).get("prompt_tokens")
    except InputError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError):
        raise InputError(
            f"{by} does not answer with {'scores' if labels else 'embeddings'}, but: {quote(text)}"
        ) from None


def read_row(row: Any, labels: Sequence[str]) -> Any:
    match row:
        case str() if labels:
            return row
        case {"embedding": values} | {"probs": values}:
            return np.array(values, dtype=np.float64)
        case [{"label": _}, *_]:
            row = {item["label"]: item["score"] for item in row}
    if not labels:
        return np.array(row, dtype=np.float64)
    if unknown := sorted({*row} ^ {*labels}):
        raise InputError(f"the server and the folder have other classes: only one has {first_of(unknown)}")
    return np.array([row[label] for label in labels], dtype=np.float64)


def quote(text: bytes) -> str:
    return repr(clipped(" ".join(text.decode(errors="replace").split()), SHOWN_CHARACTERS))


def ask(server: str, golden: "Golden", name: str, timeout: float) -> tuple[str, bytes]:
    """Ask a server by the routes of its kind; return the address that answered, and the answer."""
    base, openai = server.rstrip("/"), {"model": name, "input": golden.texts}
    requests: list[tuple[str, Any]] = [("/v1/embeddings", openai), ("/embed", {"inputs": golden.texts})]
    if golden.output == "logits":
        alone = [[text] for text in golden.texts]  # of texts in one list TEI would make a pair
        requests = [("/predict", {"inputs": alone}), ("/predict", golden.texts), ("/classify", openai)]
    last = f"/{base.rpartition('/')[2]}"
    if named := [(last, body) for path, body in requests if path.endswith(last)]:
        base, requests = base.removesuffix(last), named
    else:
        base = base.removesuffix("/v1")
    openai["model"] = find_served_name(base, timeout) or name
    refusals = []
    for path, body in requests:
        status, text = send(f"{base}{path}", body, timeout)
        if status == OK:
            return f"{base}{path}", text
        refusals.append(f"{path} {status} {quote(text)}")
        if status not in REFUSED:
            break
    raise InputError(f"{base} does not answer ({'; '.join(refusals)}): does it serve {golden.output}s of this model?")


def find_served_name(base: str, timeout: float) -> str | None:
    """Find the name by which a server of OpenAI's kind knows its first model; None where it does not say."""
    status, text = send(f"{base.removesuffix('/v1')}/v1/models", None, timeout)
    try:
        return str(json.loads(text)["data"][0]["id"]) if status == OK else None
    except (ValueError, KeyError, TypeError, IndexError):
        return None


def send(url: str, body: Any, timeout: float) -> tuple[int, bytes]:
    """Send JSON, or ask without a body; return the status and what was answered. Raises `InputError` where nothing is
    answered in time, or too much."""
    data, deadline, text = None if body is None else json.dumps(body).encode(), time.monotonic() + timeout, b""
    try:
        try:
            request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
            response = urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            response = error
        with response:
            while chunk := response.read1(1 << 16):
                text += chunk
                if len(text) > MOST_BYTES or time.monotonic() > deadline:
                    raise TimeoutError(f"no whole answer within {timeout:g} s and {MOST_BYTES >> 20} MiB")
            return int(response.status), text
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or first_line(error)
        raise InputError(f"{url} does not answer ({reason}); is the address right, and the server up?") from None
