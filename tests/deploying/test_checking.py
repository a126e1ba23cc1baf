"""Golden vectors are what transformers and sentence-transformers compute; a server that answers otherwise is told, with
its mistake by name."""

import json
import re
import runpy
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModel, AutoTokenizer, EuroBertConfig, LlamaConfig

import biphase
from biphase.cli.app import run_command
from biphase.corpus.tokenizer import load_tokenizer
from biphase.deploying.checking import ROUNDING, AnswerCheck, find_gap
from biphase.encoder.proofs import FailedProofError
from biphase.errors import DOCS, InputError
from biphase.exporting.golden import GOLDEN, TEXTS, write_golden
from biphase.exporting.model import export_checkpoint, save_encoder, write_sentence_transformer
from biphase.exporting.plain import refuse_left_out_prompts
from biphase.pretraining.loop import train

MLM = ("curriculum=[{objective: mlm, steps: 2}]", "schedule={peak_lr: 1e-2, warmup_steps: 0, decay_steps: 1}")
Answer = Callable[[str, Any], tuple[int, Any]]


@contextmanager
def served(answer: Answer) -> Iterator[str]:
    """A real server on this machine: `answer` maps the route and the JSON that was sent to a status and an answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, content = answer(self.path, json.loads(body) if body else None)
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def openai(vectors: Any) -> Answer:
    """A server that knows OpenAI's route alone, and gives its vectors in another order, as it may."""
    rows = [
        {"object": "embedding", "index": index, "embedding": list(map(float, row))} for index, row in enumerate(vectors)
    ]

    def answer(path: str, body: Any) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "its-name"}]}
        if path != "/v1/embeddings":
            return 404, {"detail": "Not Found"}
        assert body["model"] == "its-name" and body["input"][: len(TEXTS)] == list(TEXTS)
        if len(body["input"]) != len(rows):
            return 400, {"detail": "too long"}
        return 200, {"object": "list", "data": rows[::-1]}

    return answer


def ask(folder: Path, answer: Answer, route: str = "", **options: Any) -> AnswerCheck:
    with served(answer) as address:
        [check] = biphase.check(folder, address + route, **options)
    return check


