"""Compare the outputs of transformers, an ONNX file or a server with the golden vectors in a model folder.

Routes of servers for embeddings: OpenAI's `/v1/embeddings` (vLLM, Text Embeddings Inference, Infinity, llama.cpp) and
TEI's `/embed`. The route for classes: `/predict`, as in TEI and in our how-to.
"""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import special

from biphase import console
from biphase.config import ModelName
from biphase.encoder.models import find_folder, unreplaced
from biphase.errors import InputError, clipped, first_line, first_of, told_as
from biphase.files import parse_json, read_json_as
from biphase.machine import needs_extra

if TYPE_CHECKING:
    from biphase.exporting.golden import Golden
    from biphase.exporting.plain import NamedOutputs, OutputsOf

ROUNDING, IN_16_BITS = 1e-3, 2e-2
"""The largest differences of equal answers, relative to their length, for fp32 and for 16-bit servers."""
CLOSER = 3
"""The factor by which a mistake's answer must be nearer to a server's answer than the right one is, to explain it."""
DECIMALS = 4
"""The number of decimals to which distances are compared; at a tie, the mistake with the shortest description wins."""
OK = 200
MOST_BYTES = 2**25
"""The longest answer that is read."""
SHOWN_CHARACTERS = 60

SHARES: dict[str, Callable[[Any], np.ndarray]] = {
    "softmax": lambda logits: special.softmax(logits, axis=1),
    "a sigmoid": special.expit,
    "logits as they are": np.asarray,
}
"""Name of a function → the function, by which servers and pipelines turn logits [texts, classes] into scores."""

Parts = Sequence[np.ndarray] | np.ndarray
"""The embedding or the logits of each text."""


@dataclass(frozen=True)
class AnswerCheck:
    """The distance between a source's answers to a folder's golden texts and the golden vectors."""

    by: str
    """The source: transformers, an ONNX file, or a server's address."""
    is_equal: bool
    verdict: str
    texts: list[dict[str, Any]]
    """A row for each text: `text`, `tokens`, `cosine`, and `difference`, the largest difference between numbers."""

    def __repr__(self) -> str:
        return f"{self.by}: {self.verdict} ({len(self.texts)} texts)"


def check(folder: ModelName, server: str | None = None, *, timeout: float = 60.0) -> list[AnswerCheck]:
    """Compare the outputs of transformers and an ONNX file, or of a server, with the golden vectors in a model folder.

    Args:
        folder: A folder that `export`, `finetune --keep`, `embed`, `trim` or `convert` wrote. With a server, any model
            folder or Hub id: missing golden vectors are computed with transformers.
        server: The address of a server that serves this model, such as http://localhost:8000, or the address of one of
            its routes.
        timeout: The seconds to wait for each answer.

    Returns: for each source of answers: `by`, `is_equal`, `verdict` and `texts`.

    Raises:
        InputError: no such folder, nothing to compare with, or a server without a useful answer.
    """
    if server is not None and (not server.startswith(("http://", "https://")) or "@" in server):
        shown = server.rpartition("@")[2]  # no name and password
        raise InputError(f"server {shown} is not an address alone: give one such as http://localhost:8000")
    feature = f"to compute the outputs of {folder}"
    opened = unreplaced(find_folder(str(folder)))
    with told_as(f"cannot compute the outputs of {folder}"), needs_extra("embeddings", feature), opened as path:
        from biphase.exporting.golden import GOLDEN, load_answering, make_golden, read_golden
        from biphase.exporting.plain import tell_limits, text_limits

        if (path / GOLDEN).exists():
            golden = read_golden(path / GOLDEN)
        elif server is None:
            raise InputError(f"{folder} has no {GOLDEN}: give a `server` that serves it, or export it again")
        else:
            console.err.print(f"{folder} has no {GOLDEN}: transformers computes the vectors")
            golden = make_golden(path)
        if server is not None:
            return [check_server(path, golden, server, timeout)]
        network, onnx = load_answering(path), path / "onnx" / "model.onnx"
        if warning := tell_limits(text_limits(path, network.tokenizer)):
            console.err.print(f"{folder}: {warning}")
        checks = [judge_answers("transformers", golden, network, network.outputs)]
        if onnx.exists():
            with needs_extra("onnx", "to run its ONNX file"):
                from biphase.deploying.onnx import OnnxNetwork

                compute = OnnxNetwork(onnx).outputs
            checks.append(judge_answers("onnx/model.onnx", golden, network, compute))
        return checks


def tell_unequal(checks: Sequence[AnswerCheck]) -> str:
    """Return the sources whose answers differ from the golden vectors, with their verdicts; "" if all are equal."""
    return "; ".join(f"{check.by} is not equal: {check.verdict}" for check in checks if not check.is_equal)


