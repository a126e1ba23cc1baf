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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from biphase import console
from biphase.api.networks import needs_extra
from biphase.encoder.models import find_folder
from biphase.errors import InputError, clipped, first_line
from biphase.files import read_json_as

if TYPE_CHECKING:
    from biphase.export.golden import Golden

ROUNDING, IN_16_BITS = 1e-3, 2e-2
"""Answers differ by less, in units of their length, in fp32, and where a server computes in 16 bits."""
CLOSER = 3
"""A mistake is named where its answer lies so many times nearer to the server's than the right one."""
MOST_BYTES = 1 << 26
REFUSED = (400, 404, 405, 415, 422)
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


@dataclass(frozen=True)
class ServedVector:
    embedding: list[float]
    index: int | None = None


@dataclass(frozen=True)
class ServedVectors:
    """An answer in OpenAI's form."""

    data: list[ServedVector]
    usage: dict[str, Any] | None = None


@dataclass(frozen=True)
class ServedScore:
    """The score of a class in an answer of TEI."""

    label: str
    score: float


@dataclass(frozen=True)
class ServedShares:
    probs: list[float]


@dataclass(frozen=True)
class ServedClasses:
    """An answer of vLLM's `/classify`."""

    data: list[ServedShares]


FORMS: dict[str, TypeAdapter[Any]] = {
    "embedding": TypeAdapter(list[list[float]] | ServedVectors),
    "logits": TypeAdapter(list[str] | list[dict[str, float]] | list[list[ServedScore]] | ServedClasses),
}


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
    with needs_extra("embeddings", f"to compute what {folder} gives"):
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
        checks = [compare("transformers", golden, expected, answer_plainly(path, golden))] if is_written else []
    if onnx.exists():
        with needs_extra("onnx", "to run its ONNX file"):
            checks.append(compare("onnx/model.onnx", golden, expected, answer_by_onnx(path, golden)))
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


def compare(by: str, golden: "Golden", expected: Parts, answered: Parts) -> AnswerCheck:
    """Compare answers in fp32."""
    is_equal = find_gap(answered, expected) <= ROUNDING
    verdict = "equal" if is_equal else f"{by} gives something else than the golden vectors say"
    return AnswerCheck(by, is_equal, verdict, measure(golden, expected, answered))


def find_gap(answered: Parts, expected: Parts) -> float:
    """Return the largest difference of an answer, in units of the length of the expected one."""
    if [part.shape for part in answered] != [part.shape for part in expected]:
        return np.inf
    pairs = zip(answered, expected, strict=True)
    return max(float(np.linalg.norm(one - other) / max(np.linalg.norm(other), 1e-30)) for one, other in pairs)


def measure(golden: "Golden", expected: Parts, answered: Parts) -> list[Row]:
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
    by, answer = ask(server, golden, folder.name, timeout)
    answered, num_tokens = read_answer(by, answer, labels)
    expected = values if is_embedding else to_shares(values, config)
    if len(answered) != len(golden.texts):
        raise InputError(f"{by} gives {len(answered)} answers to {len(golden.texts)} texts")
    if isinstance(answered[0], str):
        is_equal = answered == [labels[int(part.argmax())] for part in expected]
        verdict = "gives the same classes, and no scores to compare" if is_equal else f"{by} gives other classes"
        return AnswerCheck(by, is_equal, verdict, [])
    if not all(part.shape == values[0].shape and np.isfinite(part).all() for part in answered):
        counts = f"{len(answered[0])} numbers for a text, some perhaps no finite ones, and {folder} {len(values[0])}"
        raise InputError(f"{by} gives {counts}: does it serve this model?")

    def view(parts: Parts) -> Parts:
        return [part / max(np.linalg.norm(part), 1e-30) for part in parts] if is_embedding else parts

    gap, said = find_gap(view(answered), view(expected)), ""
    if gap > ROUNDING:
        nearest = min(CLOSER * IN_16_BITS, gap) / CLOSER
        others = [
            (words, parts if is_embedding else to_shares(parts, config))
            for words, parts in other_answers(folder, golden)
        ]
        if not is_embedding:
            others += [(f"this network would, with {kind}", to_shares(values, {}, kind)) for kind in KINDS_OF_SHARES]
        for words, parts in others:
            if (distance := find_gap(view(answered), view(parts))) < nearest:
                nearest, said = distance, f"the server answers what {words}"
    if not said and gap > IN_16_BITS:
        said = "the server computes something else, by no mistake that is known here"
        if num_tokens not in (None, total := sum(map(len, golden.ids))):
            said = (
                f"the server counts {num_tokens} tokens where the folder's tokenizer makes {total}: is it another one?"
            )
    is_equal, remark = (False, said) if said else tell_lengths(answered, expected) if is_embedding else (True, "equal")
    return AnswerCheck(by, is_equal, remark, measure(golden, expected, answered))