@pytest.fixture(scope="module")
def encoder(tiny_recipe: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported encoder, a EuroBERT, whose weights are drawn so wide that each token matters."""
    folder = tmp_path_factory.mktemp("encoder")
    export_checkpoint(
        str(train(tiny_recipe(*MLM, "init.architecture.initializer_range=0.3"), folder / "runs").path),
        folder / "encoder",
    )
    return folder / "encoder"


def golden(folder: Path) -> Any:
    return SimpleNamespace(**json.loads((folder / GOLDEN).read_text()))


@torch.no_grad()
def hidden_states(network: Any, ids: list[list[int]]) -> list[np.ndarray]:
    """By transformers alone, each text alone."""
    return [network.eval()(input_ids=torch.tensor([row])).last_hidden_state[0].numpy() for row in ids]


def causal_twin(encoder: Path) -> Any:
    """The same weights in transformers' class that looks back."""
    network = AutoModel.from_pretrained(encoder)
    assert isinstance(network.config, EuroBertConfig)
    settings = network.config.to_dict()
    shared = {key: settings[key] for key in LlamaConfig().to_dict().keys() & settings.keys()}
    twin = transformers.LlamaModel(LlamaConfig(**{key: value for key, value in shared.items() if key != "model_type"}))
    twin.load_state_dict(network.state_dict())
    return twin


def test_an_exported_encoder_has_the_means_of_transformers(encoder: Path) -> None:
    from sentence_transformers import SentenceTransformer

    written = golden(encoder)
    assert (written.output, written.texts[:-1]) == ("embedding", list(TEXTS))
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    assert written.ids == tokenizer(written.texts, truncation=True)["input_ids"]
    assert len({len(row) for row in written.ids}) == 3
    assert len(written.ids[-1]) == written.cut_at < len(tokenizer(written.texts[-1])["input_ids"])
    expected = [rows.mean(0) for rows in hidden_states(AutoModel.from_pretrained(encoder), written.ids)]
    np.testing.assert_allclose(written.values, expected, rtol=1e-5, atol=1e-6)
    theirs = SentenceTransformer(str(encoder), device="cpu").encode(written.texts)
    np.testing.assert_allclose(written.values, theirs, rtol=1e-4, atol=1e-5)
    assert GOLDEN in json.loads((encoder / ".biphase.json").read_text())["files"]
    [check] = biphase.check(encoder)
    assert check.is_equal and check.verdict == "equal"


def test_a_causal_network_is_named(encoder: Path) -> None:
    written, twin = golden(encoder), causal_twin(encoder)
    states = hidden_states(twin, written.ids)
    check = ask(encoder, openai([rows.mean(0) for rows in states]))
    assert not check.is_equal and check.verdict == "the server's answer is what a causal network would give"
    check = ask(encoder, openai([rows[-1] for rows in states]))
    assert check.verdict == "the server's answer is what a causal network would give with pooling by the last token"
    half = [rows.astype(np.float16).mean(0).astype(np.float32) for rows in states]
    assert "causal" in ask(encoder, openai(half)).verdict


def test_other_mistakes_are_named(encoder: Path) -> None:
    written, network = golden(encoder), AutoModel.from_pretrained(encoder)
    states = hidden_states(network, written.ids)
    right = np.array(written.values)
    assert ask(encoder, openai(right)).verdict == "equal"
    assert ask(encoder, openai(right.astype(np.float16))).is_equal
    assert "by the first token" in ask(encoder, openai([rows[0] for rows in states])).verdict
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    bare = tokenizer(written.texts, truncation=True, add_special_tokens=False)["input_ids"]
    check = ask(encoder, openai([rows.mean(0) for rows in hidden_states(network, bare)]))
    assert "with the special tokens left out" in check.verdict
    unit = right / np.linalg.norm(right, axis=1, keepdims=True)
    check = ask(encoder, openai(unit))
    assert check.is_equal and "the server makes their length 1" in check.verdict
    assert "their lengths are not: does the server normalize" in ask(encoder, openai(3 * right)).verdict
    odd = np.random.default_rng(0).normal(size=right.shape)
    assert ask(encoder, openai(odd)).verdict == "the server computes something else"


def test_tei_is_asked_by_its_route(encoder: Path) -> None:
    values, texts = golden(encoder).values, golden(encoder).texts

    def answer(path: str, body: Any) -> tuple[int, Any]:
        return (200, values) if path == "/embed" and body == {"inputs": texts} else (404, b"")

    assert ask(encoder, answer).by.endswith("/embed")
    assert ask(encoder, answer, "/embed/").is_equal


def slow(path: str, body: Any) -> tuple[int, Any]:
    time.sleep(1.5)
    return 200, []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda *_: (200, b"<html><body>Welcome</body></html>"), "does not answer with embeddings but with '<html>"),
        (lambda *_: (200, {"data": "x"}), 'does not answer with embeddings but with \'{"data"'),
        (lambda *_: (200, [["a", 1]]), "does not answer with embeddings"),
        (lambda *_: (200, f"[[1{'0' * 400}]]".encode()), "does not answer with embeddings"),
        (lambda *_: (200, b"[" * 5000), "does not answer with embeddings"),
        (lambda *_: (200, b""), "does not answer with embeddings"),
        (lambda *_: (200, [[0.5] * 7] * 4), r"\[4, 7\], and .* finite ones of shape \[4, 32\]"),
        (lambda *_: (200, [[0.5] * 32] * 2), r"\[2, 32\], and"),
        (lambda *_: (200, [[float("nan")] * 32] * 4), "finite ones"),
        (lambda *_: (404, {"detail": "Not Found"}), "/v1/embeddings 404 .*; /embed 404"),
        (lambda *_: (500, b"out of memory"), "/v1/embeddings 500 'out of memory'"),
        (slow, "timed out|no whole answer"),
    ],
    ids=[
        "html",
        "another form",
        "words",
        "beyond floats",
        "deep",
        "nothing",
        "another width",
        "two",
        "nan",
        "404",
        "500",
        "slow",
    ],
)
def test_nonsense_is_told_in_one_line(answer: Answer, words: str, encoder: Path) -> None:
    with pytest.raises(InputError, match=words) as told:
        ask(encoder, answer, timeout=0.5)
    assert "\n" not in str(told.value) and len(str(told.value)) < 400


