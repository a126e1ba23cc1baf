"""ONNX files compute what PyTorch computes, for other batches and lengths than they were made with, and other programs
read them; what 8 bits cost is scored on the user's own task."""

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from subprocess import DEVNULL
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import transformers
from scipy.stats import pearsonr
from sklearn.metrics import accuracy_score
from transformers import AutoModel, AutoTokenizer

import biphase
from biphase.corpus.tokenizer import load_tokenizer
from biphase.deploying import onnx as onnx_files
from biphase.deploying import worth
from biphase.deploying.copying import copy_model
from biphase.encoder.proofs import FailedProofError
from biphase.errors import InputError
from biphase.exporting.model import export_checkpoint, save_encoder, set_direction
from biphase.exporting.plain import NamedOutputs, load_named
from biphase.exporting.push import MODEL_FILES
from biphase.files import MARK, file_hash
from biphase.pretraining.loop import train

from ..conftest import flip_bit, full_disk, mostly_later
from ..exporting.test_model import FAMILIES, MLM

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

TEXTS = ["Tip", "the boy Tip ran to the Tin Woodman , who sat upon his throne", "an army of girls", "a b c d e f"]


@pytest.fixture(scope="module")
def encoder(tiny_recipe: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    export_checkpoint(str(train(tiny_recipe(*MLM), folder / "runs").path), folder / "encoder")
    return folder / "encoder"


def make_kept(encoder: Path, folder: Path, head: str, num_labels: int = 3) -> Path:
    config = transformers.AutoConfig.from_pretrained(encoder, num_labels=num_labels)
    torch.manual_seed(0)
    getattr(transformers, f"AutoModel{head}").from_config(config).save_pretrained(folder)
    load_tokenizer(encoder).save_pretrained(folder)
    return folder


def make_embedder(encoder: Path, folder: Path) -> Path:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize
    from sentence_transformers.sentence_transformer.modules import Dense

    torch.manual_seed(0)
    plain = SentenceTransformer(str(encoder), device="cpu")
    SentenceTransformer(modules=[*plain, Dense(32, 12), Normalize()], device="cpu").save(str(folder))
    return folder


def make_family(family: str, encoder: Path, folder: Path) -> Path:
    tokenizer = load_tokenizer(encoder)
    ids = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    network = FAMILIES[family](**ids, pad_token_id=tokenizer.pad_token_id)
    if family in ("llama-tied", "mistral-window"):
        set_direction(network.config, causal=False)
    save_encoder(folder, network, tokenizer)
    return folder


KINDS: dict[str, Callable[[Path, Path], Path]] = {
    "an encoder": lambda encoder, folder: encoder,
    "a classifier": lambda encoder, folder: make_kept(encoder, folder, "ForSequenceClassification"),
    "a tagger": lambda encoder, folder: make_kept(encoder, folder, "ForTokenClassification"),
    "a Llama that tags, with dropout": lambda encoder, folder: make_kept(
        make_family("llama-tied", encoder, folder.with_name("llama")), folder, "ForTokenClassification"
    ),
    "an embedding model": make_embedder,
    "an adapted Llama": lambda encoder, folder: make_family("llama-tied", encoder, folder),
    "a ModernBERT": lambda encoder, folder: make_family("modernbert", encoder, folder),
    "a Mistral with a window": lambda encoder, folder: make_family("mistral-window", encoder, folder),
}


def run_file(path: Path, batch: Any) -> dict[str, np.ndarray]:
    """The outputs of an ONNX file by onnxruntime alone."""
    session = onnxruntime.InferenceSession(str(path))
    feeds = {entry.name: batch[entry.name].numpy() for entry in session.get_inputs()}
    return dict(zip([entry.name for entry in session.get_outputs()], session.run(None, feeds), strict=True))


@torch.no_grad()
def expected_outputs(folder: Path, batch: Any) -> dict[str, torch.Tensor]:
    """What transformers and sentence-transformers compute with a folder."""
    from sentence_transformers import SentenceTransformer

    [kind] = json.loads((folder / "config.json").read_text())["architectures"]
    head = re.search(r"For(Sequence|Token)Classification", kind)
    if head:
        return {"logits": getattr(transformers, kind).from_pretrained(folder).eval()(**batch).logits}
    outputs = {"last_hidden_state": AutoModel.from_pretrained(folder).eval()(**batch).last_hidden_state}
    if (folder / "modules.json").exists():
        outputs["sentence_embedding"] = SentenceTransformer(str(folder), device="cpu")(dict(batch))[
            "sentence_embedding"
        ]
    return outputs


@pytest.mark.parametrize("kind", mostly_later(KINDS, "an encoder", "a tagger", "an embedding model"))
def test_a_file_computes_what_pytorch_computes_for_any_batch(kind: str, encoder: Path, tmp_path: Path) -> None:
    source = KINDS[kind](encoder, tmp_path / "source")
    folder = biphase.export(source, tmp_path / "out", onnx=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for texts in (TEXTS[:1], TEXTS[1:2], TEXTS):
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        computed, mask_SL = run_file(folder / "onnx" / "model.onnx", batch), batch["attention_mask"].bool()
        expected = expected_outputs(folder, batch)
        assert list(computed) == list(expected)
        for name, rows in expected.items():
            kept = mask_SL if rows.ndim > 2 else ...
            gap = np.abs(computed[name] - rows.numpy())[kept].max()
            assert gap < 1e-4 * float(rows[kept].abs().mean()), name
    card = (folder / "README.md").read_text()
    assert "onnx/model.onnx" in card and '("encoder"' not in card
    assert "# out\n" in card or kind == "an embedding model"  # whose card sentence-transformers wrote


def test_a_run_becomes_an_encoder_with_its_file(tiny_recipe: Callable[..., Any], tmp_path: Path) -> None:
    run = train(tiny_recipe(*MLM), tmp_path / "runs").path
    folder = biphase.export(run, tmp_path / "out", onnx=True)
    written = json.loads((folder / MARK).read_text())
    assert written["biphase"] == "encoder"
    assert "onnx/model.onnx" in written["files"]
    facts = biphase.inspect(folder, verify=True)
    assert (facts["onnx"], facts["verified"]) == (["model.onnx"], "every hash agrees")


def test_large_weights_lie_beside_the_graph(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_files, "INLINE_BYTES", 0)
    folder = biphase.export(encoder, tmp_path / "out", int8=True)
    names = {path.name for path in (folder / "onnx").iterdir()}
    assert names == {"model.onnx", "model.onnx_data", "model_quantized.onnx", "model_quantized.onnx_data"}
    assert all(MODEL_FILES.fullmatch(f"onnx/{name}") for name in names)
    assert (folder / "onnx" / "model.onnx_data").stat().st_size > 100_000
    batch = AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
    expected = expected_outputs(folder, batch)["sentence_embedding"]
    for name, tolerance in {"model.onnx": 1e-5, "model_quantized.onnx": 0.1}.items():
        computed = run_file(folder / "onnx" / name, batch)["sentence_embedding"]
        assert np.allclose(computed, expected, atol=tolerance * float(expected.abs().max()))


def test_a_graph_that_holds_for_its_example_alone_is_not_written(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_fixed_length(network: Any, features: Any) -> Any:
        outputs = network(**features).last_hidden_state
        return {"last_hidden_state": outputs + float(len(features["input_ids"]))}  # traced as a number

    monkeypatch.setattr(NamedOutputs, "outputs", lambda self, features: with_fixed_length(self.network, features))
    source = make_family("modernbert", encoder, tmp_path / "source")
    with pytest.raises(FailedProofError, match="gives another last_hidden_state than PyTorch for texts of 1 tokens"):
        biphase.export(source, tmp_path / "out", onnx=True)
    assert not (tmp_path / "out").exists()
    assert not (source / "onnx").exists()


def test_a_copy_follows_no_link_out_of_its_folder(encoder: Path, tmp_path: Path) -> None:
    """The Hub's cache links the files of a commit to the blobs beside it."""
    commit = tmp_path / "models--a--b" / "snapshots" / ("c" * 40)
    shutil.copytree(encoder, commit)
    (blobs := tmp_path / "models--a--b" / "blobs").mkdir()
    shutil.move(commit / "model.safetensors", blobs / "d")
    (commit / "model.safetensors").symlink_to("../../blobs/d")
    copy_model(commit, tmp_path / "copy", lambda part: None)
    assert file_hash(tmp_path / "copy" / "model.safetensors") == file_hash(encoder / "model.safetensors")
    (tmp_path / "secret").write_text("secret")
    for target in (tmp_path / "secret", "../../../secret"):
        (link := commit / "LICENSE").symlink_to(target)
        with pytest.raises(InputError, match=f"{link.name} is a link to a file outside of its folder: put the file"):
            copy_model(commit, tmp_path / "other", lambda part: None)
        assert not (tmp_path / "other").exists()
        link.unlink()


def test_a_copy_has_the_tokenizer(encoder: Path, tmp_path: Path) -> None:
    source = shutil.copytree(encoder, tmp_path / "source")
    names = ("sentencepiece.bpe.model", "spm-32k.model", "tokenizer.model", "vocab.bpe", "vocab.json", "vocab.txt")
    for name in names:
        shutil.copy(source / "tokenizer.json", source / name)
    copy_model(source, tmp_path / "copy", lambda part: None)
    assert {path.name for path in (tmp_path / "copy").iterdir()} > {"tokenizer.json", *names}


def test_mistakes_are_told_in_one_line(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    for options, words in (
        ({"onnx": True, "merge": 0.5}, "is not a run"),
        ({"onnx": True, "test": encoder}, "`test` measures the loss of `int8`"),
        ({"int8": True, "test": tmp_path / "nowhere"}, "does not exist"),
        ({"int8": True, "test": tmp_path}, "is not|needs|does not"),
    ):
        with pytest.raises(InputError, match=words):
            biphase.export(encoder, out, **options)
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    monkeypatch.setattr("biphase.deploying.copying.copy_model", lambda *_: pytest.fail("the model is copied first"))
    with pytest.raises(InputError, match=r"needs onnxruntime: pip install 'biphase\[onnx\]'"):
        biphase.export(encoder, out, onnx=True)
    assert not out.exists()


@pytest.mark.parametrize(
    ("kind", "words"), [("T", "/copy/.*tokenizer_class"), ("TTokenizer", "tokenizer .* cannot be loaded")]
)
def test_a_tokenizer_that_is_code_is_told_in_one_line(kind: str, words: str, encoder: Path, tmp_path: Path) -> None:
    source = shutil.copytree(encoder, tmp_path / "copy")
    (source / ".biphase.json").unlink()
    code = {"tokenizer_class": kind, "auto_map": {"AutoTokenizer": ["t.T", None]}}
    (source / "tokenizer_config.json").write_text(json.dumps(code))
    with pytest.raises(InputError, match=words) as told:
        biphase.export(source, tmp_path / "out", onnx=True)
    assert "\n" not in str(told.value)


def test_a_damaged_file_is_told(encoder: Path, tmp_path: Path) -> None:
    folder = biphase.export(encoder, tmp_path / "out", onnx=True)
    with pytest.raises(InputError, match="has ONNX files already"):
        biphase.export(folder, tmp_path / "again", onnx=True)
    with full_disk(20_000), pytest.raises(InputError, match=r"model\.onnx cannot be quantized \(.*; is the disk full"):
        onnx_files.quantize(folder)
    flip_bit(folder / "onnx" / "model.onnx")
    with pytest.raises(InputError, match=r"onnx/model\.onnx is damaged"):
        biphase.load(folder)
    (folder / "onnx" / "model.onnx").write_bytes(b"\x08nothing")
    with pytest.raises(InputError, match=r"onnxruntime cannot read .*model\.onnx"):
        onnx_files.OnnxNetwork(folder / "onnx" / "model.onnx")


def test_a_pickle_in_the_folder_of_a_module_is_never_opened(encoder: Path, tmp_path: Path) -> None:
    source = make_embedder(encoder, tmp_path / "source")
    (source / "2_Dense" / "model.safetensors").unlink()
    torch.save({}, source / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(InputError, match="pickles are never opened"):
        load_named(source)
    with pytest.raises(InputError, match="cannot be loaded as an embedding model"):
        biphase.export(source, tmp_path / "out", onnx=True)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def kept(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A classifier that was trained for a moment, its score, and the file of its test rows."""
    folder = tmp_path_factory.mktemp("kept")
    rows = [
        {"text": text, "label": label} for label, text in (("boy", TEXTS[1]), ("girl", TEXTS[2])) for _ in range(20)
    ]
    rows = [row | {"text": f"{row['text']} {number % 7}"} for number, row in enumerate(rows)]
    settings = {"max_steps": 3, "learning_rate": 1e-3, "device": "cpu"}
    data = {"train": rows, "validation": rows[::3], "test": rows[::2]}
    score = biphase.finetune(encoder, "who", data=data, scores=folder / "scores", keep=folder / "kept", **settings)
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::2]), encoding="utf-8")
    return SimpleNamespace(folder=folder / "kept", score=score, test=folder / "test.jsonl", root=folder)


@pytest.mark.parametrize("source", mostly_later(["file", "folder"], "file"))
def test_int8_is_scored_on_the_users_task(source: str, kept: SimpleNamespace, tmp_path: Path, capsys: Any) -> None:
    [data] = (kept.root / "scores" / "data").iterdir()
    test = kept.test if source == "file" else data
    folder = biphase.export(kept.folder, tmp_path / "out", int8=True, test=test)
    assert "lacks" not in capsys.readouterr().err  # the copy gets its hashes last
    card = (folder / "README.md").read_text()
    told = re.search(r"accuracy (\S+) points( \[.*\])? \((\S+) → (\S+), 20 test examples of who", card)
    assert told is not None
    assert told[3] == f"{100 * kept.score.metrics['test']['accuracy']:.2f}"
    assert re.search(
        r"smaller; (\d+\.\d times as fast .* texts of \d+ to \d+ tokens|speed unknown: the measurements differ)",
        card,
    )
    assert (folder / "onnx" / "model_quantized.onnx").stat().st_size < (folder / "onnx" / "model.onnx").stat().st_size
    weights = onnx.load(folder / "onnx" / "model_quantized.onnx").graph.initializer
    scales = [onnx.numpy_helper.to_array(weight) for weight in weights if weight.name.endswith("_scale")]
    assert max(scale.size for scale in scales) == 64  # one for each column of a matrix
    predicted = biphase.predict(folder, kept.test)  # what was copied is whole
    assert len(predicted) == 20


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        ([2.04, 1.96, 2.0], "2.0 times as fast (2.5 by processor time) on 3 texts of 1 to 4 tokens"),
        (
            [1.9, 2.0, 2.0],
            "speed unknown: the measurements differ, as on a busy machine",
        ),  # by the clock a round gives another digit
    ],
)
def test_a_speed_is_told_where_all_rounds_agree(
    seconds: list[float], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The networks take turns, and the first turn of a round does not count."""
    turns: list[str] = []

    def time_pass(network: str, batches: object) -> tuple[float, float]:
        number, turn = divmod(len(turns) // 2, worth.TURNS)
        turns.append(network)
        if turn != 1:
            return (1e-9, 1e-9) if turn == 0 else (9.0, 9.0)
        return (seconds[number], 2.5) if network == "whole" else (1.0, 1.0)

    monkeypatch.setattr(worth, "time_pass", time_pass)
    batches = [{"attention_mask": torch.tensor(mask)} for mask in ([[1, 1, 1, 1], [1, 0, 0, 0]], [[1, 1]])]
    assert worth.tell_speed("whole", "int8", batches).startswith(told)  # type: ignore[arg-type]
    assert turns == ["whole", "int8"] * (worth.ROUNDS * worth.TURNS)


@pytest.mark.slow
@pytest.mark.minutes
def test_a_loss_that_was_not_measured_is_said(kept: SimpleNamespace, encoder: Path, tmp_path: Path) -> None:
    biphase.export(kept.folder, tmp_path / "kept", int8=True)
    assert re.search(
        r"the same label .* Its loss on a task was not measured", (tmp_path / "kept/README.md").read_text()
    )
    biphase.export(encoder, tmp_path / "encoder", int8=True)
    assert re.search(
        r"the cosine .* is .* 0\.99\d+ at least.* Its loss on a task was not",
        (tmp_path / "encoder/README.md").read_text(),
    )


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification", "single_label_classification"])
def test_agreement_is_told_in_the_form_of_the_answer(problem: str) -> None:
    """A score by scipy's correlation; a set of labels by each decision; a label by the largest logit."""
    generator = torch.Generator().manual_seed(0)
    outputs_NC = torch.randn(8, 1 if problem == "regression" else 3, generator=generator)
    others_NC = outputs_NC + 0.5 * torch.randn(outputs_NC.shape, generator=generator)
    batches: Any = [{"attention_mask": torch.ones(4, 2), "texts": part} for part in (slice(0, 4), slice(4, 8))]

    def network(logits_NC: torch.Tensor) -> Any:
        config = SimpleNamespace(problem_type=problem)
        outputs = lambda features: {"logits": logits_NC[features["texts"]]}  # noqa: E731
        return SimpleNamespace(config=config, output_names=["logits"], outputs=outputs)

    told = onnx_files.describe_agreement(network(outputs_NC), network(others_NC), batches)
    if problem == "regression":
        correlation = pearsonr(outputs_NC[:, 0], others_NC[:, 0]).statistic
        assert f"the correlation with the output of the fp32 file is {correlation:.4f}, and the largest" in told
        largest = float((outputs_NC - others_NC).abs().max() / outputs_NC.std(correction=0))
        assert f"difference is {largest:.2f} of the output's standard deviation, for 8 English texts" in told
    elif problem == "multi_label_classification":
        decisions = [round(torch.sigmoid(logit).item()) for logit in outputs_NC.flatten()]
        others = [round(torch.sigmoid(logit).item()) for logit in others_NC.flatten()]
        equal = sum(one == other for one, other in zip(decisions, others, strict=True)) / 24
        assert f"in {equal:.1%} of the classes of 8 English texts" in told and equal < 1
    else:
        equal = accuracy_score(outputs_NC.argmax(1), others_NC.argmax(1))
        assert f"the same label as the fp32 file in {equal:.1%} of the labels of 8 English texts" in told


def test_a_label_that_the_model_does_not_know_is_told(kept: SimpleNamespace, tmp_path: Path) -> None:
    file = tmp_path / "odd.csv"
    file.write_text("text,label\nthe boy Tip,dragon\n")
    with pytest.raises(InputError, match=r"odd\.csv:2: label 'dragon' is not one of task 'who.*': boy, girl"):
        biphase.export(kept.folder, tmp_path / "out", int8=True, test=file)
    assert not (tmp_path / "out").exists()


def write_collection(folder: Path) -> Path:
    (folder / "qrels").mkdir(parents=True)
    for name, prefix in (("corpus", "d"), ("queries", "q")):
        rows = [{"_id": f"{prefix}{number}", "text": text} for number, text in enumerate(TEXTS)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged = "".join(f"q{number}\td{number}\t1\n" for number in range(len(TEXTS)))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    return folder


@pytest.mark.slow
@pytest.mark.minutes
def test_int8_of_an_embedding_model_is_scored_on_judged_texts(encoder: Path, tmp_path: Path) -> None:
    source, judged = make_embedder(encoder, tmp_path / "source"), write_collection(tmp_path / "judged")
    folder = biphase.export(source, tmp_path / "out", int8=True, test=judged)
    # Each text finds itself.
    assert "(100.00 → 100.00, 4 test examples of judged)" in (folder / "README.md").read_text()


# Other programs


NODE_MODULES = os.environ.get("BIPHASE_NODE_MODULES")
"""A folder with `node_modules/@huggingface/transformers`, 475 MB."""
SCRIPT = """
import {{ AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer, env }}
  from '{module}';
env.allowLocalModels = true;
env.allowRemoteModels = false;
env.localModelPath = '{root}/';
{setup}
const texts = {texts};
const outputs = {{}};
for (const [name, load] of [['encoder', AutoModel], ['classifier', AutoModelForSequenceClassification],
    ['tagger', AutoModelForTokenClassification], ['embedder', AutoModel]]) {{
  const tokenizer = await AutoTokenizer.from_pretrained(name);
  const model = await load.from_pretrained(name, {{ dtype: 'fp32' }});
  const output = await model(tokenizer(texts, {{ padding: true }}));
  const last = output.sentence_embedding ?? output.logits ?? output.last_hidden_state;
  outputs[name] = last.tolist();
}}
{tell}(JSON.stringify(outputs));
"""
IMPORTS = {
    "onnxruntime-web/webgpu": "/node_modules/onnxruntime-web/dist/ort.webgpu.bundle.min.mjs",
    "onnxruntime-common": "/node_modules/onnxruntime-common/dist/esm/index.js",
}
PAGE = """<script type="importmap">{imports}</script><script>
const tell = body => fetch('/', {{ method: 'POST', body }});
window.onerror = message => tell(message);
window.onunhandledrejection = event => tell('' + event.reason);
</script><script type="module">{script}</script>"""


def run_in_node(root: Path) -> str:
    module = f"{NODE_MODULES}/node_modules/@huggingface/transformers/dist/transformers.node.mjs"
    script = root / "run.mjs"
    script.write_text(
        SCRIPT.format(module=module, root=root / "models", texts=json.dumps(TEXTS), setup="", tell="console.log")
    )
    return subprocess.run(["node", str(script)], capture_output=True, text=True, check=True).stdout.splitlines()[-1]


def run_in_chromium(root: Path) -> str:
    """A page of a server of this process runs the script, and posts what came out."""
    assert NODE_MODULES
    (root / "node_modules").symlink_to(Path(NODE_MODULES) / "node_modules")
    module = "/node_modules/@huggingface/transformers/dist/transformers.web.js"
    setup = "env.backends.onnx.wasm.wasmPaths = '/node_modules/onnxruntime-web/dist/';"  # else they come from the web
    script = SCRIPT.format(module=module, root="/models", texts=json.dumps(TEXTS), setup=setup, tell="await tell")
    (root / "index.html").write_text(PAGE.format(imports=json.dumps({"imports": IMPORTS}), script=script))
    said: Queue[str] = Queue()

    class Handler(SimpleHTTPRequestHandler):
        extensions_map: ClassVar = {**SimpleHTTPRequestHandler.extensions_map, ".mjs": "text/javascript"}

        def do_POST(self) -> None:
            said.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=root)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={root / 'profile'}")
        browser = subprocess.Popen(["chromium", *options, f"http://127.0.0.1:{server.server_port}/"], stderr=DEVNULL)
        try:
            return said.get(timeout=120)
        finally:
            browser.kill()
            browser.wait()
            server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("program", ["node", "chromium"])
def test_transformers_js_computes_the_same(encoder: Path, tmp_path: Path, program: str) -> None:
    if not (NODE_MODULES and shutil.which(program)):
        pytest.skip(f"needs {program}, and BIPHASE_NODE_MODULES")
    sources = {
        "encoder": make_family("llama-tied", encoder, tmp_path / "llama"),
        "classifier": KINDS["a classifier"](encoder, tmp_path / "sources-classifier"),
        "tagger": KINDS["a tagger"](encoder, tmp_path / "sources-tagger"),
        "embedder": make_embedder(encoder, tmp_path / "sources-embedder"),
    }
    for name, source in sources.items():
        biphase.export(source, tmp_path / "models" / name, onnx=True)
    outputs = json.loads({"node": run_in_node, "chromium": run_in_chromium}[program](tmp_path))
    for name in sources:
        folder = tmp_path / "models" / name
        batch = AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
        *_, expected = expected_outputs(folder, batch).values()
        kept = batch["attention_mask"].bool() if expected.ndim > 2 else ...
        assert np.abs(np.array(outputs[name]) - expected.numpy())[kept].max() < 1e-4, name


def test_fastembed_embeds_the_same(encoder: Path, tmp_path: Path) -> None:
    fastembed = pytest.importorskip("fastembed")
    from fastembed.common.model_description import ModelSource, PoolingType
    from sentence_transformers import SentenceTransformer

    folder = biphase.export(encoder, tmp_path / "out", onnx=True)
    embedder = fastembed.TextEmbedding
    embedder.add_custom_model(
        model="ours", pooling=PoolingType.MEAN, normalization=True, sources=ModelSource(hf="none/none"), dim=32,
        model_file="onnx/model.onnx",
    )  # fmt: skip
    computed = np.array(list(embedder("ours", specific_model_path=str(folder)).embed(TEXTS)))
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, normalize_embeddings=True)
    assert np.abs(computed - expected).max() < 1e-5


def test_openvino_computes_the_same(encoder: Path, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")

    source = make_family("llama-tied", encoder, tmp_path / "source")
    folder = biphase.export(source, tmp_path / "out", onnx=True)
    batch = AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(str(folder / "onnx" / "model.onnx"), "CPU", exact)
    inputs = {entry.any_name: batch[entry.any_name].numpy() for entry in compiled.inputs}
    computed = compiled(inputs)["last_hidden_state"]
    expected = expected_outputs(folder, batch)["last_hidden_state"].numpy()
    kept = batch["attention_mask"].bool().numpy()
    assert np.abs(computed - expected)[kept].max() < 1e-4