def tell_lengths(answered: Parts, expected: Parts) -> tuple[bool, str]:
    """Judge the lengths of vectors that have equal directions."""
    ours, theirs = (np.array([np.linalg.norm(part) for part in parts]) for parts in (expected, answered))
    if np.abs(theirs / ours - 1).max() <= IN_16_BITS:
        return True, "equal"
    if np.abs(theirs - 1).max() <= ROUNDING:
        return True, "equal, but for their length, which the server makes 1"
    is_unit = np.abs(ours - 1).max() <= ROUNDING
    missing = "the server does not normalize its vectors to length 1" if is_unit else "the server's have other lengths"
    return False, f"{missing}; their directions are equal"


KINDS_OF_SHARES = ("softmax", "a sigmoid", "logits as they are")


def to_shares(logits: Parts, config: Row, kind: str | None = None) -> list[np.ndarray]:
    """Turn the logits of each text into what servers and pipelines answer."""
    problem = config.get("problem_type")
    if kind is None:
        is_apart = problem == "multi_label_classification" or len(logits[0]) == 1
        kind = "logits as they are" if problem == "regression" else "a sigmoid" if is_apart else "softmax"
    match kind:
        case "softmax":
            powers = [np.exp(part - part.max()) for part in logits]
            return [part / part.sum() for part in powers]
        case "a sigmoid":
            return [1 / (1 + np.exp(-part.clip(-80, 80))) for part in logits]
    return list(logits)


def read_answer(by: str, answer: Any, labels: Sequence[str]) -> tuple[list[Any], int | None]:
    """Read vectors, scores in the order of `labels`, or bare classes of a server's answer, and the tokens that it
    counted."""
    if isinstance(answer, ServedVectors):
        ordered = sorted(enumerate(answer.data), key=lambda item: item[0] if item[1].index is None else item[1].index)
        count = (answer.usage or {}).get("prompt_tokens")
        return [np.array(item.embedding) for _, item in ordered], count if isinstance(count, int) else None
    if isinstance(answer, ServedClasses):
        return [np.array(item.probs) for item in answer.data], None
    if not labels or not answer or isinstance(answer[0], str):
        return [part if labels else np.array(part) for part in answer], None
    named = [part if isinstance(part, dict) else {item.label: item.score for item in part} for part in answer]
    if unknown := sorted({*named[0]} ^ {*labels}):
        raise InputError(f"{by} and the folder have other classes: only one has {', '.join(map(repr, unknown[:3]))}")
    return [np.array([part[label] for label in labels]) for part in named], None


def ask(server: str, golden: "Golden", name: str, timeout: float) -> tuple[str, Any]:
    """Ask a server by the routes of its kind; return the address that answered, and the answer, validated."""
    base, route = server.rstrip("/"), ""
    openai = {"model": name, "input": golden.texts}
    requests: list[tuple[str, Any]] = [("/v1/embeddings", openai), ("/embed", {"inputs": golden.texts})]
    if golden.output == "logits":
        pairs = [[text] for text in golden.texts]  # of texts in one list TEI would make a pair
        requests = [("/predict", {"inputs": pairs}), ("/predict", golden.texts), ("/classify", openai)]
    last = "/" + base.rpartition("/")[2]
    if last in ("/embeddings", *(path for path, _ in requests)):
        base, route = base.removesuffix(last), last
        requests = [(last, body) for path, body in requests if path.endswith(last)]
    base = base if route else base.removesuffix("/v1")
    openai["model"] = find_served_name(base, timeout) or name
    refusals = []
    for path, body in requests:
        status, text = send(f"{base}{path}", body, timeout)
        if status == 200:
            try:
                return f"{base}{path}", FORMS[golden.output].validate_json(text)
            except ValidationError:
                shown = clipped(" ".join(text.decode(errors="replace").split()), SHOWN_CHARACTERS)
                raise InputError(f"{base}{path} does not answer with {golden.output}s, but: {shown!r}") from None
        said = clipped(" ".join(text.decode(errors="replace").split()), SHOWN_CHARACTERS)
        refusals.append(f"{path} {status} {said}".strip())
        if status not in REFUSED:
            break
    raise InputError(f"{base} does not answer ({'; '.join(refusals)}): does it serve {golden.output}s of this model?")


def find_served_name(base: str, timeout: float) -> str | None:
    """Find the name by which a server of OpenAI's kind knows its first model; None where it does not say."""
    status, text = send(f"{base}{'' if base.endswith('/v1') else '/v1'}/models", None, timeout)
    try:
        return str(json.loads(text)["data"][0]["id"]) if status == 200 else None
    except (ValueError, KeyError, TypeError, IndexError):
        return None


def send(url: str, body: Any, timeout: float) -> tuple[int, bytes]:
    """Send JSON, or ask without a body; return the status and what was answered. Raises `InputError` where nothing is
    answered in time, or too much."""
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    data, deadline, text = None if body is None else json.dumps(body).encode(), time.monotonic() + timeout, b""
    try:
        try:
            response = urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout)
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