def test_a_server_that_is_not_there_is_told(encoder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(InputError, match=r"does not answer .*refused"):
        biphase.check(encoder, address)
    for wrong in ("localhost:8000", "file:///etc/passwd", "http://[bad", "http://a b", "http://127.0.0.1:99999"):
        with pytest.raises(InputError, match=r"is not an address|does not answer"):
            biphase.check(encoder, wrong)


def make_classifier(encoder: Path, folder: Path, num_labels: int = 3, **settings: Any) -> Path:
    names = ("boy", "girl", "witch")[:num_labels]
    config = transformers.AutoConfig.from_pretrained(encoder, id2label=dict(enumerate(names)), **settings)
    torch.manual_seed(0)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    load_tokenizer(encoder).save_pretrained(folder)
    write_golden(folder)
    return folder


@torch.no_grad()
def logits_of(folder: Path) -> torch.Tensor:
    """By transformers alone, padded."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    limit = min(tokenizer.model_max_length, model.config.max_position_embeddings)
    texts: Any = golden(folder).texts
    return model(**tokenizer(texts, padding=True, truncation=True, max_length=limit, return_tensors="pt")).logits


def test_classes_by_tei_and_by_the_service_of_the_how_to(encoder: Path, tmp_path: Path) -> None:
    folder = make_classifier(encoder, tmp_path / "classifier")
    logits, names, texts = logits_of(folder), ["boy", "girl", "witch"], golden(folder).texts
    np.testing.assert_allclose(golden(folder).values, logits, rtol=1e-4, atol=1e-5)
    shares = logits.softmax(1).tolist()

    def tei(path: str, body: Any) -> tuple[int, Any]:
        if path != "/predict" or not isinstance(body, dict):
            return 422, {}
        assert body == {"inputs": [[text] for text in texts]}
        rows = [[{"label": name, "score": share} for name, share in zip(names, row, strict=True)] for row in shares]
        return 200, [sorted(row, key=lambda entry: -entry["score"]) for row in rows]

    def how_to(answers: Any) -> Answer:
        return lambda path, body: (200, answers) if path == "/predict" and body == texts else (422, {})

    assert ask(folder, tei).is_equal
    assert ask(folder, how_to([dict(zip(names, row, strict=True)) for row in shares]), "/predict").is_equal
    raw = [dict(zip(names, row, strict=True)) for row in logits.tolist()]
    assert "logits as they are" in ask(folder, how_to(raw)).verdict
    with pytest.raises(InputError, match=r"does not answer with scores of boy, girl, witch but with .*LABEL_0"):
        ask(folder, how_to([{"LABEL_0": 1.0, "boy": 0.0, "girl": 0.0}] * 3))


def test_the_service_of_the_how_to_reads_token_types(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A BERT has them as a third input."""
    pytest.importorskip("onnxruntime")
    tokenizer, inputs = AutoTokenizer.from_pretrained(encoder), ["input_ids", "token_type_ids", "attention_mask"]
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=tokenizer.pad_token_id, id2label={0: "boy", 1: "girl"},
    )  # fmt: skip
    torch.manual_seed(0)
    save_encoder(tmp_path / "model", transformers.BertForSequenceClassification(config), tokenizer)
    path = tmp_path / "model" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_input_names": inputs}))
    folder = biphase.export(tmp_path / "model", tmp_path / "served", onnx=True)
    (folder / "biphase.json").write_text(json.dumps({"config": {"max_length": 64}}))
    page = (DOCS / "how_to" / "production.md").read_text(encoding="utf-8")
    [service] = [code for code in re.findall("```python\n(.*?)```", page, re.DOTALL) if "FastAPI()" in code]
    app = SimpleNamespace(post=lambda route: lambda function: function)
    monkeypatch.setitem(sys.modules, "fastapi", SimpleNamespace(FastAPI=lambda: app))  # type: ignore[arg-type]
    monkeypatch.chdir(tmp_path)
    Path("service.py").write_text(service, encoding="utf-8")
    names = runpy.run_path("service.py")
    assert names["inputs"] == {*inputs}
    answers = [list(row.values()) for row in names["predict"](golden(folder).texts)]
    np.testing.assert_allclose(answers, logits_of(folder).softmax(1), rtol=1e-4, atol=1e-5)