def judge_answers(by: str, golden: "Golden", network: "NamedOutputs", compute: "OutputsOf") -> AnswerCheck:
    """Compare outputs that are computed here, with the tokenizer that transformers chooses: for one padded batch, or
    for each text alone if the network has no padding token."""
    import torch

    from biphase.encoder.network import pad_batch
    from biphase.exporting.golden import split_texts
    from biphase.exporting.plain import read_answers

    longest = min(golden.cut_at or max(map(len, golden.ids)), network.tokenizer.model_max_length)
    rows = [torch.tensor(ids) for ids in split_texts(network.tokenizer, golden.texts, longest)]
    pad_id = getattr(network.network.config, "pad_token_id", None)
    answered = list[np.ndarray]()
    with torch.no_grad():
        for batch in [[row] for row in rows] if pad_id is None else [rows]:
            answered += read_answers(compute(pad_batch(batch, pad_id or 0)), [*map(len, batch)])
    expected = [np.array(value) for value in golden.values]
    is_equal = find_gap(answered, expected) <= ROUNDING
    verdict = "equal" if is_equal else f"{by} differs from the golden vectors"
    return AnswerCheck(by, is_equal, verdict, tell_nearness(golden, expected, answered))


def find_gap(answered: Parts, expected: Parts) -> float:
    """Return the largest distance between an answer and the expected one, relative to the length of the latter;
    infinity for different shapes, and nan for an answer that is no number."""
    if [answer.shape for answer in answered] != [answer.shape for answer in expected]:
        return np.inf
    pairs = zip(answered, expected, strict=True)
    gaps = [np.linalg.norm(one - other) / max(float(np.linalg.norm(other)), 1e-30) for one, other in pairs]
    return float(np.max(gaps))  # nan if one is


def tell_nearness(golden: "Golden", expected: Parts, answered: Parts) -> list[dict[str, Any]]:
    """Make a row for each text whose answer has the expected shape."""
    rows: list[dict[str, Any]] = []
    for text, ids, one, other in zip(golden.texts, golden.ids, answered, expected, strict=True):
        if one.shape == other.shape:
            cosine = (one * other).sum() / max(np.linalg.norm(one) * np.linalg.norm(other), 1e-30)
            row = {"text": clipped(text, SHOWN_CHARACTERS), "tokens": len(ids), "cosine": float(cosine)}
            rows.append({**row, "difference": float(np.abs(one - other).max())})
    return rows


# Servers


def check_server(folder: Path, golden: "Golden", server: str, timeout: float) -> AnswerCheck:
    """Compare a server's answers with the golden vectors; if they differ, name the mistake that explains it."""
    config, is_embedding = read_json_as(folder / "config.json", dict[str, Any]), golden.output == "embedding"
    if isinstance(golden.values[0][0], list):
        raise InputError(f"{folder} answers for each token, which cannot be compared with a server: leave `server` out")
    labels = [] if is_embedding else [str(name) for name in (config.get("id2label") or {}).values()]
    golden, by, text = ask(server, golden, folder.name, timeout)
    answered, values = read_answer(by, text, labels), np.array(golden.values)
    if answered.shape != values.shape or not np.isfinite(answered).all():
        shapes = f"numbers of shape {[*answered.shape]}, and {folder} finite ones of shape {[*values.shape]}"
        raise InputError(f"{by} gives {shapes}: does it serve this model?")
    # Compare the directions of embeddings; for logits, compare the scores of classes with which servers answer.
    view = to_directions if is_embedding else SHARES[find_shares(config)]
    expected, seen = view(values), to_directions(answered) if is_embedding else answered
    gap, verdict = find_gap(seen, expected), "equal"
    mistake = find_mistake(folder, golden, seen, view, gap) if gap > ROUNDING else ""
    if is_embedding and not mistake:
        verdict, mistake = compare_lengths(answered, values)
    return AnswerCheck(
        by, not mistake, mistake or verdict, tell_nearness(golden, values if is_embedding else expected, answered)
    )


def to_directions(embeddings: Parts) -> np.ndarray:
    return embeddings / np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), 1e-30)


def find_shares(config: dict[str, Any]) -> str:
    """Return the name of the function in `SHARES` that a pipeline applies to a network's logits."""
    problem = config.get("problem_type")
    if problem == "regression":
        return "logits as they are"
    is_apart = problem == "multi_label_classification" or len(config.get("id2label") or {}) == 1
    return "a sigmoid" if is_apart else "softmax"


def find_mistake(folder: Path, golden: "Golden", seen: Parts, view: Callable[[Any], np.ndarray], gap: float) -> str:
    """Return a sentence on the mistake that explains the server's answer; "" if 16-bit rounding explains it."""
    from biphase.exporting.golden import other_answers

    others = [(words, view(parts)) for words, parts in other_answers(folder, golden)]
    if golden.output == "logits":
        others += [(f"this network would give with {form}", show(golden.values)) for form, show in SHARES.items()]
    nearest, _, words = min((round(find_gap(seen, parts), DECIMALS), len(words), words) for words, parts in others)
    if nearest < min(IN_16_BITS, gap / CLOSER):
        return f"the server's answer is what {words}"
    return "the server computes something else" if gap > IN_16_BITS else ""