def test_a_classifier_that_looks_back_is_named(encoder: Path, tmp_path: Path) -> None:
    """A decoder that its configuration turns; the server does not know that key."""
    tokenizer = load_tokenizer(encoder)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.4, pad_token_id=tokenizer.pad_token_id, num_labels=3,
        is_causal=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(config)
    save_encoder(tmp_path, model, tokenizer)
    write_golden(tmp_path)
    model.config.is_causal = True
    with torch.no_grad():
        rows = [
            model.eval()(input_ids=torch.tensor([ids])).logits[0].softmax(0).tolist() for ids in golden(tmp_path).ids
        ]
    answers = [{f"LABEL_{index}": share for index, share in enumerate(row)} for row in rows]
    check = ask(tmp_path, lambda path, body: (200, answers))
    assert not check.is_equal and check.verdict == "the server's answer is what a causal network would give"


def test_a_model_without_a_padding_token_is_checked(encoder: Path, tmp_path: Path) -> None:
    """As GPT-2's, Llama's and Mistral's kinds are published; transformers then reads a text at a time."""
    tokenizer = load_tokenizer(encoder)
    tokenizer.pad_token = None
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=None, num_labels=3,
    )  # fmt: skip
    torch.manual_seed(0)
    save_encoder(tmp_path / "model", transformers.LlamaForSequenceClassification(config), tokenizer)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").pad_token is None
    write_golden(tmp_path / "model")
    assert [check.verdict for check in biphase.check(tmp_path / "model")] == ["equal"]
    pytest.importorskip("onnxruntime")
    with pytest.raises(FailedProofError, match=r"^LlamaForSequenceClassification cannot .*`pad_token_id`.*no padding"):
        biphase.export(tmp_path / "model", tmp_path / "out", onnx=True)


def make_embedder(encoder: Path, folder: Path) -> Path:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize
    from sentence_transformers.sentence_transformer.modules import Dense

    torch.manual_seed(0)
    plain = SentenceTransformer(str(encoder), device="cpu")
    model = SentenceTransformer(modules=[*plain, Dense(32, 12), Normalize()], device="cpu", prompts={"query": "find: "})
    model.save(str(folder))
    write_golden(folder)
    return folder


def test_an_embedding_model_with_prompts_a_dense_layer_and_normalization(encoder: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    folder = make_embedder(encoder, tmp_path / "embedder")
    model = SentenceTransformer(str(folder), device="cpu")
    texts: Any = golden(folder).texts
    right = model.encode(texts)
    np.testing.assert_allclose(golden(folder).values, right, rtol=1e-4, atol=1e-6)
    assert [check.verdict for check in biphase.check(folder)] == ["equal"]
    assert ask(folder, openai(right)).verdict == "equal"
    assert "does the server normalize as the folder does?" in ask(folder, openai(2.5 * right)).verdict
    check = ask(folder, openai(model.encode(texts, prompt_name="query")))
    assert check.verdict == "the server's answer is what this network would give with the prompt 'query'"


def test_an_answer_that_is_no_number_is_not_equal() -> None:
    one, nothing = np.ones(4), np.full(4, np.nan)
    assert not find_gap([one, nothing, one], [one, one, one]) <= ROUNDING


def test_a_pooling_without_prompts_gets_no_other_form(encoder: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    folder = make_embedder(encoder, tmp_path / "embedder")
    path = folder / "1_Pooling" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"include_prompt": False}))
    for form in ({"onnx": True}, {"as_": "llama"}):  # GGUF asks as Llama does
        with pytest.raises(InputError, match=r"its pooling leaves prompts out \(include_prompt: false\)"):
            biphase.export(folder, tmp_path / "out", **form)
    settings = folder / "config_sentence_transformers.json"  # sentence-transformers writes empty prompts, too
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"prompts": {"query": "", "document": ""}}))
    refuse_left_out_prompts(folder)


@pytest.mark.slow
@pytest.mark.minutes
def test_what_is_kept_and_its_onnx_file_are_checked(encoder: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    rows = [{"text": f"{text} {number}", "label": text[:3]} for text in ("boys", "girls") for number in range(8)]
    data = {"train": rows, "validation": rows[::3], "test": rows[::2]}
    settings = {"max_steps": 2, "learning_rate": 1e-3, "device": "cpu", "scores": tmp_path / "scores"}
    biphase.finetune(encoder, "who", data=data, keep=tmp_path / "kept", **settings)
    assert golden(tmp_path / "kept").output == "logits"
    np.testing.assert_allclose(golden(tmp_path / "kept").values, logits_of(tmp_path / "kept"), rtol=1e-4, atol=1e-5)
    folder = biphase.export(tmp_path / "kept", tmp_path / "served", onnx=True)
    assert [(check.by, check.is_equal) for check in biphase.check(folder)] == [
        ("transformers", True),
        ("onnx/model.onnx", True),
    ]
    embedder = biphase.export(make_embedder(encoder, tmp_path / "embedder"), tmp_path / "both", onnx=True)
    assert [check.is_equal for check in biphase.check(embedder)] == [True, True]


@pytest.mark.parametrize("head", ["ForTokenClassification", "ForQuestionAnswering"])
def test_networks_that_say_something_of_each_token(head: str, encoder: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    tokenizer = load_tokenizer(encoder)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=tokenizer.pad_token_id, num_labels=2,
    )  # fmt: skip
    model = getattr(transformers, f"Bert{head}")(config)
    save_encoder(tmp_path / "model", model, tokenizer)
    folder = biphase.export(tmp_path / "model", tmp_path / "served", onnx=True)
    written = golden(folder)
    assert [np.array(part).shape for part in written.values] == [(len(row), 2) for row in written.ids]
    assert [check.is_equal for check in biphase.check(folder)] == [True, True]
    with pytest.raises(InputError, match="answers for each token, which cannot be compared with a server"):
        biphase.check(folder, "http://127.0.0.1:1")


def test_the_command_ends_with_2_where_answers_differ(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(openai(golden(encoder).values)) as address:
        run_command(["check", str(encoder), "--server", address])
    assert "equal" in capsys.readouterr().out
    flipped = np.array(golden(encoder).values)[:, ::-1]
    with served(openai(flipped)) as address, pytest.raises(InputError, match="is not equal: the server computes"):
        run_command(["check", str(encoder), "--server", address, "--format", "json"])
    [record] = json.loads(capsys.readouterr().out)
    assert not record["is_equal"] and list(record["texts"][0]) == ["text", "tokens", "cosine", "difference"]


def test_a_folder_without_golden_vectors_is_computed(encoder: Path, tmp_path: Path) -> None:
    model = AutoModel.from_pretrained(encoder)
    save_encoder(tmp_path, model, AutoTokenizer.from_pretrained(encoder))
    write_sentence_transformer(tmp_path, model, 64)
    with pytest.raises(InputError, match=r"has no golden\.json: give a `server`"):
        biphase.check(tmp_path)
    assert ask(tmp_path, openai(golden(encoder).values)).is_equal


@pytest.mark.parametrize(
    "content", ["{}", '{"output": "embedding", "texts": ["a"], "ids": [[1]], "values": [["x"]]}', "<html>", "[]"]
)
def test_damaged_golden_vectors_are_told(content: str, encoder: Path, tmp_path: Path) -> None:
    model = AutoModel.from_pretrained(encoder)
    save_encoder(tmp_path, model, AutoTokenizer.from_pretrained(encoder))
    (tmp_path / GOLDEN).write_text(content)
    with pytest.raises(InputError, match=r"golden\.json"):
        biphase.check(tmp_path)


def hold(connection: socket.socket, sent: bytes, pause: float) -> None:
    with suppress(OSError):  # the other side goes away
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        for _ in range(10_000):
            connection.sendall(sent)
            time.sleep(pause)


@pytest.mark.parametrize(
    ("sent", "pause", "words"),
    [
        (b"X", 0.1, r"no whole answer in 1\.5 s"),
        (b"\r\n" + b" " * 2**20, 0, "sends more than 33,554,432 bytes"),
    ],
    ids=["drips", "floods"],
)
def test_a_server_without_an_end_is_told(sent: bytes, pause: float, words: str, encoder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                hold(server.accept()[0], sent, pause)

        threading.Thread(target=serve, daemon=True).start()
        started = time.monotonic()
        with pytest.raises(InputError, match=words):
            biphase.check(encoder, f"http://127.0.0.1:{server.getsockname()[1]}", timeout=1.5 if pause else 60)
    assert time.monotonic() - started < 30


def test_an_error_that_is_cut_short_is_the_servers(encoder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for _ in range(9):
                with suppress(OSError), server.accept()[0] as connection:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 500 Error\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nout of")

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(InputError, match=r"^http://127\.0\.0\.1:\d+/v1/\w+ does not answer"):
            biphase.check(encoder, f"http://127.0.0.1:{server.getsockname()[1]}", timeout=10)


def test_a_password_is_not_shown(encoder: Path) -> None:
    for address in ("http://ann:secret@127.0.0.1:1/v1", "ann:secret@localhost:8000"):
        with pytest.raises(InputError, match="is not an address alone") as told:
            biphase.check(encoder, address)
        assert "secret" not in str(told.value)


def test_a_server_that_refuses_the_text_that_is_cut_is_asked_for_the_others(encoder: Path, capsys: Any) -> None:
    check = ask(encoder, openai(golden(encoder).values[:-1]))
    assert check.is_equal and len(check.texts) == 3
    assert "refuses a text that the model cuts at 64 tokens" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "change",
    [
        *({"ids": []}, {"values": []}, {"texts": ["x"]}, {"texts": [], "ids": [], "values": []}),
        *({"ids": [[]] * 4}, {"values": [[]] * 4}, {"values": [[1.0], [1.0, 2.0], [1.0], [1.0]]}),
        *({"values": [[[1.0]], [1.0], [1.0], [1.0]]}, {"ids": [[10**400]] * 4}, {"cut_at": -1}),
    ],
)
def test_lists_of_unequal_lengths_in_golden_vectors_are_told(
    change: dict[str, Any], encoder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(encoder, folder)
    (folder / ".biphase.json").unlink()
    (folder / GOLDEN).write_text(json.dumps(vars(golden(encoder)) | change))
    for options in ({}, {"server": "http://127.0.0.1:1"}):
        with pytest.raises(InputError, match=r"golden\.json is damaged"):
            biphase.check(folder, **options)


def test_a_copy_cuts_texts_at_the_smallest_of_the_lengths(encoder: Path, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("onnxruntime")
    folder = make_embedder(encoder, tmp_path / "embedder")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = 60
    tokenizer.save_pretrained(folder)
    path = folder / "sentence_bert_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_seq_length": 32}))
    write_golden(folder)
    warning = "sentence-transformers cuts texts at 32 tokens, other programs at 60: vectors differ"
    assert warning in biphase.inspect(folder)["warnings"]
    biphase.check(folder)
    assert warning in " ".join(capsys.readouterr().err.split())
    served = biphase.export(folder, tmp_path / "served", onnx=True)
    assert AutoTokenizer.from_pretrained(served).model_max_length == 32
    assert biphase.inspect(served)["longest_text"] == {"positions": 64, "sentence_transformers": 32, "tokenizer": 32}
    assert [check.is_equal for check in biphase.check(served)] == [True, True]
    assert golden(served).cut_at == 32 == len(golden(served).ids[-1])


def test_tokens_that_the_network_has_not_are_told(encoder: Path, tmp_path: Path) -> None:
    save_encoder(tmp_path, AutoModel.from_pretrained(encoder), AutoTokenizer.from_pretrained(encoder))
    written = vars(golden(encoder))
    (tmp_path / GOLDEN).write_text(json.dumps(written | {"ids": [[10**6], *written["ids"][1:]]}))
    with pytest.raises(InputError, match=r"cannot compute the outputs of"):
        ask(tmp_path, openai(np.array(written["values"])[:, ::-1]))