def compare_lengths(answered: np.ndarray, expected: np.ndarray) -> tuple[str, str]:
    """Return a verdict on the lengths of vectors with equal directions, and ""; or "" and a mistake."""
    theirs, ours = (np.linalg.norm(parts, axis=1) for parts in (answered, expected))
    if np.abs(theirs / ours - 1).max() <= IN_16_BITS:
        return "equal", ""
    if np.abs(theirs - 1).max() <= ROUNDING:
        return "equal, except that the server makes their length 1", ""
    return "", "their directions are equal, their lengths are not: does the server normalize as the folder does?"


def read_answer(by: str, text: bytes, labels: Sequence[str]) -> np.ndarray:
    """Read a server's answer as [texts, numbers]: vectors, or scores in the order of `labels`."""
    try:
        rows = parse_json(text.decode())
        if isinstance(rows, dict):
            rows = [row["embedding"] for row in sorted(rows["data"], key=lambda row: row["index"])]
        if labels:
            named = [{item["label"]: item["score"] for item in row} if isinstance(row, list) else row for row in rows]
            rows = [[row[label] for label in labels] for row in named]
        return np.array(rows, dtype=np.float64)
    except (ArithmeticError, ValueError, TypeError, KeyError, AttributeError):
        what = f"scores of {first_of(labels)}" if labels else "embeddings"
        raise InputError(f"{by} does not answer with {what} but with {quote(text)}") from None


def quote(text: bytes) -> str:
    return repr(clipped(" ".join(text.decode(errors="replace").split()), SHOWN_CHARACTERS))


def ask(server: str, golden: "Golden", name: str, timeout: float) -> tuple["Golden", str, bytes]:
    """Ask a server by each route for this kind of output, and again without the text that is cut if it refuses it.

    Returns the golden vectors of the texts that were asked, the address that answered, and its answer.
    """
    base = server.rstrip("/")
    for path in ("/v1/embeddings", "/embed", "/predict", "/v1"):
        base = base.removesuffix(path)
    name, refusals = find_served_name(base, timeout) or name, list[str]()
    texts, ids, values = golden.texts[:-1], golden.ids[:-1], golden.values[:-1]
    without_cut = replace(golden, texts=texts, ids=ids, values=values, cut_at=None)
    for asked in (golden, without_cut) if golden.cut_at else (golden,):
        requests: list[tuple[str, Any]] = [("/v1/embeddings", {"model": name, "input": asked.texts})]
        requests.append(("/embed", {"inputs": asked.texts}))
        if golden.output == "logits":
            alone = [[text] for text in asked.texts]  # TEI would read texts in one list as a pair
            requests = [("/predict", {"inputs": alone}), ("/predict", asked.texts)]
        refusals.clear()
        for path, body in requests:
            status, text = send(f"{base}{path}", body, timeout)
            if status == OK and asked is not golden:
                console.err.print(f"{base}{path} refuses a text that the model cuts at {golden.cut_at} tokens")
            if status == OK:
                return asked, f"{base}{path}", text
            refusals.append(f"{path} {status} {quote(text)}")
    raise InputError(f"{base} does not answer ({'; '.join(refusals)}): does it serve {golden.output}s of this model?")


def find_served_name(base: str, timeout: float) -> str | None:
    """Ask an OpenAI-like server for the name of its first model; return None if it names none."""
    status, text = send(f"{base}/v1/models", None, timeout)
    try:
        return str(parse_json(text.decode())["data"][0]["id"]) if status == OK else None
    except (ValueError, KeyError, TypeError, IndexError):
        return None


def fetch(request: urllib.request.Request, timeout: float, answer: "Future[tuple[int, bytes]]") -> None:
    """Set an answer to the status and the first bytes that a server sends, or to the error that ends this."""
    try:
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                answer.set_result((int(response.status), response.read(MOST_BYTES)))
        except urllib.error.HTTPError as error:
            answer.set_result((error.code, error.read(MOST_BYTES)))
    except Exception as error:  # the caller raises it
        answer.set_exception(error)


def send(url: str, body: Any, timeout: float) -> tuple[int, bytes]:
    """Send JSON, or a request without a body; return the status and the answer. Raises `InputError` without a
    connection, without the whole answer after the timeout, and for an answer of more than `MOST_BYTES`."""
    data = None if body is None else json.dumps(body).encode()
    answer: Future[tuple[int, bytes]] = Future()
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        # In a thread, because a server that sends a byte a second never lets a read end.
        Thread(target=fetch, args=(request, timeout, answer), daemon=True).start()
        status, text = answer.result(timeout)
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = (
            getattr(error, "reason", None) or (str(error) and first_line(error)) or f"no whole answer in {timeout:g} s"
        )
        raise InputError(f"{url} does not answer ({reason}); is the address right, and the server up?") from None
    if len(text) == MOST_BYTES:
        raise InputError(f"{url} sends more than {MOST_BYTES:,} bytes: does it serve this model?")
    return status, text
